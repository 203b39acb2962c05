"""`silva synth`: rows are the tokens that were played, are chosen again, capped, clean, and learned from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.runs import WORLDS

from silva.assembly import Assembly
from silva.config.load import load
from silva.data.dialogues import dialogue
from silva.data.rows import read_file
from silva.registries import REGISTRIES
from silva.rendering.supervised import supervised_rows
from silva.storage.rollouts import read_rollouts

from .conftest import API

TINY = "model = {type = 'tiny', layers = 1, width = 16, heads = 2, kv_heads = 1}\n"
PARITY = f"""{TINY}
environments = [{{type = "{WORLDS}:Parity", eval_size = 8}}]
rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 100}}}}
synth = {{tasks = 6, samples_per_task = 2, best = 0, only_solved = false}}
"""


@pytest.fixture
def synth(silva):
    Path("p.toml").write_text(PARITY)
    return partial(silva, command="synth")


def rows_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("synth", folder, "dialogues.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "tags"])
def test_a_row_is_trained_on_the_tokens_that_were_played(synth, form):
    """Two questions, two calls, two answers: the tools on offer stand in the prompt."""
    config = f"""{TINY}
    environments = [{{type = "calculator", digits = 3, chain = 2}}]
    rollout = {{limits = {{max_turn_tokens = 400, max_episode_tokens = 4000}}}}
    rendering = {{tools = "{form}"}}
    synth = {{tasks = 3, samples_per_task = 1}}
    """
    Path("sums.toml").write_text(config)
    synth("@", "sums.toml", "--policy", "expert", "--name", "sums")
    renderer = Assembly(load(["@sums.toml"], REGISTRIES).config).renderer
    played = {each.task: each.trajectory for each in read_rollouts(Path("synth/sums/episodes.parquet"))}
    found = list(read_file(Path("synth/sums/dialogues.jsonl")))
    assert len(found) == len(played) == 3
    for row in found:
        trajectory = played[row.values["provenance"]["task"]]
        segments = [segment for turn in trajectory.turns for segment in turn.segments]
        (learned,) = supervised_rows(renderer, dialogue(row))
        assert learned.tokens.tolist() == [token for segment in segments for token in segment.tokens]
        spoken = [segment.source == "expert" for segment in segments for _ in segment.tokens]
        trained = learned.trained["assistant"].tolist()
        unlike = [i for i, (one, other) in enumerate(zip(trained, spoken, strict=True)) if one != other]
        # A script ends its turn after a tag; a policy has stopped at the tag, so nothing is learned there.
        assert len(unlike) == (2 if form == "tags" else 0) and not any(trained[i] for i in unlike)
        assert 0 < sum(spoken) < len(spoken)
        assert "calculator" in renderer.decode(segments[0].tokens) and len(trajectory.turns) == 4


def test_other_filters_choose_again_and_play_nothing(synth, monkeypatch):
    how = ("--name", "a", "--policy", "random")
    out, _ = synth("@", "p.toml", *how, "--json")
    whole, everything = json.loads(out), Path("synth/a/dialogues.jsonl").read_bytes()
    assert whole["episodes"] == 12 == whole["rows"] + sum(whole["left_out"].values())

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("silva.assembly.load_model", never)
    out, err = synth("@", "p.toml", *how, "--synth.max_rows", "1", "--json")
    assert "all 12 episodes were played before; rows are chosen from them" in err
    assert json.loads(out)["rows"] == 1
    assert json.loads(out)["left_out"]["surplus"] == 11
    assert Path("synth/a/dialogues.jsonl").read_bytes() == everything.splitlines(keepends=True)[0]
    synth("@", "p.toml", *how, command="synthesize")
    assert Path("synth/a/dialogues.jsonl").read_bytes() == everything
    _, err = synth("@", "p.toml", *how, "--samples", 3, code=2)
    assert "synth/a holds another synthesis: synth.samples_per_task was 2, is 3" in err


def test_no_row_is_exit_code_3_and_tasks_are_those_of_training(synth):
    out, _ = synth("@", "p.toml", "--synth.min_reward", "99", code=3)
    assert "0 rows of 12 episodes" in out and " reward" in out
    tasks = {each.task for each in read_rollouts(Path("synth/tiny-parity/episodes.parquet"))}
    assert tasks == {f"parity/train/{number}" for number in range(6)}


def test_why_episodes_failed_is_said(synth):
    Path("broken.py").write_text("def grade(reply, answer):\n    raise ValueError('no grader')\n")
    world = {"type": "dataset", "rows": [{"prompt": f"{n}?", "answer": "1"} for n in range(9)],
             "reward": "broken.py:grade"}  # fmt: skip
    how = ("--model.type=tiny", "--policy", "expert", "--name", "b", "--samples", 1)
    out, _ = synth(f"--environments={json.dumps([world])}", *how, code=3)
    count = json.loads(Path("synth/b/summary.json").read_text())["episodes"]
    assert f"left out: {count} failed\nfailed: {count} x " in out and "no grader" in out and count > 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gsm8k",), "got 'gsm8k', expected a configuration (@ FILE) or keys: suites are held out"),
        (("@p.toml", "--environments.0.eval_share=1.0"), "parity: all tasks are held out; expected"),
        (("@p.toml", '--synth.decontaminate=["no/such.jsonl"]'), "synth.decontaminate: no/such.jsonl: "),
        (("@p.toml", '--synth.decontaminate=["gsm9k"]'), 'did you mean "gsm8k"?'),
        (("@p.toml", '--synth.decontaminate=["humaneval"]'), "suite humaneval: it"),
        (("@p.toml", '--synth.decontaminate=["xbench"]'), "suite xbench: "),
        (("@p.toml", '--synth.languages=["xx"]'), "synth.languages.0"),
        (("@p.toml", "--synth.best=-1"), "synth.best"),
    ],
)
def test_bad_input_is_said_before_anything_is_played(synth, arguments, said):
    _, err = synth(*arguments, code=2)
    assert said in err and not Path("synth").exists()


QUESTION = "Ann has {} apples and Bob gives her as many again, how many apples does Ann have now?"


def test_what_an_evaluation_set_asks_is_left_out_and_reported(synth):
    rows = [{"question": QUESTION.format(n), "answer": str(2 * n)} for n in range(40)]
    world = {"type": "dataset", "name": "apples", "rows": rows, "reward": {"type": "exact_match"}}
    Path("held.jsonl").write_text(
        "".join(json.dumps({"question": f"Hard: {row['question']}"}) + "\n" for row in rows[::2])
        + json.dumps({"question": "How many?"}) + "\n"
    )  # fmt: skip
    how = ("--model.type=tiny", "--policy", "expert", "--samples", 1, "--name", "apples")
    long = "--rollout.limits.max_episode_tokens=2000"
    clean = '--synth.decontaminate=["held.jsonl"]'
    # 17 words: 13 in a row that hold the number tell the questions apart only if it is among them
    out, _ = synth(f"--environments={json.dumps([world])}", *how, long, clean, "--synth.ngram=17")
    played = {row["messages"][-2]["content"] for row in rows_of("apples")}
    asked = {row["question"] for row in rows[1::2]}
    assert played and all(any(question in text for question in asked) for text in played)
    summary = json.loads(Path("synth/apples/summary.json").read_text())
    left = summary["left_out"]["contaminated"]
    assert left > 0 and left + len(rows_of("apples")) == summary["episodes"]
    assert summary["decontamination"] == {
        "ngram": 17,
        "sets": {str(Path("held.jsonl").resolve()): {"texts": 20, "too_short": 1, "left_out": left}},
    }  # fmt: skip
    assert f"held.jsonl: {left} left out by 17 words in a row that one of its 20 questions has" in out


@pytest.mark.slow
def test_a_cap_that_is_met_writes_the_rows_that_were_paid_for(synth, server):
    """A request costs 18e-6: 10 tokens of input, 4 of output."""
    Path("api.toml").write_text(API.format(url=server.url))
    how = ("@", "api.toml", "--name", "api")
    _, err = synth(*how, "--engine.max_cost=0.0005", code=1)
    some = rows_of("api")
    assert 0 < len(some) < 12 and Path("synth/api/journal.jsonl").exists()
    assert f"{len(some)} rows of the episodes that ended before the cap was met" in err
    assert "of 12 episodes are kept" in err and "would be exceeded" in err
    out, _ = synth(*how, "--engine.max_cost=1.0", "--json")
    rows, summary = rows_of("api"), json.loads(out)
    assert [row for row in rows if row in some] == some and not Path("synth/api/journal.jsonl").exists()
    duplicates = summary["left_out"]["duplicate"]
    assert len(rows) + duplicates == 12 and summary["left_out"] | {"duplicate": 0} == dict.fromkeys(
        summary["left_out"], 0
    )
    for row in rows:
        replies = sum(message["role"] == "assistant" for message in row["messages"])
        # It reports 10 tokens of input each time; a context holds at least what was said in it before.
        asked = sum(10 + 4 * turn for turn in range(replies))
        assert row["provenance"]["cost"] == pytest.approx((asked + 2 * 4 * replies) * 1e-6)
        assert row["provenance"]["model"] == "m"
    spent = summary["spent"]
    assert spent["cost"] <= 18e-6 * len(server.bodies) + 1e-9 <= spent["cost"] + spent["unknown_cost"] + 2e-9


@pytest.mark.slow
def test_what_an_expert_played_is_learned(synth):
    config = f"""{TINY}
    environments = [{{type = "{WORLDS}:Parity", eval_size = 8}}]
    rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 100}}}}
    synth = {{tasks = 120, samples_per_task = 1}}
    steps = 20
    trainer = {{optimizer = {{lr = 1e-2}}}}
    eval = {{every = 0, tasks = 2}}
    monitoring = {{terminal = "off", tensorboard = false, report = false}}
    """
    Path("p.toml").write_text(config)
    synth("@", "p.toml", "--policy", "expert", "--name", "taught")
    data = json.dumps([{"path": "synth/taught/dialogues.jsonl"}])
    synth("@", "p.toml", "--name", "pupil", f"--data.sources={data}", "--data.validation=0.2", command="sft")
    metrics = [json.loads(line) for line in Path("runs/pupil/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/validation/nll"] for row in metrics if "eval/validation/nll" in row]
    assert losses[0] > 5 and losses[-1] < 2  # nats a token: a reply is one of two letters, and an end

"""`silva eval` and its folder: the same bytes however it was played, nothing repeated, what is asked for."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from tests.runs import WORLDS

from silva.commands import COMMANDS
from silva.commands import evaluate as commands_evaluate
from silva.commands.asked import APIS, EvalRequest, asked
from silva.evaluation import evaluator, store
from silva.storage.rollouts import read_rollouts

CONFIG = f"""
model = {{type = "tiny", layers = 1, width = 32, heads = 2, kv_heads = 1, context = 256}}
environments = [{{type = "{WORLDS}:Parity", eval_size = 16, delay = 2.0}}]
rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 128}}}}
eval = {{tasks = 16, samples_per_task = 4}}
monitoring = {{tensorboard = false}}
"""
FILES = ("episodes.parquet", "summary.json")


@pytest.fixture(autouse=True)
def _config(silva):
    Path("e.toml").write_text(CONFIG)


def bytes_of(name: str) -> list[bytes]:
    """Without the name, which is part of the summary."""
    return [(Path("evals") / name / file).read_bytes().replace(name.encode(), b"") for file in FILES]


@pytest.mark.slow
def test_the_same_bytes_at_every_concurrency_and_number_of_threads(silva):
    """64 episodes, whose environments take their time at random."""
    found = []
    for concurrent, threads in ((1, 1), (8, 1), (64, 1), (8, 2)):
        name = f"at-{concurrent}-{threads}"
        silva("@", "e.toml", "--name", name, f"--engine.max_concurrent={concurrent}",
              f"--placement.threads={threads}")  # fmt: skip
        found.append(bytes_of(name))
    assert len(read_rollouts(Path("evals/at-8-1/episodes.parquet"))) == 64
    assert all(each == found[0] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "disk"])
def test_what_ends_it_early_loses_nothing(silva, monkeypatch, how):
    silva("@", "e.toml", "--name", "whole")
    write, played = store.Journal.append, []

    def append(self, row, spent=None):
        if len(played) == 20 and how == "disk":
            raise OSError(28, "No space left on device")
        write(self, row, spent)
        played.append(row.trajectory.id)
        if len(played) == 20 and how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(store.Journal, "append", append)
        _, err = silva("@", "e.toml", "--name", "cut", code=130 if how == "ctrl-c" else 2)
    kept = len(played)
    assert 20 <= kept < 30
    assert f"evals/cut: {kept} of 64 episodes are kept; the same command goes on with the others" in err
    again, play = [], evaluator.play
    monkeypatch.setattr(evaluator, "play", lambda *a, **how: again.append(how["id"]) or play(*a, **how))
    out, err = silva("@", "e.toml", "--name", "cut", "--json")
    assert f"evals/cut: goes on, with {kept} of 64 episodes kept" in err
    assert len(again) == 64 - kept and not {*again} & {*played}
    assert bytes_of("cut") == bytes_of("whole")
    more, err = silva("@", "e.toml", "--name", "cut", "--json")
    assert more == out and len(again) == 64 - kept and "finished before, so nothing is played" in err


@pytest.mark.slow
def test_a_finished_one_is_shown_where_nothing_may_be_written(silva, monkeypatch):
    """Also if it holds an episode without a result, which would be played again elsewhere."""
    play = evaluator.play

    async def broken(task, *rest, id, **how):
        played = await play(task, *rest, id=id, **how)
        return dataclasses.replace(played, failure="redo", error="broken") if id.endswith("/3") else played

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "play", broken)
        out, _ = silva("@", "e.toml", "--tasks", 2, "--json")
    monkeypatch.setattr(store, "lock", refused)
    monkeypatch.setattr(evaluator, "play", refused)
    shown, err = silva("@", "e.toml", "--tasks", 2, "--json")
    assert shown == out and json.loads(out)[0]["left_out"] == 2
    assert "evals/tiny-parity: it was finished before, and nothing may be written there" in err


def refused(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.slow
def test_the_page_has_every_transcript_and_the_summary_means(silva):
    out, _ = silva("@", "e.toml")
    folder = Path("evals/tiny-parity")
    page = (folder / "report.html").read_text()
    rows = read_rollouts(folder / "episodes.parquet")
    assert all(f'"{row.trajectory.id}"' in page for row in rows) and "success (avg@4)" in out
    assert "<title>tiny-parity" in page and '"evaluation":true' in page
    (found,) = json.loads((folder / "summary.json").read_text())["episodes"]
    of = [sum(len(turn.reply_tokens) for turn in row.trajectory.turns) for row in rows]
    assert found["count"] == 64 and found["means"]["all"]["response_tokens"] == pytest.approx(sum(of) / 64)
    solved = [n for n, row in zip(of, rows, strict=True) if row.trajectory.metrics["success"] == 1]
    assert found["means"]["solved"]["count"] == len(solved) > 0
    assert found["means"]["solved"]["response_tokens"] == pytest.approx(sum(solved) / len(solved))


@pytest.mark.slow
def test_another_configuration_has_another_folder_or_is_refused(silva):
    silva("@", "e.toml", "--tasks", 2)
    silva("@", "e.toml", "--tasks", 3)
    assert sorted(path.name for path in Path("evals").iterdir()) == ["tiny-parity", "tiny-parity-2"]
    _, err = silva("@", "e.toml", "--tasks", 3, "--name", "tiny-parity", code=2)
    assert "evals/tiny-parity holds another evaluation: eval.tasks was 2, is 3" in err
    silva("@", "e.toml", "--tasks", 3, "--name", "tiny-parity", "--overwrite")
    assert len(read_rollouts(Path("evals/tiny-parity/episodes.parquet"))) == 12
    silva("@", "e.toml", "--tasks", 2, "--model.layers", 2)  # another model of the same name
    assert Path("evals/tiny-parity-3/summary.json").exists()
    assert read("@", "e.toml", "--model.dtype", "bfloat16").model["dtype"] == "bfloat16"
    assert read("@", "e.toml", "--policy", "expert", "--model.dtype", "bfloat16").model == {}


@pytest.mark.slow
def test_pass_at_chosen_k(silva):
    out, _ = silva("@", "e.toml", "--json", "--eval.pass_at=[1,3]")
    means = {row["metric"]: row["mean"] for row in json.loads(out)}
    assert {*means} == {"success", "reward", "pass@1", "pass@3"}
    assert means["pass@1"] == pytest.approx(means["success"])  # by definition
    _, err = silva("@", "e.toml", "--eval.pass_at=[5]", code=2)
    assert "pass_at: got 5, expected at most samples_per_task = 4" in err


def read(*arguments: str) -> EvalRequest:
    return asked(COMMANDS["eval"].read("eval", list(arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_an_api_by_its_name(silva, api):
    found = read("@", "e.toml", "--api", api, "--model", "some/model")
    engine = found.config.engine
    assert engine.model == "some/model" and api in engine.base_url
    assert engine.key_variable == f"{api.upper()}_API_KEY"
    assert found.usual_name == "model-parity" and found.weights == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--api nowhere --model m", "--api: got 'nowhere', expected openai, anthropic, deepseek"),
        ("--api openai", "--api openai: which model? expected --model NAME too"),
        ("--model a --weights b", "--weights and --model: give one of them"),
        ("--steps 1,2", "--steps: it chooses weights of a series"),
        ("--weights nowhere", "--weights nowhere: no such file or folder"),
        ("--weights-dir .", ".: no weights there"),
        ("--tasks none", "--tasks: got 'none', expected a whole number above 0"),
        ("--name a/b", "--name: got 'a/b', expected the name of one folder"),
        ("--data x", "--data: it is about suites; expected the name of a suite too"),
        ("--policy nobody", "--policy: got 'nobody', expected model, expert, random"),
        ("--policy expert --model m", "--model with --policy expert"),
    ],
)
def test_options_that_make_no_sense_are_named(silva, options, words):
    _, err = silva("@", "e.toml", *options.split(), code=2)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("@ e.toml --reward math", "--reward: no option of silva eval; expected silva eval --regrade"),
        ("@ e.toml --split train", "--split: no option of silva eval; expected silva eval --regrade"),
        (
            "@ e.toml --output x",
            "--output: no option of silva eval; expected silva eval compare or silva eval exp",
        ),
        ("compare a b --tasks 2", "--tasks: no option of silva eval compare; expected a model that plays or"),
        (
            "export a --to inspect --json",
            "--json: no option of silva eval export; expected a model that plays",
        ),
        ("--list --samples 2", "--samples: no option of silva eval --list; expected a model that plays or"),
        (
            "--regrade a --reward math --to inspect",
            "--to: no option of silva eval --regrade; expected silva eval e",
        ),
    ],
)
def test_options_of_another_form_are_refused(silva, arguments, words):
    assert words in silva(*arguments.split(), code=2)[1]


def test_damaged_files_are_named_with_what_to_do(silva):
    how = ("@", "e.toml", "--tasks", 2, "--policy", "expert", "--name", "e", "--monitoring.report=false")
    silva(*how)
    episodes, summary = (Path("evals/e") / name for name in ("episodes.parquet", "summary.json"))
    whole, told = episodes.read_bytes(), summary.read_bytes()
    episodes.write_bytes(whole[:-9])
    assert "put it back, or --overwrite plays everything again" in silva(*how, code=1)[1]
    episodes.write_bytes(whole)
    summary.write_bytes(told[:-9])
    assert "evals/e/summary.json: cannot be read as JSON" in (err := silva(*how, code=1)[1])
    assert "remove it, and the same command writes it again" in err
    summary.unlink()
    _, err = silva("compare", "e", "e", code=2)
    assert "e: evals/e/summary.json is missing; the command that made it writes it again" in err
    silva(*how)
    assert (episodes.read_bytes(), summary.read_bytes()) == (whole, told)


def test_a_full_disk_at_the_report_is_said_and_the_next_start_plays_nothing(silva, monkeypatch):
    how = ("@", "e.toml", "--tasks", 2, "--policy", "expert", "--name", "e")
    with monkeypatch.context() as patch:
        patch.setattr(commands_evaluate, "write_report", no_room)
        _, err = silva(*how, code=2)
    assert "silva: evals/e cannot be written: No space left on device. What was played before is kept" in err
    monkeypatch.setattr(evaluator, "play", None)
    silva(*how)
    assert Path("evals/e/report.html").exists() and not Path("evals/e/journal.jsonl").exists()


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")

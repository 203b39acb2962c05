"""`silva eval`: series of checkpoints, suites by name, APIs with a cap; what a command line asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models.test_sources import save
from tests.runs import WORLDS

from silva.config.sections import TinyModel
from silva.evaluation.suites import SUITES
from silva.storage.rollouts import read_rollouts

from .conftest import API

TINY = "model = {type = 'tiny', layers = 1, width = 16, heads = 2, kv_heads = 1, context = 128}\nseed = 5\n"
PARITY = f"""
environments = [{{type = "{WORLDS}:Parity", eval_size = 8}}]
rollout = {{limits = {{max_turn_tokens = 4, max_episode_tokens = 100}}}}
eval = {{tasks = 8}}
monitoring = {{report = false}}
"""


@pytest.mark.slow
def test_a_series_has_a_row_a_step_each_as_when_it_is_alone(silva):
    model = TinyModel(layers=1, width=16, heads=2, kv_heads=1, context=128)
    for step in (10, 20, 30):
        save(Path("runs/r"), model, step)
    Path("runs/r/config.toml").write_text(TINY + PARITY)
    rows = json.loads(silva("--weights-dir", "runs/r", "--json")[0])
    by_step = {step: [row for row in rows if row["step"] == step] for step in (10, 20, 30)}
    assert len(rows) == sum(map(len, by_step.values())) == 6
    assert len({row["mean"] for row in rows if row["metric"] == "reward"}) > 1  # the steps differ
    for step in (10, 30):
        assert json.loads(silva("--weights", f"runs/r@step_{step}", "--json")[0]) == by_step[step]
    assert json.loads(silva("--weights", "runs/r", "--json")[0]) == by_step[30]
    table, _ = silva("--weights-dir", "runs/r/checkpoints", "--steps", "30,10")
    assert [line.split()[1] for line in table.splitlines() if line.startswith("│")] == ["10", "30"]
    whole = Path("evals/r-step_10-30-parity")
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [10, 20, 30] and "eval/parity/success" in metrics[0]
    assert list((whole / "tensorboard").iterdir())
    assert [r.step for r in read_rollouts(whole / "episodes.parquet")] == [10] * 8 + [20] * 8 + [30] * 8
    assert "no step_7; it has step_10, step_20, step_30" in silva(
        "--weights-dir", "runs/r", "--steps", "7", code=2
    )[1]  # fmt: skip


def test_a_suite_by_its_name(silva):
    rows = [("What is 2 + 3?", "It is 5.\n#### 5"), ("What is 2 * 4?", "#### 8")]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    Path("data/gsm8k").mkdir(parents=True)
    Path("data/gsm8k/test.jsonl").write_text("\n".join(lines))
    how = ("--policy", "expert", "--model.type=tiny", "--model.layers=1", "--monitoring.report=false")
    out, _ = silva("gsm8k", "--data", "data", "--samples", 2, "--tasks", 5, *how, "--json")
    success = {row["metric"]: row for row in json.loads(out)}["success"]
    assert (success["environment"], success["mean"], success["n"]) == ("gsm8k", 1.0, 2)
    episodes = read_rollouts(Path("evals/expert-gsm8k/episodes.parquet"))
    assert len(episodes) == 4 and "What is 2 " in str(episodes[0].trajectory.turns[0].messages)
    assert 'did you mean "gsm8k"?' in silva("gsm8", "--data", "data", *how, code=2)[1]


def test_a_suite_has_room_for_all_turns_that_it_allows(silva):
    """Two of the first three tasks take more than the 8 turns that a run has by default."""
    pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval mpmath")
    how = ("--policy", "expert", "--model.type=tiny", "--model.layers=1", "--monitoring.report=false")
    out, _ = silva("bfcl_multi_turn", "--tasks", 3, *how, "--json")
    assert json.loads(out)[0]["mean"] == 1.0
    for each in SUITES.values():
        assert each.turns > max(sum(each.calls.values()), each.keys.get("max_actions", 0),
                                each.keys.get("max_tool_calls", 0))  # fmt: skip


def test_suites_are_listed(silva):
    table, _ = silva("--list")
    assert all(f"\n{name} " in f"\n{table}" for name in SUITES)
    assert [row["name"] for row in json.loads(silva("--list", "--json")[0])] == [*SUITES]


@pytest.mark.slow
def test_a_cap_that_is_met_keeps_what_was_paid_for(silva, server):
    """A request costs 18e-6 (10 tokens of input, 4 of output); one more may cost the bytes of its prompt."""
    Path("api.toml").write_text(API.format(url=server.url))
    _, err = silva("@", "api.toml", "--engine.max_cost=0.0005", code=1)
    paid = len(server.bodies)
    assert "engine.max_cost = 0.0005 would be exceeded" in err and paid > 3
    kept = int(err.partition("evals/m-guess_number: ")[2].split()[0])
    assert 0 < kept < 12 and f"{kept} of 12 episodes are kept; the same command goes on" in err
    _, err = silva("@", "api.toml", "--engine.max_cost=0.0005", code=1)  # it counts what was paid before
    assert len(server.bodies) - paid <= 3  # an episode that begins asks for less than one that goes on
    out, err = silva("@", "api.toml", "--engine.max_cost=1.0", "--json")
    assert {row["mean"] for row in json.loads(out) if row["metric"] == "success"} == {1.0}
    summary = json.loads(Path("evals/m-guess_number/summary.json").read_text())
    cost, unknown = summary["spent"]["cost"], summary["spent"]["unknown_cost"]  # of those cut off by the cap
    assert cost - 1e-9 <= 18e-6 * len(server.bodies) <= cost + unknown + 1e-9
    requests = len(server.bodies)
    assert (
        json.loads(silva("@", "api.toml", "--json")[0]) == json.loads(out) and len(server.bodies) == requests
    )


def test_an_api_that_was_gone_is_asked_again_for_what_it_did_not_answer(silva, server):
    Path("api.toml").write_text(API.format(url=server.url))
    answer = server.script
    server.script = lambda number, body: (400, {}, {}) if number % 2 else answer(number, body)
    once = ("--rollout.redo=0",)
    rows = json.loads(silva("@", "api.toml", "--json", *once)[0])
    assert 0 < (left := rows[0]["left_out"]) < 12
    server.script = answer
    out, err = silva("@", "api.toml", "--json", *once)
    assert f"goes on, with {12 - left} of 12 episodes kept" in err
    assert json.loads(out)[0]["left_out"] == 0 and json.loads(out)[0]["n"] == 12

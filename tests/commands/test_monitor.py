"""`silva monitor`: a run in the terminal."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from silva.cli import main
from silva.storage.metrics import append_metrics
from silva.storage.rollouts import RolloutRow, rollouts_path, write_rollouts
from silva.types import Message, Segment, Trajectory, Turn

pytestmark = pytest.mark.slow


def episode(step: int, index: int, reward: float, error: str | None = None) -> RolloutRow:
    said = (Message("user", f"question {step}.{index}"), Message("assistant", f"answer {step}.{index}"))
    turn = Turn(f"s{step}r{index}/t0", (Segment("environment", (1,)),), said, fresh=True)
    played = Trajectory(
        f"s{step}r{index}", (turn,), "error" if error else "terminated", rewards={"r": reward},
        failure="redo" if error else None, error=error,
    )  # fmt: skip
    status = "failed" if error else "trained"
    return RolloutRow(step, f"lake/{index}", "lake", f"lake/{index}", played, status)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/old and runs/new, of which the newer has rollouts."""
    for age, name in enumerate(("old", "new")):
        folder = tmp_path / "runs" / name
        (folder / "rollouts").mkdir(parents=True)
        (folder / "ledger.jsonl").write_text("")
        (folder / "config.toml").write_text("steps = 4\n")
        for step in range(1, 4):
            append_metrics(folder / "metrics.jsonl", step, {
                "train/loss": 1 / step, "reward/raw": 0.1 * step, "perf/tokens_per_second": 100.0,
                "eval/lake/success": 0.25 * step, "eval/lake/success_ci_low": 0.4, "train/entropy": 3 - step,
                "train/mismatch_kl": 0.001 * step, "perf/mfu": 0.5 / step,
            })  # fmt: skip
        for path in (folder / "ledger.jsonl", folder / "metrics.jsonl"):
            os.utime(path, (1e9 + age, 1e9 + age))
    for step in (1, 2):
        rows = [episode(step, 0, 1.0), episode(step, 1, 0.2), episode(step, 2, 0.0, "ConnectionError: gone")]
        write_rollouts(rollouts_path(folder / "rollouts", step), rows)
    (folder / "run.log").write_text("2026-11-28T00:00:00+00:00 warning: mind the gap\n")
    (folder / "summary.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def shown(capsys, *arguments: str) -> str:
    assert main(["monitor", *arguments]) == 0
    return capsys.readouterr().out


def test_the_newest_run_with_its_numbers_warnings_and_failed_episodes(runs, capsys):
    text = shown(capsys)
    assert text.startswith("new, finished: step 3\n")
    assert "warning: mind the gap" in text
    assert "ci_low" not in text
    assert "step 2, lake, lake/2: reward 0, failed (ConnectionError: gone)" in text
    assert "answer 2.1" in text
    assert "answer 2.0" not in text
    assert text.index("answer 2.1") < text.index("answer 1.1")


def test_each_number_is_a_line(runs, capsys):
    """First, last, mean, lowest, highest."""
    lines = {line.split()[0]: line.split()[1:] for line in shown(capsys, "new").splitlines() if line.strip()}
    assert lines["train/entropy"] == ["2", "0", "1", "0", "2"]
    assert lines["train/mismatch_kl"] == ["0.001", "0.003", "0.002", "0.001", "0.003"]
    assert lines["eval/lake/success"] == ["0.25", "0.75", "0.5", "0.25", "0.75"]
    assert lines["perf/mfu"] == ["0.5", "0.1667", "0.3056", "0.1667", "0.5"]


PRIME_RL = [  # of its trainer and of its orchestrator, in the units that they log
    {"loss/mean": -0.5, "entropy/all/mean": 0.75, "mismatch_kl/all/mean": 0.002, "optim/grad_norm": 0.25,
     "perf/throughput": 4096.0, "perf/mfu": 38.5, "perf/peak_memory": 71.0, "time/step": 12.0},
    {"train/agg/effective/solver/reward/mean": 0.625, "train/agg/effective/num_output_tokens/mean": 512.0,
     "train/agg/all/solver/reward/mean": 0.5, "eval/aime/effective/solver/avg@4": 0.375},
]  # fmt: skip


def test_a_run_of_prime_rl_at_wandb(runs, capsys, monkeypatch):
    rows = [{**half, "step": step, "_step": 2 * step} for step in (0, 1) for half in PRIME_RL]
    run = SimpleNamespace(
        name="solves", id="1a2b3c4d", state="running", scan_history=lambda: rows, files=lambda: [],
        summary={"_step": 3, "step": 1}, config={}, created_at="2026-11-28T00:00:00Z",
    )  # fmt: skip
    api = SimpleNamespace(
        run=lambda name: {"me/lake/1a2b3c4d": run}[name],
        runs=lambda project, order: {"me/lake": [run]}[project],
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=lambda: api))
    assert shown(capsys, "wandb:me/lake/1a2b3c4d").startswith("solves, running: step 1\n")
    found = json.loads(shown(capsys, "wandb:me/lake/1a2b3c4d", "--json"))["metrics"]
    assert {row["about"]: (row["last_step"], row["last"]) for row in found} == {
        "loss": (1, -0.5), "entropy": (1, 0.75), "mismatch KL": (1, 0.002), "reward": (1, 0.625),
        "evaluation": (1, 0.375), "gradient norm": (1, 0.25), "reply tokens": (1, 512.0),
        "throughput (tokens/s)": (1, 4096.0), "MFU": (1, 38.5), "seconds": (1, 12.0),
        "memory (GiB)": (1, 71.0),
    }  # fmt: skip
    assert len(found) == 11
    assert shown(capsys, "--list", "wandb:me/lake").split()[:5] == [
        "1a2b3c4d",
        "solves",
        "running",
        "step",
        "1",
    ]


def test_as_json_with_every_option(runs, capsys):
    found = json.loads(shown(capsys, "new", "--json", "--reward-threshold", "0.1", "--max-samples", "1",
                             "--save-dir", "plots"))  # fmt: skip
    numbers = {row["key"]: row for row in found["metrics"]}
    assert numbers["train/loss"]["first"] == 1
    assert numbers["train/loss"]["last"] == pytest.approx(1 / 3)
    assert numbers["reward/raw"]["mean_of_last"] == pytest.approx(0.2)
    assert numbers["perf/tokens_per_second"]["about"] == "throughput (tokens/s)"
    assert [row["task"] for row in found["samples"]] == ["lake/2"]
    assert found["warnings"] == ["mind the gap"]
    assert "plots/loss.svg" in found["plots"]
    assert Path("plots/loss.svg").read_text().startswith("<svg")


def test_one_half_of_it(runs, capsys):
    assert "train/loss" not in shown(capsys, "new", "--samples-only")
    assert "answer" not in shown(capsys, "new", "--metrics-only")
    assert "no failed samples" in shown(capsys, "old", "--samples-only")


def test_a_list_has_the_newest_first(runs, capsys):
    lines = shown(capsys, "--list").splitlines()
    assert [line.split()[:2] for line in lines] == [["new", "finished"], ["old", "interrupted"]]
    assert "step 3 of 4" in lines[0]
    assert json.loads(shown(capsys, "--list", str(runs), "--num-runs", "1", "--json"))[0]["name"] == "new"


@pytest.mark.parametrize(("arguments", "words"), [
    (["nowhere"], "got nowhere, which is no folder"),
    (["a", "b"], "expected one run"),
    (["--max-samples", "x"], "--max-samples: got 'x', expected a number"),
    (["--max-samples", "-1"], "expected a whole number from 0 on"),
    (["--metrics-only", "--samples-only"], "got both, expected one"),
    (["--num-runs", "3"], "--num-runs: it goes with --list"),
    (["."], "got no run; expected a folder with metrics.jsonl"),
    (["wandb:me/p/r"], "Weights & Biases is not installed"),
])  # fmt: skip
def test_what_is_wrong_is_said(runs, capsys, monkeypatch, arguments, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["monitor", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_without_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["monitor"]) == 2
    assert "there is none in runs/" in capsys.readouterr().err
    assert shown(capsys, "--list") == "no runs in runs\n"

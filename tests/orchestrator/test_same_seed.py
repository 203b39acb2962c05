"""The same seed twice: the same bytes, whatever the clock, the hash seed and the engine's batching do."""

import os
import signal
import subprocess
import sys

import pytest
from tests.runs import differences, end_state, metrics, rollouts


def test_another_process_of_the_same_seed_writes_the_same_bytes(server, undisturbed, tmp_path):
    """Two worlds, 20 episodes at once, delays that differ, two updates a batch, evaluations in between."""
    argv = ["rl", f"@{server.config}", "--name", "run", "--output_dir", str(tmp_path)]
    env = os.environ | {"PYTHONHASHSEED": "5", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "silva", *argv], env=env, check=True, capture_output=True)
    assert differences(tmp_path / "run", undisturbed) == []
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/parity/success" in row] == [0, 2, 4]
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])  # it did learn something
    assert len([r for r in rollouts(tmp_path / "run", 1) if r["status"] == "trained"]) == 20


@pytest.mark.parametrize(
    "options",
    [
        ("--engine.max_concurrent", "3"),
        ("--engine.prefill_tokens", "5"),
        ("--engine.cached_sequences", "0"),
        ("--environments.0.workers", "2"),
    ],
)
def test_how_the_engine_batches_and_where_environments_run_changes_nothing(
    server, undisturbed, tmp_path, options
):
    ended = server.rl("run", *options, into=tmp_path)
    assert ended.status == 0, ended.output
    assert differences(ended.path, undisturbed) == []


def test_drafts_change_nothing_killed_and_resumed_or_not(server, tmp_path):
    """A policy that repeats itself, so that what it says is drafted."""
    options = [
        *("--rollout.sampling.temperature", "0.1"),
        *("--rollout.limits.max_turn_tokens", "24"),
        *("--engine.max_concurrent", "2"),  # where few requests run, drafts pay most
    ]
    plain = server.rl("plain", *options, "--engine.drafts", "off", into=tmp_path)
    assert plain.status == 0, plain.output
    drafted = server.rl("drafted", *options, into=tmp_path)
    assert drafted.status == 0, drafted.output
    assert sum(row.get("perf/drafts/accepted_tokens", 0) for row in metrics(drafted.path)) > 50
    assert not any("perf/drafts/accepted_tokens" in row for row in metrics(plain.path))
    killed = server.rl("killed", *options, into=tmp_path, crash="optim:5")
    assert killed.status == -signal.SIGKILL
    resumed = server.rl("killed", *options, "--resume", into=tmp_path)
    assert resumed.status == 0, resumed.output
    expected = end_state(plain.path)
    assert differences(drafted.path, expected) == differences(resumed.path, expected) == []


def test_another_seed_gives_another_run(server, undisturbed, tmp_path):
    """Or the comparisons above would prove nothing."""
    ended = server.rl("run", "--seed", "1", into=tmp_path)
    different = differences(ended.path, undisturbed)
    assert {"metrics", "sealed", "weights/step_4/model.safetensors", "rollouts/step_1.parquet"} <= {
        *different
    }

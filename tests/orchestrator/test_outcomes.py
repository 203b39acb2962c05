"""Runs with nothing to learn from: equal rewards, broken environments, losses that are not finite."""

import json
import math

import pytest
import torch
from tests.runs import metrics, rollouts, small

import silva
from silva.errors import NonFiniteError
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import audit, history, read
from silva.trainer import learner

SHORT = ("--steps", "2", "--eval.every", "0")


def events(run, event):
    return [record.fields for record in history(read(run / "ledger.jsonl")) if record.event == event]


def test_steps_without_any_difference_are_empty_and_the_run_goes_on(server, tmp_path):
    """Every group is paid the same: 1 + 2 tries of 5 groups, no update, no new version."""
    options = (*SHORT, "--environments.0.paid", "constant", "--environments.1.paid", "constant")
    ended = server.rl("run", *options, into=tmp_path)
    assert ended.status == 3, ended.output  # at its end: nothing was learned
    assert ended.output.count("all 15 groups were left out (15 zero_variance). ") == 1
    assert "of the replies were cut off" in ended.output and "The episodes of a task" in ended.output
    assert "nothing was learned from rewards" in ended.output
    assert json.loads((ended.path / "summary.json").read_text())["steps_trained"] == 0
    assert server.rl("run", *options, "--resume", into=tmp_path).status == 3  # a finished run
    for row in metrics(ended.path)[1:]:
        assert (row["groups/trained"], row["groups/zero_variance"], row["groups/failed"]) == (0, 15, 0)
        assert row["reward/raw"] > 0.9 and "train/loss" not in row and "advantage/std" not in row
    assert events(ended.path, "published") == events(ended.path, "trained") == []
    assert {d["reason"] for d in events(ended.path, "dropped")} == {"zero_variance"}
    rows = rollouts(ended.path, 1)
    dropped = [
        r for r in rows if (r["status"], r["reason"], r["advantage"]) == ("dropped", "zero_variance", None)
    ]
    assert len(dropped) == len(rows) == 60
    assert audit(read(ended.path / "ledger.jsonl"), finished=True) == []


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"fails": "construction", "share": 1}, "construction: OSError: no such world ("),
        ({"fails": "step", "share": 1}, "step: ValueError: the step is broken ("),
        ({"paid": "nan"}, "step: reward 'pay' is nan, expected a finite number"),
    ],
)
def test_a_run_in_which_every_episode_fails_gives_up_and_says_why(server, tmp_path, keys, error):
    broken = [f"--environments.{i}.{key}={value}" for i in (0, 1) for key, value in keys.items()]
    ended = server.rl("run", *broken, into=tmp_path)
    assert ended.status == 3 and "Traceback" not in ended.output
    assert "step 1: all 60 episodes failed" in ended.output and f"60 x {error}" in ended.output
    assert f"parity: an episode failed: {error}" in ended.output
    tracebacks = (ended.path / "run.log").read_text().count("Traceback (most recent call last)")
    assert tracebacks == (2 if "fails" in keys else 0)  # one for each world


def test_episodes_that_never_end_are_cut_by_the_time_limit(server, tmp_path):
    options = (
        "--environments.0.fails",
        "hang",
        "--environments.0.share",
        "0.3",
        "--rollout.limits.timeout",
        "0.5",
    )
    ended = server.rl("run", *SHORT, *options, into=tmp_path)
    assert ended.status == 0, ended.output
    failed = [row for row in rollouts(ended.path, 1) if row["status"] == "failed"]
    assert failed and {row["failure"] for row in failed} == {"redo"}  # a reset knows nothing of the policy
    assert "timeout = 0.5 s" in failed[0]["reason"]


def test_a_run_in_which_most_episodes_fail_stops_with_a_checkpoint(server, tmp_path):
    """Both worlds fail in half of their episodes and more than 20 % are too many: step 3 is the last."""
    worlds = [f"--environments.{i}.share=0.5" for i in (0, 1)]
    options = (*worlds, "--steps", "9", "--eval.every", "0", "--rollout.redo", "0")
    ended = server.rl("run", *options, "--rollout.max_failed", "0.2", into=tmp_path)
    assert ended.status == 3 and "Traceback" not in ended.output
    assert "more than 20% of the episodes gave no result in each of the last steps" in ended.output
    rows = metrics(ended.path)
    assert rows[-1]["step"] == 3 and all(
        r["trajectories/failed"] > 0.2 * r["trajectories/played"] for r in rows[1:]
    )
    assert (
        f"{rows[-1]['trajectories/failed']} of {rows[-1]['trajectories/played']} episodes failed"
        in ended.output
    )
    assert (ended.path / "checkpoints" / "step_3").is_dir()
    again = server.rl("run", *options, "--resume", "--rollout.max_failed", "1", into=tmp_path)
    assert again.status == 0 and metrics(ended.path)[-1]["step"] == 9


def test_episodes_that_fail_are_counted_and_stay_out_of_every_baseline(server, tmp_path):
    options = ("--environments.0.share", "0.4", "--rollout.redo", "0")
    ended = server.rl("run", *SHORT, *options, into=tmp_path)
    assert ended.status == 0, ended.output
    row, rows = metrics(ended.path)[1], rollouts(ended.path, 1)
    failed = [r for r in rows if r["status"] == "failed"]
    assert row["trajectories/failed"] == len(failed) > 0
    assert all(r["advantage"] is None and r["reason"].startswith("redo: step: ValueError") for r in failed)
    scored = [r for r in rows if r["failure"] is None]
    assert row["reward/raw"] == pytest.approx(sum(r["reward_raw"] for r in scored) / len(scored))
    partly = {r["group"] for r in failed} & {r["group"] for r in rows if r["status"] == "trained"}
    assert partly  # a group trains on the rest of it, whose advantages are their own:
    for group in partly:
        advantages = [r["advantage"] for r in rows if r["group"] == group and r["advantage"] is not None]
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
    before = metrics(ended.path)[0]
    left_out = before["eval/parity/left_out"]
    assert 0 < left_out < 8
    bounds = before["eval/parity/success_bound_low"], before["eval/parity/success_bound_high"]
    assert bounds[1] - bounds[0] == pytest.approx(left_out / 8)
    why = f"{left_out} x step: ValueError: the step is broken (tests/worlds.py:"
    assert f"parity: {left_out} of 8 held-out episodes gave no usable result and are left out: {why}" in (
        ended.output
    )
    played = (
        sum(len(rollouts(ended.path, step)) for step in (1, 2)) - 2 * 8
    )  # the last evaluation's are there
    assert f"of {played} training episodes failed and were left out:" in ended.output


def test_an_environment_that_cannot_be_closed_keeps_its_result(server, tmp_path):
    options = ("--environments.0.fails", "close", "--environments.0.share", "1")
    ended = server.rl("run", *SHORT, *options, into=tmp_path)
    assert ended.status == 0 and metrics(ended.path)[1]["trajectories/failed"] == 0
    summary = json.loads((ended.path / "summary.json").read_text())
    with_loss = sum(row.get("train/trained_tokens", 0) for row in metrics(ended.path))
    assert 0 < summary["tokens_trained"] == with_loss < summary["tokens_in_rows"]


# Numbers that are not finite: in this process, with a loss that breaks on demand.


def train(folder):
    """Its self-check is off, whose calls would be counted too."""
    more = {"steps": 3, "trainer.updates_per_step": 2, "trainer.max_nonfinite": 2, "checkpoint.every": 1}
    return silva.train(small(folder, **more, **{"trainer.optimizer.lr": 1e-2}))


@pytest.fixture
def breaking(monkeypatch):
    """`breaking({3, 4})`: the loss of these updates is not finite."""

    def make(updates):
        compute, count = learner.objective.compute, 0

        def broken(spec, inputs):
            nonlocal count
            count += inputs.logprobs.requires_grad
            per_token, numbers = compute(spec, inputs)
            return (per_token * math.nan if count in updates else per_token), numbers

        monkeypatch.setattr(learner.objective, "compute", broken)

    return make


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path, breaking):
    breaking({3})  # the first of step 2
    outcome = train(tmp_path)
    rows = metrics(tmp_path / "run")
    assert [row.get("train/nonfinite") for row in rows] == [None, 0, 1, 0]
    assert "train/loss" in rows[2]["nonfinite"] and rows[2]["train/loss"] is None
    assert "step 2: update skipped" in (tmp_path / "run" / "run.log").read_text()
    assert outcome.summary["steps"] == 3
    from safetensors.torch import load_file

    weights = load_file(outcome.weights / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_after_several_in_a_row_training_gives_up_with_its_checkpoints_whole(tmp_path, breaking):
    breaking({4, 5})  # the last of step 2, the first of step 3
    with pytest.raises(
        NonFiniteError, match=r"trainer\.max_nonfinite = 2.*Lower trainer\.optimizer\.lr"
    ) as error:
        train(tmp_path)
    assert error.value.exit_code == 3
    store = CheckpointStore(tmp_path / "run" / "checkpoints", read_only=True)
    assert store.newest() == (2, tmp_path / "run" / "checkpoints" / "step_2") and store.skipped == []

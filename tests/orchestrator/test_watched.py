"""Every place that plays episodes reports their faults and tries again as often as `rollout.redo` says."""

import json
import random
from pathlib import Path
from typing import Literal

import pytest
from tests.runs import small
from tests.worlds import Parity, ParityEpisode

import silva
from silva.commands.evaluate import evaluate_config
from silva.commands.sft import supervise
from silva.config.load import load
from silva.errors import NoSignalError
from silva.protocols import Environment
from silva.registries import REGISTRIES
from silva.types import Task


class Faulty(Parity):
    """Its reset fails in a share of the episodes, in one split alone."""

    type: Literal["faulty"] = "faulty"
    split: Literal["train", "eval"] = "eval"

    def _build(self, task: Task) -> Environment:
        broken = task.split == self.split and random.Random(task.seed).random() < self.share
        return ParityEpisode(self.model_copy(update={"fails": "reset"}), task, broken)


def keys(folder, split, share, **more):
    world = {"type": f"{__file__}:Faulty", "split": split, "share": share, "eval_size": 8}
    return small(folder, environments=[world], **{"eval.tasks": 8}, **more)


def log(folder):
    return (folder / "run" / "run.log").read_text()


FAULT = "faulty: an episode failed: reset: ValueError: the reset is broken (tests/worlds.py:"


@pytest.mark.slow
def test_faults_of_an_evaluation_are_reported(tmp_path):
    summary = silva.train(keys(tmp_path, "eval", 1.0)).summary
    assert log(tmp_path).count("Traceback (most recent call last)") == log(tmp_path).count(FAULT) == 1
    (row,) = summary["eval_after"]
    assert (row["mean"], row["left_out"]) == (None, 8)
    assert "evaluation at step 0: faulty: 8 of 8 held-out episodes gave no usable result" in log(tmp_path)


def test_faults_of_rollouts_are_reported(tmp_path):
    with pytest.raises(NoSignalError):
        silva.train(keys(tmp_path, "train", 1.0))
    assert log(tmp_path).count("Traceback (most recent call last)") == log(tmp_path).count(FAULT) == 1


def test_faults_of_the_evaluations_around_a_warm_start_are_reported(tmp_path):
    warm = {"warm_start": {"steps": 2, "episodes_per_step": 4}}
    summary = supervise(keys(tmp_path, "eval", 1.0, **warm)).summary
    assert log(tmp_path).count("Traceback (most recent call last)") == log(tmp_path).count(FAULT) == 1
    assert log(tmp_path).count(": faulty: 8 of 8 held-out episodes gave no usable result") == 2
    assert summary["steps_trained"] == 2 and "nothing was learned" not in log(tmp_path)


@pytest.mark.parametrize(("redo", "left_out"), [(0, True), (20, False)])
@pytest.mark.slow
def test_episodes_of_every_evaluation_are_tried_again(tmp_path, redo, left_out):
    half = keys(tmp_path, "eval", 0.5, **{"rollout.redo": redo})
    found = [*silva.train(half).summary["eval_before"]]
    config = load([], REGISTRIES, values=half).config
    found += [row for e in evaluate_config(config) for row in e.rows()]
    warm = half | {"name": "warm", "warm_start": {"steps": 1, "episodes_per_step": 4}}
    supervise(warm)
    found += json.loads(Path(tmp_path, "warm", "summary.json").read_text())["eval_after"]
    assert len(found) == 6 and all(0 <= row["left_out"] < 8 for row in found)
    assert [row["left_out"] > 0 for row in found] == [left_out] * 6

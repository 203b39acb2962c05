"""Metrics of a batch and of evaluations by hand: who counts, and what is not known is not there."""

import dataclasses

from tests.algorithms.by_hand import failed, group, one_turn

from silva.evaluation.evaluator import Evaluation
from silva.evaluation.statistics import Estimate
from silva.orchestrator.buffer import Batch, Dropped, Piece
from silva.orchestrator.metrics import batch_metrics, eval_metrics
from silva.types import Task, Trajectory


def solved(id, success):
    return dataclasses.replace(one_turn(id, 1, 2.0), metrics={"success": success})


def test_success_is_a_metric_of_the_environments_that_report_it():
    played = [
        group("g", solved("a", 1.0), solved("b", 0.0), failed("c"), environment="lake"),
        group("h", one_turn("d", 1, 0.5, -0.25), one_turn("e", 1, 1.5), environment="sea"),
    ]
    batch = Batch(1, [Piece([played[0]]), Piece([], [Dropped(played[1], "zero_variance")])])
    found = batch_metrics(batch)
    assert {key: value for key, value in found.items() if key.startswith("success/")} == {"success/lake": 0.5}
    assert (found["reward/lake/raw"], found["reward/sea/raw"], found["reward/raw"]) == (2.0, 1.0, 1.5)
    assert (found["reward/shaped"], found["trajectories/failed"], found["stop/terminated"]) == (1.4375, 1, 1)
    assert (found["groups/trained"], found["groups/zero_variance"], found["groups/failed"]) == (1, 1, 0)


def test_an_evaluation_has_bounds_where_something_is_left_out():
    left_out = (Task("t", "lake", 0, {}), Trajectory("e", (), "error", failure="redo", error="broken"))
    estimates = {"success": Estimate(0.5, 0.25, 0.75, 2), "reward": Estimate(1.0, 0.5, 1.5, 2)}
    plain = {
        "eval/lake/success": 0.5, "eval/lake/success_ci_low": 0.25, "eval/lake/success_ci_high": 0.75,
        "eval/lake/reward": 1.0, "eval/lake/reward_ci_low": 0.5, "eval/lake/reward_ci_high": 1.5,
    }  # fmt: skip
    bounds = {"success": (0.125, 0.875)}
    assert eval_metrics([Evaluation("lake", estimates, bounds, ())]) == plain
    assert eval_metrics([Evaluation("lake", estimates, bounds, (left_out,) * 3)]) == plain | {
        "eval/lake/success_bound_low": 0.125, "eval/lake/success_bound_high": 0.875, "eval/lake/left_out": 3,
    }  # fmt: skip
    assert eval_metrics([Evaluation("lake", {}, {}, (left_out,))]) == {"eval/lake/left_out": 1}

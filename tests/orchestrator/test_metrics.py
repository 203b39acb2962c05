"""Metrics of a batch and of evaluations by hand: who counts, and what is not known is not there."""

import dataclasses

import pytest
from tests.algorithms.by_hand import failed, group, one_turn

from silva.evaluation.evaluator import Evaluation
from silva.evaluation.statistics import Estimate
from silva.orchestrator.buffer import Batch, Dropped, Piece
from silva.orchestrator.metrics import (
    batch_metrics,
    engine_metrics,
    eval_metrics,
    forest_metrics,
    mean_of_updates,
    perf_metrics,
)
from silva.types import Group, Message, Segment, Task, ToolCall, Trajectory, Turn


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


def test_an_evaluation_says_how_many_replies_hold_thoughts():
    replies = [Message("assistant", "up", reasoning=thought) for thought in ("north", " ", None, "south")]
    turns = [Turn(f"e/{i}", (), (Message("assistant", "x", reasoning="earlier"), reply), fresh=not i)
             for i, reply in enumerate(replies)]  # fmt: skip
    episode = (Task("t", "lake", 0, {}), Trajectory("e", tuple(turns), "terminated"))
    assert eval_metrics([Evaluation("lake", {}, {}, (episode,))]) == {"eval/lake/thoughts": 0.5}


def turn(id, tokens, *calls):
    said = Message("assistant", "", tool_calls=tuple(ToolCall(name, {}) for name in calls))
    zeros = (0.0,) * tokens
    segment = Segment("policy", (7,) * tokens, zeros, zeros, zeros, (0,) * tokens)
    return Turn(id, (Segment("environment", (1, 2)), segment), (said,), fresh=id.endswith("/0"))


def test_a_forest_by_hand():
    """Root a of three turns; b leaves it after one, c leaves b after two; d and e just say the same."""
    a = turn("a/0", 3, "search"), turn("a/1", 2, "search"), turn("a/2", 1)
    b = a[0], turn("b/1", 4, "search", "python"), turn("b/2", 1)
    c = *b[:2], turn("c/2", 5)
    leaves = (
        Trajectory("a", a, "terminated"),
        Trajectory("b", b, "terminated", parent="a", fork_turn=1),
        Trajectory("c", c, "terminated", parent="b", fork_turn=2),
        Trajectory("d", (turn("d/0", 2),), "terminated"),
        Trajectory("e", (turn("e/0", 2),), "terminated"),
    )
    assert forest_metrics([Group("g", Task("t", "lake", 0, {}), leaves)]) == {
        "rollout/steps": 8,
        "rollout/sampled_tokens": 20,
        "rollout/tool_calls": 4,
        "forest/branches": 0.4,
        "forest/fork_turn": 1.5,
        "forest/depth": (0 + 1 + 2 + 0 + 0) / 5,
        "forest/sampled_share": (3 + 2 + 1 + 4 + 1 + 5 + 2 + 2) / (6 + 8 + 12 + 2 + 2),
        "forest/unique_leaves": 3 / 5,
    }
    assert forest_metrics([Group("g", Task("t", "lake", 0, {}), leaves[3:])]) == {
        "rollout/steps": 2, "rollout/sampled_tokens": 4,
    }  # fmt: skip


def test_shares_of_ages_add_up_to_one_over_updates_that_tell_of_different_ages():
    updates = [
        {"clipped": 0.2},  # of age 0 only, so it tells of none
        {"clipped": 0.4, "share/age0": 0.5, "share/age1": 0.5, "clipped/age0": 0.1, "clipped/age1": 0.3},
        {"clipped": 0.6, "share/age1": 0.25, "share/age2": 0.75, "clipped/age1": 0.2, "clipped/age2": 0.4},
        {"clipped": 0.0, "share/age2": 1.0, "clipped/age2": 0.0},
    ]
    assert mean_of_updates(updates) == pytest.approx({
        "train/clipped": 0.3,
        "train/share/age0": 0.375, "train/share/age1": 0.1875, "train/share/age2": 0.4375,
        "train/clipped/age0": 0.075, "train/clipped/age1": 0.125, "train/clipped/age2": 0.1,
    })  # fmt: skip
    assert mean_of_updates(updates[:1]) == {"train/clipped": 0.2}


def test_mfu_is_the_share_of_the_time_of_training_that_its_products_would_take():
    updates = [{"loss": 1.0, "perf/seconds_at_peak": 0.5}, {"loss": 3.0, "perf/seconds_at_peak": 0.25}]
    assert perf_metrics({"train": 3.0, "rollout": 9.0}, updates=updates)["perf/mfu"] == 0.25
    assert "perf/mfu" not in perf_metrics({"train": 3.0}, updates=[{"loss": 1.0}])
    assert mean_of_updates(updates) == {"train/loss": 2.0}  # which all runs of a seed have in common


def test_sharing_and_drafts_are_counted_by_step_and_left_out_where_they_did_nothing():
    before = {"drafted_tokens": 10, "accepted_tokens": 4, "decode_tokens": 100, "seconds_saved": 0.5}
    after = {
        "drafted_tokens": 40,
        "accepted_tokens": 24,
        "decode_tokens": 160,
        "seconds_saved": 0.25,
        "steps": 9,
    }
    drafts = {
        "perf/drafts/drafted_tokens": 30, "perf/drafts/accepted_tokens": 20,
        "perf/drafts/seconds_saved": -0.25, "perf/drafts/tokens_per_step": 60 / 40,
    }  # fmt: skip
    assert engine_metrics(before, after) == drafts
    assert engine_metrics(after, after) == engine_metrics({}, {}) == engine_metrics({}, {"steps": 3}) == {}
    begun_again = engine_metrics(after, before | {"drafted_tokens": 41})
    assert begun_again["perf/drafts/accepted_tokens"] == 0 and begun_again["perf/drafts/tokens_per_step"] == 0
    shared = {"shared_tokens": 5}, {"shared_tokens": 20}
    assert engine_metrics(before | shared[0], after | shared[1]) == drafts | {"perf/shared_tokens": 0.25}
    assert engine_metrics(after | shared[0], after | shared[1]) == {}

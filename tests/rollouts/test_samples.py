"""Trajectories to rows: the loss follows provenance, each sampled token is trained exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.rollouts.samples import next_states, to_samples, trajectory_samples
from silva.types import Group, Segment, Source, Task, Trajectory, Turn

TASK = Task("t", "w", 0, {})


def segment(source: Source, tokens: list[int]) -> Segment:
    if source != "policy":
        return Segment(source, tuple(tokens))
    numbers = tuple(-0.5 - t for t in tokens)
    return Segment(
        source, tuple(tokens), numbers, numbers, numbers, tuple(t + 1 for t in tokens), temperature=0.7
    )


def shown_then_said(number: int, shown: int, source: Source, said: int, fresh: bool) -> Turn:
    first = 100 * number
    return Turn(
        id=f"e/{number}",
        segments=(
            segment("environment", list(range(first, first + shown))),
            segment(source, list(range(first + shown, first + shown + said))),
        ),
        fresh=fresh or number == 0,
    )


turn_shapes = st.tuples(
    st.integers(1, 20), st.sampled_from(["policy", "expert", "environment"]), st.integers(1, 9), st.booleans()
)


@given(st.lists(turn_shapes, min_size=1, max_size=6))
@settings(deadline=None, derandomize=True)
def test_every_sampled_token_is_trained_once_and_no_other(shapes) -> None:
    turns = tuple(shown_then_said(i, *shape) for i, shape in enumerate(shapes))
    trajectory = Trajectory("e", turns, "terminated")
    rows = trajectory_samples(trajectory, "g")
    said = [t for turn in turns for s in turn.segments if s.source != "environment" for t in s.tokens]
    policy = [t for turn in turns for s in turn.segments if s.source == "policy" for t in s.tokens]
    trained = [int(t) for row in rows for t in row.tokens[row.loss_weights > 0]]
    assert trained == said
    assert sum(float(row.loss_weights.sum()) for row in rows) == len(said)
    assert len(policy) == trajectory.tokens("policy")
    for row in rows:
        sampled = ~np.isnan(row.logprobs)
        assert (row.loss_weights[sampled] == 1).all()
        np.testing.assert_array_equal(row.logprobs[sampled], -0.5 - row.tokens[sampled])
        np.testing.assert_array_equal(row.versions, np.where(sampled, row.tokens + 1, -1))
        np.testing.assert_array_equal(row.temperatures[sampled], 0.7)
        assert (row.trajectory, row.group) == ("e", "g")
    sampled_ids = [int(t) for row in rows for t in row.tokens[~np.isnan(row.logprobs)]]
    assert sampled_ids == policy


@given(st.lists(turn_shapes, min_size=1, max_size=6))
@settings(deadline=None, derandomize=True)
def test_rows_are_the_turns_put_together(shapes) -> None:
    turns = tuple(shown_then_said(i, *shape) for i, shape in enumerate(shapes))
    by_id = {turn.id: [t for s in turn.segments for t in s.tokens] for turn in turns}
    for row in trajectory_samples(Trajectory("e", turns, "terminated"), "g"):
        assert row.turn_spans[0][0] == 0 and row.turn_spans[-1][1] == len(row)
        for (start, stop), turn in zip(row.turn_spans, row.turn_ids, strict=True):
            assert row.tokens[start:stop].tolist() == by_id[turn]
        fresh = [turn.fresh for turn in turns if turn.id in row.turn_ids]
        assert fresh == [True] + [False] * (len(fresh) - 1)


def test_next_states_are_rows_of_one_token_more() -> None:
    """Of scored episodes that have one, if the model's context has room for the token."""
    turns = (shown_then_said(0, 2, "policy", 1, True),)
    cut = Trajectory("a", turns, "max_turns", next_context=(0, 1, 2, 7, 8))
    failed = replace(cut, id="b", failure="mask", error="late")
    group = Group("g", TASK, (cut, failed, Trajectory("c", turns, "terminated")))
    (row,) = next_states([group], 6)
    assert row.tokens[:5].tolist() == [0, 1, 2, 7, 8] and row.loss_weights.tolist() == [0, 0, 0, 0, 0, 1]
    assert (row.trajectory, row.group, row.temperatures[-1]) == ("a", "g", 1)
    assert next_states([group], 5) == []


def test_rows_are_read_only() -> None:
    turn = shown_then_said(0, 3, "policy", 2, True)
    (row,) = trajectory_samples(Trajectory("e", (turn,), "terminated"), "g")
    arrays = (row.tokens, row.loss_weights, row.logprobs, row.temperatures, row.versions)
    assert not any(array.flags.writeable for array in arrays)
    assert [a.dtype.name for a in arrays] == ["int64", "float32", "float64", "float64", "int64"]


def test_failures_and_silent_trajectories_give_no_rows() -> None:
    turn = shown_then_said(0, 3, "policy", 2, True)
    good = Trajectory("a", (turn,), "terminated")
    masked = Trajectory("b", (turn,), "error", failure="mask", error="NaN")
    empty = Trajectory("c", (), "max_tokens")
    groups = [Group("g1", TASK, (masked, good)), Group("g2", TASK, (empty, good))]
    assert [(row.group, row.trajectory) for row in to_samples(groups)] == [("g1", "a"), ("g2", "a")]


def test_entropies_stand_where_tokens_were_sampled() -> None:
    turns = (shown_then_said(0, 2, "policy", 2, True), shown_then_said(1, 1, "policy", 1, False))
    (row,) = trajectory_samples(Trajectory("e", turns, "terminated"), "g")
    assert row.entropies is not None and not row.entropies.flags.writeable
    np.testing.assert_array_equal(row.entropies, [np.nan, np.nan, -2.5, -3.5, np.nan, -101.5])


def test_entropies_that_are_missing_in_part_are_missing() -> None:
    """Zeros in their place would be taken for certainty."""
    whole = shown_then_said(0, 2, "policy", 2, True)
    silent = replace(segment("policy", [7, 8]), entropies=())
    later = Turn("e/1", (segment("environment", [5]), silent))
    rows = trajectory_samples(Trajectory("e", (whole, later), "terminated"), "g")
    assert [row.entropies for row in rows] == [None]
    fresh = trajectory_samples(Trajectory("e", (whole, replace(later, fresh=True)), "terminated"), "g")
    assert [row.entropies is None for row in fresh] == [False, True]  # each row by itself

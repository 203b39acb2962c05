"""From trajectories to training rows. Loss follows provenance: policy and expert tokens, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from silva.errors import CapabilityError
from silva.routes import joined
from silva.types import Group, Sample, Trajectory, Turn


def to_samples(groups: Iterable[Group]) -> list[Sample]:
    """One row a trajectory, and one more at every later `fresh` turn; failed trajectories give none.

    Raises:
        CapabilityError: a trajectory of a chat API, which gives neither tokens nor log-probabilities.
    """
    return [s for group in groups for t in group.scored for s in trajectory_samples(t, group.key)]


def trajectory_samples(trajectory: Trajectory, group: str) -> list[Sample]:
    if any(s.reported is not None for turn in trajectory.turns for s in turn.segments):
        raise CapabilityError(
            f"trajectory {trajectory.id} cannot be trained: it was played through a chat API, which gives no "
            "token ids and no log-probabilities; such episodes can be evaluated only"
        )
    rows: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.fresh:
            rows.append([])
        rows[-1].append(turn)
    samples = (_sample(turns, trajectory.id, group) for turns in rows)
    return [s for s in samples if s.loss_weights.any()]


def next_states(groups: Iterable[Group], longest: int) -> list[Sample]:
    """Rows that make a critic score the states in which episodes were cut off: the value of their one token
    with a loss.

    That token stands where the policy would have continued. It is never trained, and its id does not matter,
    because a value belongs to the state before a token.

    Args:
        longest: the model's context, which must have room for that token.
    """
    cut = [(t, g.key) for g in groups for t in g.scored if 0 < len(t.next_context) < longest]
    return [to_score(t.next_context, t.next_context[-1:], t.id, key) for t, key in cut]


def to_score(shown: Sequence[int], scored: Sequence[int], trajectory: str, group: str) -> Sample:
    """A row that a trainer scores, at temperature 1, and that is never trained."""
    weights = np.repeat([0.0, 1.0], [len(shown), len(scored)])
    return Sample(
        tokens=_fixed([*shown, *scored], np.int64),
        loss_weights=_fixed(weights, np.float32),
        logprobs=_fixed(np.full(len(weights), np.nan), np.float64),
        temperatures=_fixed(np.ones(len(weights)), np.float64),
        versions=_fixed(np.full(len(weights), -1), np.int64),
        trajectory=trajectory,
        group=group,
    )


def _sample(turns: Sequence[Turn], trajectory: str, group: str) -> Sample:
    segments = [segment for turn in turns for segment in turn.segments]
    lengths = [len(s.tokens) for s in segments]
    scored = np.repeat([bool(s.logprobs) for s in segments], lengths)
    logprobs, versions = np.full(len(scored), np.nan), np.full(len(scored), -1)
    logprobs[scored] = _join(s.logprobs for s in segments)
    versions[scored] = _join(s.versions for s in segments)
    sampled = [s for s in segments if s.source == "policy"]
    known = all(len(s.entropies) == len(s.tokens) for s in sampled)
    if known:
        entropies = np.full(len(scored), np.nan)
        places = np.repeat([s.source == "policy" for s in segments], lengths)
        entropies[places] = _join(s.entropies for s in sampled)
    turn_lengths = [sum(len(s.tokens) for s in turn.segments) for turn in turns]
    ends = np.cumsum(turn_lengths)
    return Sample(
        tokens=_fixed(_join(s.tokens for s in segments), np.int64),
        loss_weights=_fixed(np.repeat([s.source != "environment" for s in segments], lengths), np.float32),
        logprobs=_fixed(logprobs, np.float64),
        temperatures=_fixed(np.repeat([s.temperature for s in segments], lengths), np.float64),
        versions=_fixed(versions, np.int64),
        entropies=_fixed(entropies, np.float64) if known else None,
        trajectory=trajectory,
        group=group,
        routes=joined([(len(s.tokens), s.routes) for s in segments]),
        turn_spans=tuple(zip((ends - turn_lengths).tolist(), ends.tolist(), strict=True)),
        turn_ids=tuple(turn.id for turn in turns),
    )


def _join(values: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(values))


def _fixed(values: Any, dtype: type) -> np.ndarray:
    """Read-only, as rows are shared."""
    out: np.ndarray = np.array(values, dtype)
    out.setflags(write=False)
    return out

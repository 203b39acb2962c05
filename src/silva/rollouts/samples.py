"""From trajectories to training rows. Loss follows provenance: policy and expert tokens, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from silva.types import Group, Sample, Segment, Trajectory, Turn


def to_samples(groups: Iterable[Group]) -> list[Sample]:
    """One row a trajectory, and one more at every later `fresh` turn; failed trajectories give none."""
    return [s for group in groups for t in group.scored for s in trajectory_samples(t, group.key)]


def trajectory_samples(trajectory: Trajectory, group: str) -> list[Sample]:
    rows: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.fresh:
            rows.append([])
        rows[-1].append(turn)
    samples = (_sample(turns, trajectory.id, group) for turns in rows)
    return [s for s in samples if s.loss_weights.any()]


def _sample(turns: Sequence[Turn], trajectory: str, group: str) -> Sample:
    segments = [segment for turn in turns for segment in turn.segments]
    lengths = [sum(len(s.tokens) for s in turn.segments) for turn in turns]
    ends = np.cumsum(lengths)
    expert = any(s.source == "expert" for s in segments)
    return Sample(
        tokens=_join(segments, [s.tokens for s in segments], np.int64),
        loss_weights=_join(segments, [float(s.source != "environment") for s in segments], np.float32),
        logprobs=_join(
            segments, [s.logprobs if s.source == "policy" else np.nan for s in segments], np.float64
        ),
        temperatures=_join(segments, [s.temperature for s in segments], np.float64),
        versions=_join(segments, [s.versions if s.source == "policy" else -1 for s in segments], np.int64),
        trajectory=trajectory,
        group=group,
        turn_spans=tuple(zip((ends - lengths).tolist(), ends.tolist(), strict=True)),
        turn_ids=tuple(turn.id for turn in turns),
        component="ce" if expert else "rl",
    )


def _join(segments: Sequence[Segment], values: Sequence, dtype: type) -> np.ndarray:
    """Per-token array from one scalar or one sequence a segment; read-only, as rows are shared."""
    parts = (
        v if isinstance(v, tuple) else np.full(len(s.tokens), v)
        for s, v in zip(segments, values, strict=True)
    )
    out: np.ndarray = np.fromiter(chain.from_iterable(parts), dtype)
    out.setflags(write=False)
    return out

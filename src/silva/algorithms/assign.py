"""Advantages on samples: each step takes rows and returns rows.

assign ──> whiten_samples ──> clip_samples
  │
  └── or credit.assign_turns, credit.assign_gae: credit that differs within a trajectory
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from silva.algorithms.advantages import ADVANTAGES, OVER, Scores, running_baselines
from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample, Trajectory

# How often a trained token counts, by the trained tokens of its trajectory.
WHITEN_OVER: dict[str, Callable[[int], float]] = {
    "tokens": lambda own: 1.0,
    "trajectories": lambda own: 1.0 / own,
}


def assign(
    samples: Sequence[Sample],
    groups: Sequence[Group],
    kind: str,
    *,
    over: str = "group",
    baselines: Mapping[str, float] | None = None,
) -> list[Sample]:
    """Gives every token of a sample the advantage of its trajectory.

    The reward is `Trajectory.shaped_reward`, its raw part `raw_reward`. Trajectories that failed enter no
    baseline, and their samples are left out of the result: they are not trained.

    Args:
        samples: rows of trajectories in `groups`; a trajectory may have none, one or several.
        groups: every group that the samples come from, whole.
        kind: a name in `ADVANTAGES`.
        over: a name in `OVER`, what a baseline is taken over; `running` always takes the environment.
        baselines: for `running`, by environment, 0 where missing; `next_baselines` gives the next ones.

    Returns:
        The samples of scored trajectories in their order, with `advantages` [T] float64.

    Raises:
        ConfigError: unknown kind or over.
        RecordError: a trajectory id stands twice, a sample's trajectory is in no group, or a reward is
            not finite.
    """
    check_kind(kind, over)
    kept = scored_samples(samples, groups)
    key = OVER["environment" if kind == "running" else over]
    scored = [(i, group, t) for i, group in enumerate(groups) for t in group.scored]
    lengths, so_far = trained_tokens(kept), baselines or {}
    scores = Scores(
        rewards=as_float64(finite_reward(t) for _, _, t in scored),
        groups=as_ids([key(i, group) for i, group, _ in scored]),
        lengths=as_float64(lengths[t.id] for _, _, t in scored),
        baselines=as_float64(so_far.get(group.task.environment, 0.0) for _, group, _ in scored),
        raw=as_float64(t.raw_reward for _, _, t in scored),
    )
    advantages = {
        t.id: a for (_, _, t), a in zip(scored, ADVANTAGES[kind].function(scores).tolist(), strict=True)
    }
    return [s.replace(advantages=np.full(len(s), advantages[s.trajectory])) for s in kept]


def next_baselines(groups: Sequence[Group], baselines: Mapping[str, float]) -> dict[str, float]:
    """The baselines of `running` after the groups' scored trajectories, in their order.

    Args:
        groups: as given to `assign`.
        baselines: before them, by environment; 0 where missing.

    Returns:
        All of `baselines`, those of the groups' environments moved on.

    Raises:
        RecordError: a reward is not finite.
    """
    scored = [(group.task.environment, t) for group in groups for t in group.scored]
    scores = Scores(
        rewards=as_float64(finite_reward(t) for _, t in scored),
        groups=as_ids([environment for environment, _ in scored]),
        baselines=as_float64(baselines.get(environment, 0.0) for environment, _ in scored),
    )
    after = running_baselines(scores)[1].tolist()
    return {**baselines, **{environment: b for (environment, _), b in zip(scored, after, strict=True)}}


def whiten(values: Tensor, weights: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), both over the values as often as their weights say.

    With weights of 1 on trained tokens: the batch normalisation of REINFORCE++ (arXiv:2501.03262). The
    variance is unbiased: divided by the sum of the weights - 1.

    Args:
        values: [N].
        weights: [N], 0 for what must not count, at least 1 in sum.

    Returns:
        [N]; what does not count is shifted and scaled with the others.
    """
    total = weights.sum().clamp(min=1)
    centred_N = values - (weights * values).sum() / total
    variance = (weights * centred_N.square()).sum() / (total - 1).clamp(min=1)
    return centred_N / (variance + eps).sqrt()


def whiten_samples(samples: Sequence[Sample], over: str) -> list[Sample]:
    """The samples with advantages of mean 0 and std 1 over all their trained tokens.

    Args:
        samples: all of a batch, with advantages.
        over: a name in `WHITEN_OVER`: whether each token counts the same, or each trajectory.

    Raises:
        ConfigError: unknown over.
        RecordError: a sample without advantages.
    """
    if over not in WHITEN_OVER:
        raise ConfigError(f"unknown whitening: got over {over!r}, expected one of {', '.join(WHITEN_OVER)}")
    lengths = trained_tokens(samples)
    weights = [(s.loss_weights > 0) * WHITEN_OVER[over](lengths[s.trajectory] or 1) for s in samples]
    return map_advantages(samples, lambda advantages_N: whiten(advantages_N, _joined(weights)))


def clip_samples(samples: Sequence[Sample], low: float, high: float) -> list[Sample]:
    """The samples with advantages between `low` and `high`.

    Raises:
        RecordError: a sample without advantages.
    """
    return map_advantages(samples, lambda advantages_N: advantages_N.clamp(low, high))


def map_advantages(samples: Sequence[Sample], function: Callable[[Tensor], Tensor]) -> list[Sample]:
    """The samples with `function`, [N] float64 to [N], applied to the advantages of all their tokens, joined.

    Raises:
        RecordError: a sample without advantages.
    """
    if not samples:
        return []
    rows = [advantages_of(s) for s in samples]
    changed = function(_joined(rows)).numpy()
    parts = np.split(changed, np.cumsum([len(row) for row in rows])[:-1])
    return [s.replace(advantages=part) for s, part in zip(samples, parts, strict=True)]


def advantages_of(sample: Sample) -> np.ndarray:
    """[T].

    Raises:
        RecordError: it has none.
    """
    if sample.advantages is None:
        raise RecordError(f"advantages of a sample of {sample.trajectory}: got none, expected {len(sample)}")
    return sample.advantages


def scored_samples(samples: Sequence[Sample], groups: Sequence[Group]) -> list[Sample]:
    """The samples whose trajectory has a result that may be used, in their order.

    Raises:
        RecordError: a trajectory id stands twice, or a sample's trajectory is in no group.
    """
    everyone = Counter(t.id for group in groups for t in group.trajectories)
    if twice := sorted(name for name, count in everyone.items() if count > 1):
        raise RecordError(f"advantages: trajectory ids must be unique over groups: got {twice[0]!r} twice")
    for sample in samples:
        if sample.trajectory not in everyone:
            raise RecordError(
                f"advantages: trajectory {sample.trajectory!r} of a sample (group {sample.group!r}): "
                f"got none of that id, expected it in one of {len(groups)} groups"
            )
    scored = {t.id for group in groups for t in group.scored}
    return [sample for sample in samples if sample.trajectory in scored]


def check_kind(kind: str, over: str) -> None:
    """Raises ConfigError for a kind or an over that does not exist."""
    if kind not in ADVANTAGES:
        raise ConfigError(f"unknown advantage: got {kind!r}, expected one of {', '.join(ADVANTAGES)}")
    if over not in OVER:
        raise ConfigError(f"advantage {kind}: got over {over!r}, expected one of {', '.join(OVER)}")


def trained_tokens(samples: Iterable[Sample]) -> Counter[str]:
    """How many tokens of each trajectory carry loss."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[sample.trajectory] += int(np.count_nonzero(sample.loss_weights > 0))
    return counts


def finite_reward(trajectory: Trajectory) -> float:
    """What training sees of its rewards.

    Raises:
        RecordError: that is not finite.
    """
    reward = trajectory.shaped_reward
    if not math.isfinite(reward):
        raise RecordError(f"reward of trajectory {trajectory.id}: got {reward}, expected a finite number")
    return reward


def as_float64(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def as_ids(keys: Sequence[Hashable]) -> Tensor:
    """[B] int64, equal where the keys are."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.int64)


def _joined(rows: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.float64))

"""Advantages: how much better a trajectory did than its group.

The functions are pure: rewards [B] and group ids [B] (any integers) to advantages [B], in the dtype of
the rewards. A group of one has nothing to be compared with: its advantage is 0 (except `raw`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample, Trajectory


def raw(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r: no baseline. Shapes: [B], [B] -> [B]."""
    return rewards.clone()


def mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean of the group (Dr. GRPO, arXiv:2503.20783). Shapes: [B], [B] -> [B]."""
    group_B, count_G = _index(rewards, groups)
    return rewards - (_sums(rewards, group_B, count_G) / count_G)[group_B]


def mean_std(rewards: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A = (r - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300, section 4.1.2).

    The paper leaves open which std; this is the unbiased one (divided by n - 1) with eps = 1e-4, as in
    TRL (others use 1e-6, which matters only where the std is as small). Shapes: [B], [B] -> [B].
    """
    group_B, count_G = _index(rewards, groups)
    centred_B = mean(rewards, groups)
    variance_G = _sums(centred_B.square(), group_B, count_G) / (count_G - 1).clamp(min=1)
    return centred_B / (variance_G.sqrt() + eps)[group_B]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean of the *others* of the group = n / (n - 1) * (r - mean) (RLOO, arXiv:2402.14740).

    Unbiased, as the baseline does not depend on the trajectory itself. Shapes: [B], [B] -> [B].
    """
    group_B, count_G = _index(rewards, groups)
    others_B = _sums(rewards, group_B, count_G)[group_B] - rewards
    count_B = count_G[group_B]
    return torch.where(
        count_B > 1, rewards - others_B / (count_B - 1).clamp(min=1), torch.zeros_like(rewards)
    )


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
    "raw": raw,
}


def assign(samples: Sequence[Sample], groups: Sequence[Group], kind: str) -> list[Sample]:
    """Gives every token of a sample the advantage of its trajectory.

    The reward is `Trajectory.shaped_reward`. Trajectories that failed enter no baseline, and their
    samples are left out of the result: they are not trained.

    Args:
        samples: rows of trajectories in `groups`; a trajectory may have none, one or several.
        groups: every group that the samples come from, whole.
        kind: a name in `ADVANTAGES`.

    Returns:
        The samples of scored trajectories in their order, with `advantages` [T] float32.

    Raises:
        ConfigError: unknown kind.
        RecordError: a trajectory id stands twice, a sample's trajectory is in no group, or a reward is
            not finite.
    """
    if kind not in ADVANTAGES:
        raise ConfigError(f"unknown advantage: got {kind!r}, expected one of {', '.join(ADVANTAGES)}")
    scored = [(t, i) for i, group in enumerate(groups) for t in group.scored]
    rewards_B = torch.tensor([_reward(t) for t, _ in scored], dtype=torch.float64)
    groups_B = torch.tensor([i for _, i in scored], dtype=torch.int64)
    advantages_B = ADVANTAGES[kind](rewards_B, groups_B).tolist()

    everyone = [t.id for group in groups for t in group.trajectories]
    known = set(everyone)
    if len(known) < len(everyone):
        twice = sorted({name for name in everyone if everyone.count(name) > 1})
        raise RecordError(f"advantages: trajectory ids must be unique over groups: got {twice[0]!r} twice")
    by_trajectory = {t.id: advantage for (t, _), advantage in zip(scored, advantages_B, strict=True)}

    result = []
    for sample in samples:
        if sample.trajectory not in known:
            raise RecordError(
                f"advantages: trajectory {sample.trajectory!r} of a sample (group {sample.group!r}): "
                f"got none of that id, expected it in one of {len(groups)} groups"
            )
        if sample.trajectory in by_trajectory:
            value = by_trajectory[sample.trajectory]
            result.append(sample.replace(advantages=np.full(len(sample), value, dtype=np.float32)))
    return result


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.shaped_reward
    if not math.isfinite(reward):
        raise RecordError(f"reward of trajectory {trajectory.id}: got {reward}, expected a finite number")
    return reward


def _index(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Group ids as indices [B] into counts [G]."""
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise RecordError(
            f"groups must align with rewards: got {tuple(groups.shape)} for {tuple(rewards.shape)}, "
            "expected [B] each"
        )
    _, group_B, count_G = torch.unique(groups, return_inverse=True, return_counts=True)
    return group_B, count_G


def _sums(values: Tensor, group_B: Tensor, count_G: Tensor) -> Tensor:
    """Sum of the values of each group: [B] -> [G]."""
    return values.new_zeros(len(count_G)).index_add(0, group_B, values)

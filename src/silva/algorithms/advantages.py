"""Advantages: how much better a trajectory did than what it is compared with.

Pure functions: `Scores` of B trajectories to advantages [B], in the dtype of the rewards; assign.py and
credit.py put them on samples. An advantage is a function and an entry in `ADVANTAGES`. A group of one has
nothing to be compared with: its advantage is 0 (except `reward`, `share` and `running`).
GRPO is `mean_std`, RLOO `leave_one_out`, OPO `length_weighted`, MaxRL `max_rl`, RAE `running`, REINFORCE++
`reward` or (its baseline form) `mean`, whitened, RAGEN's asymmetric clip `mean_std` with bounds of -1 and 3.

Settings read the names here, so this module must import neither torch nor numpy: help has to be instant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from silva.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

    from silva.types import Group

DECAY = 0.95  # of running baselines


@dataclass(frozen=True, eq=False)
class Scores:
    """What a baseline sees of B trajectories, or of B turns.

    Args:
        rewards: [B] raw plus shaped: what training sees.
        groups: [B] ids (any integers) of what is compared with each other.
        lengths: [B] trained tokens; needed by `length_weighted`.
        baselines: [B] running baseline of the group so far, the same within a group; 0 where left out.
        raw: [B] the raw part of the rewards, which `max_rl` and `share` divide by; None if they are all raw.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor | None = None
    baselines: Tensor | None = None
    raw: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("groups", "lengths", "baselines", "raw"):
            value = getattr(self, name)
            if value is not None and (self.rewards.ndim != 1 or value.shape != self.rewards.shape):
                raise RecordError(
                    f"{name} must align with rewards: got {tuple(value.shape)} for "
                    f"{tuple(self.rewards.shape)}, expected [B] each"
                )

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum over the group that each stands in: [B] -> [B]."""
        _, group_B = self.groups.unique(return_inverse=True)
        return values.new_zeros(values.shape).index_add(0, group_B, values)[group_B]

    def group_mean(self) -> Tensor:
        """Mean reward of the group that each stands in: [B]."""
        return self.group_sum(self.rewards) / self.counts()

    def split(self) -> tuple[Tensor, Tensor]:
        """[B] raw rewards, and [B] shaped ones minus their mean over the group."""
        raw_B = self.rewards if self.raw is None else self.raw
        shaped_B = self.rewards - raw_B
        return raw_B, shaped_B - self.group_sum(shaped_B) / self.counts()

    def counts(self) -> Tensor:
        """Size of the group that each stands in: [B]."""
        return self.group_sum(self.rewards.new_ones(self.rewards.shape))


def reward(scores: Scores) -> Tensor:
    """A = r: the reward itself, without a baseline. [B]."""
    return scores.rewards.clone()


def mean(scores: Scores) -> Tensor:
    """A = r - mean of the group (Dr. GRPO, arXiv:2503.20783). [B]."""
    return scores.rewards - scores.group_mean()


def mean_std(scores: Scores, *, eps: float = 1e-4) -> Tensor:
    """A = (r - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300, section 4.1.2). [B].

    The paper leaves open which std; this is the unbiased one (divided by n - 1) with eps = 1e-4, as in
    TRL (others use 1e-6, which matters only where the std is as small).
    """
    centred_B = mean(scores)
    variance_B = scores.group_sum(centred_B.square()) / (scores.counts() - 1).clamp(min=1)
    return centred_B / (variance_B.sqrt() + eps)


def leave_one_out(scores: Scores) -> Tensor:
    """A = r - mean of the *others* of the group = n / (n - 1) * (r - mean) (RLOO, arXiv:2402.14740). [B].

    Unbiased, as the baseline does not depend on the trajectory itself.
    """
    count_B = scores.counts()
    others_B = scores.group_sum(scores.rewards) - scores.rewards
    return (scores.rewards - others_B / (count_B - 1).clamp(min=1)).where(count_B > 1, 0.0)


def length_weighted(scores: Scores) -> Tensor:
    """A = r - sum(l r) / sum(l) of the group, l = trained tokens (OPO, arXiv:2505.23585). [B].

    The baseline of least variance where a trajectory's squared gradient grows with its length.

    Raises:
        RecordError: scores without lengths.
    """
    if scores.lengths is None:
        raise RecordError("length_weighted advantages: got no lengths, expected [B] trained tokens")
    lengths_B = scores.lengths.to(scores.rewards.dtype)
    # A group without a trained token has no baseline, and nobody to use it.
    total_B = scores.group_sum(lengths_B).clamp(min=1)
    return scores.rewards - scores.group_sum(lengths_B * scores.rewards) / total_B


def max_rl(scores: Scores) -> Tensor:
    """A = (r - mean) / mean of |r| + s - mean of s, r raw and s shaped (MaxRL, arXiv:2602.02710). [B].

    For rewards of 0 and 1: the gradient of a truncated log-likelihood of success, so that a task that
    succeeds with probability p weighs about 1 / p. Penalties are not in the denominator: they could
    bring it close to 0. If all raw rewards are 0, the first part is 0. The paper has no negative rewards;
    |r| keeps the sign of their advantages, and this bound for a group of n:

        |A| <= n - 1 + largest s - smallest s
    """
    raw_B, shaped_B = scores.split()
    size_B = scores.group_sum(raw_B.abs())
    centred_B = scores.counts() * raw_B - scores.group_sum(raw_B)
    return (centred_B / size_B).where(size_B > 0, 0.0) + shaped_B


def share(scores: Scores) -> Tensor:
    """A = r / sum of |r| + s - mean of s, r raw and s shaped (Act-PRM's EM: posterior weights). [B].

    For raw rewards of 0 or more, such as p(action | thought): the gradient is that of the expected
    log-likelihood under the posterior over the group. As in `max_rl`, only raw rewards are in the
    denominator; if all of them are 0, the first part is 0. |A| <= 1 + largest s - smallest s.
    """
    raw_B, shaped_B = scores.split()
    size_B = scores.group_sum(raw_B.abs())
    return (raw_B / size_B).where(size_B > 0, 0.0) + shaped_B


def running(scores: Scores, *, decay: float = DECAY) -> Tensor:
    """A = r - b, then b <- decay b + (1 - decay) r, in the order of B (RAE, SPIRAL, arXiv:2506.24119). [B].

    Each is compared with the baseline before its own reward enters it, so the baseline is unbiased. It
    works where the mean of a group says nothing, as in a zero-sum game.
    """
    return scores.rewards - running_baselines(scores, decay)[0]


@dataclass(frozen=True)
class Advantage:
    """An entry of `ADVANTAGES`.

    Args:
        function: `Scores` of B trajectories to advantages [B].
        zero_if_equal: a group of equal rewards gets advantages of 0, so it teaches nothing.
    """

    function: Callable[[Scores], Tensor]
    zero_if_equal: bool = True


ADVANTAGES: dict[str, Advantage] = {
    "mean": Advantage(mean),
    "mean_std": Advantage(mean_std),
    "leave_one_out": Advantage(leave_one_out),
    "length_weighted": Advantage(length_weighted),
    "max_rl": Advantage(max_rl),
    "share": Advantage(share, zero_if_equal=False),
    "running": Advantage(running, zero_if_equal=False),
    "reward": Advantage(reward, zero_if_equal=False),
}
# What is compared with each other (RAGEN's state, inductive and batch): index of the group, group -> key.
OVER: dict[str, Callable[[int, Group], Hashable]] = {
    "group": lambda index, group: index,
    "environment": lambda index, group: group.task.environment,
    "batch": lambda index, group: None,
}


def running_baselines(scores: Scores, decay: float = DECAY) -> tuple[Tensor, Tensor]:
    """[B] the baseline before each reward entered it, and [B] after."""
    starts = [0.0] * len(scores.rewards) if scores.baselines is None else scores.baselines.tolist()
    baselines: dict[int, float] = {}
    before, after = [], []
    for reward, group, start in zip(scores.rewards.tolist(), scores.groups.tolist(), starts, strict=True):
        before.append(baselines.get(group, start))
        baselines[group] = decay * before[-1] + (1 - decay) * reward
        after.append(baselines[group])
    return scores.rewards.new_tensor(before), scores.rewards.new_tensor(after)

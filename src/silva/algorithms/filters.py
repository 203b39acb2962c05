"""Which groups are worth a gradient. Filters see raw rewards only: penalties and normalised values
would make a group of equal results look informative. They compare the raw rewards that the advantages compare
(`Compared`): the totals of trajectories, or with credit by turn the returns of turns with the same number.

`zero_variance` and `out_of_range` judge a group by itself; `drop_reasons` compares the groups of a batch
with each other, so it needs all of them. A reason is one word, which the ledger records and metrics count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import model_validator

from silva.config.sections import Above0, Fraction, Section

if TYPE_CHECKING:
    from silva.types import Group

Reason = Literal["failed", "zero_variance", "low_variance", "too_easy", "too_hard", "surplus"]
Difficulty = Literal["easy", "normal", "hard"]

# Lists of raw rewards of a group; the rewards of one list are compared with each other.
Compared: TypeAlias = "Callable[[Group], Sequence[Sequence[float]]]"

TOLERANCE = 1e-9  # sums of the same named rewards may differ in the last bits


def _nucleus(stds: Sequence[float], value: float) -> int:
    wanted = value * math.fsum(stds) * (1 - TOLERANCE)
    before = accumulate(stds, initial=0.0)  # what the larger ones sum to
    return sum(std > 0 and total < wanted for std, total in zip(stds, before, strict=False))


# (standard deviations, largest first, at least one; value) -> how many to keep from the front
SELECTIONS: dict[str, Callable[[Sequence[float], float], int]] = {
    "top_fraction": lambda stds, value: max(1, int(value * len(stds) * (1 + TOLERANCE))),  # 0.29 * 100 < 29
    "top_k": lambda stds, value: int(value),
    "min_p": lambda stds, value: sum(std > 0 and std >= value * stds[0] * (1 - TOLERANCE) for std in stds),
    "nucleus": _nucleus,
}
if TYPE_CHECKING:
    Selection = str
else:
    Selection = Literal[tuple(SELECTIONS)]


class VarianceFilter(Section):
    """Which groups of a batch are trained, by the standard deviation of their raw rewards."""

    keep: Selection
    """A fraction of the groups, a number, those above a fraction of the largest, or a fraction of the sum."""
    value: Above0
    """A number of groups for top_k, otherwise a fraction."""

    @model_validator(mode="after")
    def _in_range(self) -> VarianceFilter:
        if self.keep == "top_k" and (self.value < 1 or self.value % 1 != 0):
            raise ValueError(f"value: got {self.value} with top_k, expected a whole number, 1 or more")
        if self.keep != "top_k" and self.value > 1:
            raise ValueError(f"value: got {self.value} with {self.keep}, expected at most 1")
        return self


class DifficultyPools(Section):
    """Tasks that were too easy or too hard come again only now and then, once all have been played."""

    easy_threshold: float = 1.0
    """Mean raw reward of a group from which its task is easy; 1: every trajectory succeeds."""
    hard_threshold: float = 0.0
    """Mean raw reward down from which it is hard; 0: none succeeds."""
    easy_fraction: Fraction = 0.1
    """How often an easy task is played when its turn comes again."""
    hard_fraction: Fraction = 0.5
    """How often a hard one is."""

    @model_validator(mode="after")
    def _apart(self) -> DifficultyPools:
        if not self.hard_threshold < self.easy_threshold:
            raise ValueError(
                f"easy_threshold: got {self.easy_threshold} with hard_threshold = {self.hard_threshold}, "
                "expected more"
            )
        return self


def totals(group: Group) -> list[list[float]]:
    """The raw rewards of all scored trajectories, compared with each other."""
    return [[trajectory.raw_reward for trajectory in group.scored]]


def zero_variance(group: Group, compared: Compared = totals) -> bool:
    """True if all raw rewards that are compared with each other are equal: nothing tells good from bad.

    Shaped rewards do not count: where every raw reward is equal and only penalties differ the answer is
    still True, or a policy that never succeeds would train on formatting alone. Failed trajectories do
    not count either; with fewer than two scored ones the answer is True. Rewards that are not finite
    (`assign.finite_reward` reports them) are never equal.
    """
    return all(abs(reward - alike[0]) <= TOLERANCE for alike in compared(group) for reward in alike)


def reward_std(group: Group, compared: Compared = totals) -> float:
    """Standard deviation of the raw rewards of a group (divided by n - 1), 0 where `zero_variance`.

    For several lists it is pooled: the root of the sum of their squared deviations over the sum of their
    n - 1. Groups with the same rewards in another order get the same bits.
    """
    if zero_variance(group, compared):
        return 0.0
    several = [rewards for rewards in compared(group) if len(rewards) > 1]
    squares = math.fsum(statistics.variance(rewards) * (len(rewards) - 1) for rewards in several)
    return math.sqrt(squares / sum(len(rewards) - 1 for rewards in several))


def drop_reasons(
    groups: Sequence[Group], settings: VarianceFilter, compared: Compared = totals
) -> list[Reason | None]:
    """Keeps the groups of a batch whose raw rewards vary most, by the standard deviation s of each:

    - `top_fraction`: the fraction `value` of the groups, rounded down, at least one (StarPO-S,
      arXiv:2504.20073, which keeps 0.25).
    - `top_k`: `value` groups.
    - `min_p`: those with s >= value * the largest s.
    - `nucleus`: from the largest s down until their sum reaches value * the sum of all (the filter by
      signal-to-noise ratio of RAGEN-2, arXiv:2604.06268, which calls it top_p and recommends 0.9).

    `min_p` and `nucleus` keep no group with s = 0; the other two only count, so they may. Where s is equal
    the earlier group is kept. RAGEN's code stops the nucleus 0.01 early; here there is no such slack, as
    it would depend on the scale of the rewards.

    Args:
        groups: all groups of the batch.
        compared: the rewards of a group whose std is s.

    Returns:
        For each group None where it is kept, else the reason why not: `failed` (no scored trajectory; it
        does not count as one of the groups), `zero_variance`, or `low_variance` (others vary more).
    """
    stds = {index: reward_std(group, compared) for index, group in enumerate(groups) if group.scored}
    ranked = sorted(stds, key=lambda index: -stds[index])  # stable: equal ones keep their order
    select = SELECTIONS[settings.keep]
    count = select([stds[index] for index in ranked], settings.value) if ranked else 0
    reasons: list[Reason | None] = ["failed"] * len(groups)
    for rank, index in enumerate(ranked):
        dropped: Reason = "low_variance" if stds[index] else "zero_variance"
        reasons[index] = None if rank < count else dropped
    return reasons


def out_of_range(group: Group, low: float, high: float) -> Reason | None:
    """Online difficulty filter: `too_hard` if the mean raw reward is below `low`, `too_easy` if above `high`.

    The bounds themselves are inside. With rewards of 0 and 1 a group at either end has no variance either.
    At least one trajectory must be scored.
    """
    mean = statistics.fmean(trajectory.raw_reward for trajectory in group.scored)
    if mean < low - TOLERANCE:
        return "too_hard"
    return "too_easy" if mean > high + TOLERANCE else None


def difficulty(settings: DifficultyPools, success: float) -> Difficulty:
    """The pool of a task by the mean success of its last group, as in PRIME-RL.

    Args:
        success: mean over the scored trajectories of the group.
    """
    if success >= settings.easy_threshold - TOLERANCE:
        return "easy"
    return "hard" if success <= settings.hard_threshold + TOLERANCE else "normal"

"""Which groups are worth a gradient. Filters see raw rewards only: penalties and normalised values
would make a group of equal results look informative."""

from __future__ import annotations

from silva.types import Group

TOLERANCE = 1e-9  # sums of the same named rewards may differ in the last bits


def zero_variance(group: Group) -> bool:
    """True where all scored trajectories have the same raw reward: nothing tells good from bad.

    Shaped rewards do not count: where every raw reward is equal and only penalties differ the answer is
    still True, or a policy that never succeeds would train on formatting alone. Failed trajectories do
    not count either; with fewer than two scored ones the answer is True. Rewards that are not finite are
    never equal, so such a group goes on to where they are reported.
    """
    rewards = [trajectory.raw_reward for trajectory in group.scored]
    return len(rewards) < 2 or all(abs(reward - rewards[0]) <= TOLERANCE for reward in rewards)

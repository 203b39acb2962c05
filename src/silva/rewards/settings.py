"""What the settings of every reward share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silva.config.sections import Section

if TYPE_CHECKING:
    from silva.protocols import Reward


PARTIAL_LIMIT = 0.9
"""Rewards that add several things up give an attempt that is not solved at most this share of the least that
a solved one gets."""


class RewardSettings(Section):
    """Base of the settings of a reward: `type` picks the class, `build` makes it."""

    type: str = ""

    def build(self) -> Reward:
        raise TypeError(f"{type(self).__name__} must define build()")

"""What the settings of every reward share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silva.config.sections import Section

if TYPE_CHECKING:
    from silva.protocols import Reward


class RewardSettings(Section):
    """Base of the settings of a reward: `type` picks the class, `build` makes it."""

    type: str = ""

    def build(self) -> Reward:
        raise TypeError(f"{type(self).__name__} must define build()")

"""What the settings of every reward share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silva.config.sections import Section

if TYPE_CHECKING:
    from silva.protocols import Reward


class RewardSettings(Section):
    """Base of the settings of a reward: `type` picks the class, `build` makes it."""

    type: str = ""

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The least and the highest value; None if the settings do not know them."""
        return None

    def vote(self, reply: str) -> str | None:
        """The final answer of a reply, so written that equal answers are equal texts; None if there is none,
        or if the reward knows no single answer. Majorities are counted with it (maj@k)."""
        how = getattr(self, "extract", None)
        if how is None:
            return None
        from silva.rewards.answers import find_answer
        from silva.rewards.text import as_number, normalise

        answer = find_answer(reply, how)
        if answer is None:
            return None
        number = as_number(answer)
        return normalise(answer) if number is None else str(number)

    def build(self) -> Reward:
        raise TypeError(f"{type(self).__name__} must define build()")

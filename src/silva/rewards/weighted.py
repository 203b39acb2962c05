"""Several rewards in one, of which one part decides whether an attempt is solved.

    solved       weight of the deciding part + sum of weight * value of the others
    not solved   sum of weight * value of all parts, at most `partial` * weight of the deciding part

Values of parts lie between 0 and 1, so that a solution is worth at least the deciding weight and nothing else
reaches it: format, length and politeness help on the way, and never instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from silva.config.schema import union
from silva.config.sections import Above0, Section
from silva.errors import RewardError
from silva.protocols import Attempt, ChecksTasks, Reward, Score
from silva.rewards import REWARDS
from silva.rewards.settings import RewardSettings

if TYPE_CHECKING:
    AnyPart = RewardSettings
else:
    AnyPart = union({name: target for name, target in REWARDS.items() if name != "weighted"})


class WeightedPart(Section):
    """One of several rewards."""

    reward: AnyPart
    """A table with `type`, or in short the name of a type, or "file.py:function"."""
    weight: Above0 = 1.0
    """Its value counts so many times in the sum."""
    decides: bool = False
    """Whether this part decides what is solved; the first one does where none says so."""
    name: str = ""
    """Of its metrics; the type, or the name of the function, where empty."""

    @property
    def label(self) -> str:
        target: str = getattr(self.reward, "function", self.reward.type)
        return self.name or target.rpartition(":")[2]


class Weighted(RewardSettings):
    """Several rewards in one, of which one decides whether an attempt is solved."""

    type: Literal["weighted"] = "weighted"
    parts: Annotated[tuple[WeightedPart, ...], Field(min_length=1)]
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Most that an attempt can get that is not solved, as a share of the deciding weight."""

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        labels = [part.label for part in self.parts]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"several parts are called {', '.join(twice)}; give each a `name`")
        if sum(part.decides for part in self.parts) > 1:
            raise ValueError("expected `decides` at one part at most")
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, sum(part.weight for part in self.parts)

    def build(self) -> Reward:
        return WeightedReward(self, [part.reward.build() for part in self.parts])


class WeightedReward:
    def __init__(self, settings: Weighted, rewards: Sequence[Reward]) -> None:
        self.settings, self.rewards = settings, rewards
        self._deciding = next((i for i, part in enumerate(settings.parts) if part.decides), 0)

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`."""
        for reward in self.rewards:
            if isinstance(reward, ChecksTasks):
                reward.check(answer, data)

    async def score(self, attempt: Attempt) -> Score:
        """Raises RewardError if a part's value is not between 0 and 1."""
        parts = self.settings.parts
        scores = await asyncio.gather(*(reward.score(attempt) for reward in self.rewards))
        metrics: dict[str, float] = {}
        for part, score in zip(parts, scores, strict=True):
            if not 0 <= score.value <= 1:
                raise RewardError(
                    f"reward weighted: part {part.label}: got {score.value:g}, expected a value from 0 to 1"
                )
            metrics[part.label] = score.value
            metrics.update({f"{part.label}.{name}": value for name, value in score.metrics.items()})
        solved, most = scores[self._deciding].solved, parts[self._deciding].weight
        values = [score.value for score in scores]
        if solved:
            values[self._deciding] = 1.0
        total = sum(part.weight * value for part, value in zip(parts, values, strict=True))
        return Score(total if solved else min(total, self.settings.partial * most), solved, metrics)

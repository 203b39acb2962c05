"""The weighted sum of other rewards.

    value = sum of weight * v          v: the value of a part, cut to 0..1; 1 if a required part is solved
    least = sum of the weights of required parts

An attempt is solved if all required parts are, so it gets at least `least`. Any other one gets at most
0.9 * `least`, whatever its other parts give.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from silva.config.schema import union
from silva.config.sections import Above0, Section
from silva.protocols import Attempt, Reward, Score
from silva.rewards import REWARDS
from silva.rewards.settings import PARTIAL_LIMIT, RewardSettings

AnyPart: Any = union({name: target for name, target in REWARDS.items() if name != "weighted"})


class Part(Section):
    """One of the rewards of a sum."""

    reward: AnyPart
    """A table with `type`, or in short the name of a type, or "file.py:function"."""
    weight: Above0 = 1.0
    required: bool = True
    """An attempt is solved only if this part is. False: for a bonus, such as one for a format."""
    name: str = ""
    """Of its metric; the type of the reward where empty."""


class Weighted(RewardSettings):
    """The weighted sum of other rewards."""

    type: Literal["weighted"] = "weighted"
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    """Tables with `reward`, `weight`, `required`, `name`."""

    @model_validator(mode="after")
    def _is_solvable(self) -> Self:
        if not any(part.required for part in self.parts):
            raise ValueError("expected a part with required = true: it says which attempts are solved")
        labels = [_label(part) for part in self.parts]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two parts are called {', '.join(twice)}; give one a `name`")
        return self

    def build(self) -> Reward:
        return WeightedReward(self)


class WeightedReward:
    def __init__(self, settings: Weighted) -> None:
        self._parts = [(part, _label(part), part.reward.build()) for part in settings.parts]
        self._least = sum(part.weight for part in settings.parts if part.required)

    async def score(self, attempt: Attempt) -> Score:
        total, solved, metrics = 0.0, True, dict[str, float]()
        for part, label, reward in self._parts:
            score = await reward.score(attempt)
            full = part.required and score.solved
            total += part.weight * (1.0 if full else min(max(score.value, 0.0), 1.0))
            solved &= score.solved or not part.required
            metrics |= {f"{label}_{key}": value for key, value in score.metrics.items()}
            metrics |= {label: score.value, f"{label}_solved": float(score.solved)}
        value = max(total, self._least) if solved else min(total, PARTIAL_LIMIT * self._least)
        return Score(value, solved, metrics)


def _label(part: Part) -> str:
    function = getattr(part.reward, "function", "").rpartition(":")[2]
    return part.name or function or part.reward.type

"""Parts that somebody else might add: one of each kind, slower than Silva's own by some turns of the loop."""

from __future__ import annotations

from typing import Any, Literal

from tests.contracts.doubles import Slow

from silva.engines.settings import LocalEngineSettings
from silva.placement.settings import LocalPlacementSettings
from silva.rollouts.settings import LinearRolloutSettings
from silva.trainer.settings import LocalTrainerSettings

BUILT: list[str] = []


class SlowEngine(LocalEngineSettings):
    type: Literal["slow_engine"] = "slow_engine"  # type: ignore[assignment]

    def build(self, context: Any) -> Any:
        BUILT.append(self.type)
        return Slow(super().build(context))


class SlowTrainer(LocalTrainerSettings):
    type: Literal["slow_trainer"] = "slow_trainer"  # type: ignore[assignment]

    def build(self, context: Any, algorithm: Any = None, **given: Any) -> Any:
        BUILT.append(self.type)
        return Slow(super().build(context, algorithm, **given))


class OtherRollout(LinearRolloutSettings):
    type: Literal["other_rollout"] = "other_rollout"  # type: ignore[assignment]

    def build(self, context: Any, **given: Any) -> Any:
        BUILT.append(self.type)
        return super().build(context, **given)


class OtherPlacement(LocalPlacementSettings):
    type: Literal["other_placement"] = "other_placement"  # type: ignore[assignment]

    def build(self, context: Any) -> Any:
        BUILT.append(self.type)
        return super().build(context)

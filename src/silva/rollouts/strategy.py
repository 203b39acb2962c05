"""What strategies have in common: from what they are made, and how they play an episode."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from silva.actors.policy import Policy
from silva.protocols import Actor, Engine, Work
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import OnTurn, play
from silva.rollouts.faults import UNWATCHED, Watch
from silva.rollouts.settings import RolloutSettings
from silva.types import Trajectory

S = TypeVar("S", bound=RolloutSettings)


@dataclass
class Strategy(Generic[S]):
    """Base of a `Rollout`.

    Attributes:
        seed: of the run; with the id of the work and the episode's place in it, it fixes every sample.
    """

    settings: S
    engine: Engine
    renderer: Renderer
    _: KW_ONLY
    seed: int
    on_turn: OnTurn = lambda episode, waiting_for: None
    watch: Watch = UNWATCHED

    def policy(self, work: Work) -> Policy:
        sampling = self.settings.sampling.model_copy(update={"temperature": work.temperature})
        return Policy(self.engine, self.renderer, sampling)

    async def play(self, work: Work, actor: Actor, id: str, seed: int) -> Trajectory:
        return await play(
            work.task, work.taskset, actor, self.renderer, self.settings.limits, id=id, seed=seed,
            on_turn=self.on_turn, watch=self.watch, context=self.settings.context,
        )  # fmt: skip

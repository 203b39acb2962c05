"""Independent episodes of one task, all from its start: one group for a piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from silva.actors.policy import Policy
from silva.ports import derive
from silva.protocols import Actor, Work
from silva.rollouts.episode import play, tries
from silva.rollouts.settings import LinearRolloutSettings
from silva.rollouts.strategy import Strategy
from silva.types import Group, Trajectory


class Linear(Strategy[LinearRolloutSettings]):
    """The strategy `linear`."""

    async def run(self, work: Work) -> AsyncIterator[Group]:
        """Yields the one group of the task, its trajectories in the order they were asked for."""
        sampling = self.settings.sampling.model_copy(update={"temperature": work.temperature})
        actor = Policy(self.engine, self.renderer, sampling)
        episodes = [self._episode(work, actor, i) for i in range(self.settings.group_size)]
        yield Group(work.id, work.task, tuple(await asyncio.gather(*episodes)))

    async def _episode(self, work: Work, actor: Actor, index: int) -> Trajectory:
        id = f"{work.id}/{index}"
        trajectory = await tries(
            self.settings.redo,
            lambda attempt: play(
                work.task, work.taskset, actor, self.renderer, self.settings.limits, id=id,
                seed=derive(self.seed, work.id, index, attempt), watch=self.watch,
                on_turn=lambda waiting_for: self.on_turn(id, waiting_for), context=self.settings.context,
            ),
        )  # fmt: skip
        self.on_turn(id, None)
        return trajectory

"""Independent episodes of one task, all from its start: one group for a piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

from silva.ports import derive
from silva.protocols import Work
from silva.rollouts.episode import tries
from silva.rollouts.settings import LinearRolloutSettings
from silva.rollouts.strategy import Strategy
from silva.types import Group, Trajectory


class Linear(Strategy[LinearRolloutSettings]):
    """The strategy `linear`."""

    async def run(self, work: Work) -> AsyncIterator[Group]:
        """Yields the one group of the task, its trajectories in the order they were asked for."""
        actor = self.policy(work)

        async def episode(index: int) -> Trajectory:
            def attempt(number: int) -> Awaitable[Trajectory]:
                seed = derive(self.seed, work.id, index, number)
                return self.play(work, actor, f"{work.id}/{index}", seed)

            return await tries(self.settings.redo, attempt)

        played = await asyncio.gather(*map(episode, range(self.settings.group_size)))
        yield Group(work.id, work.task, tuple(played))

"""Independent episodes of one task, all from its start: one group a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from silva.ports import derive
from silva.protocols import Actor, Engine, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Policy
from silva.rollouts.episode import play
from silva.rollouts.faults import UNWATCHED, Watch
from silva.rollouts.settings import LinearRolloutSettings
from silva.types import Group, Task, Trajectory


class Linear:
    """The strategy `linear`.

    Args:
        seed: of the run; with the group's key and the episode's number it fixes every sample.
        on_turn: told (episode id, whom it waits for); None for an episode that has ended.
    """

    def __init__(
        self,
        settings: LinearRolloutSettings,
        renderer: Renderer,
        *,
        seed: int,
        on_turn: Callable[[str, str | None], None] = lambda episode, waiting_for: None,
        watch: Watch = UNWATCHED,
    ):
        self.settings, self.renderer, self.seed = settings, renderer, seed
        self.on_turn, self.watch = on_turn, watch

    async def run(
        self, task: Task, taskset: TaskSet, engine: Engine, *, key: str, temperature: float | None = None
    ) -> AsyncIterator[Group]:
        """Yields the one group of `task`, its trajectories in the order they were asked for."""
        sampling = self.settings.sampling
        if temperature is not None:
            sampling = sampling.model_copy(update={"temperature": temperature})
        actor = Policy(engine, self.renderer, sampling)
        episodes = [self._episode(task, taskset, actor, key, i) for i in range(self.settings.group_size)]
        yield Group(key, task, tuple(await asyncio.gather(*episodes)))

    async def _episode(self, task: Task, taskset: TaskSet, actor: Actor, key: str, index: int) -> Trajectory:
        id = f"{key}/{index}"
        for attempt in range(self.settings.redo + 1):
            trajectory = await play(
                task,
                taskset,
                actor,
                self.renderer,
                self.settings.limits,
                id=id,
                seed=derive(self.seed, key, index, attempt),
                on_turn=lambda waiting_for: self.on_turn(id, waiting_for),
                watch=self.watch,
            )
            if trajectory.failure != "redo":
                break
        self.on_turn(id, None)
        return trajectory

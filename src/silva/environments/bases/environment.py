"""What every shipped environment shares: one episode, played once, with noise of its own; forks."""

from __future__ import annotations

import copy
import random
from typing import Any, Self

from silva.types import Message, Role, Task


class BaseEnvironment:
    """Base of an environment: guards the order of calls, holds the noise, forks.

    What is shown depends on `task.data`, noise on `task.seed` alone: the same task with another seed
    (`dataclasses.replace(task, seed=...)`) has the same prompt and other luck.
    """

    def __init__(self, settings: Any, task: Task) -> None:
        self.settings = settings
        self.task = task
        self.rng = random.Random(f"{task.seed}/noise")
        self._seed = task.seed  # of the noise
        self._phase = "new"
        self._said = 0

    def say(self, text: str, role: Role = "user", name: str | None = None) -> Message:
        """A message of the environment, with an id that is its own within the episode."""
        self._said += 1
        return Message(role, text, id=f"environment-{self._said}", name=name)

    async def fork(self, seed: int) -> Self:
        """The same state; its own noise from here on, or this one's if it has the same seed."""
        shared = {id(part): part for part in self._shared()}
        twin = copy.deepcopy(self, shared)
        if seed != self._seed:
            twin.rng = random.Random(f"{self.task.seed}/fork/{seed}")
            twin._seed = seed
        return twin

    async def close(self) -> None:
        self._phase = "closed"

    def _shared(self) -> tuple[Any, ...]:
        """What forks hold in common: whatever never changes."""
        return (self.settings, self.task)

    def _begin(self) -> None:
        if self._phase != "new":
            raise RuntimeError(f"task {self.task.id}: reset() of an episode that is {self._phase}")
        self._phase = "running"

    def _check_running(self) -> None:
        if self._phase != "running":
            raise RuntimeError(f"task {self.task.id}: step() of an episode that is {self._phase}")

    def _end(self) -> None:
        self._phase = "over"

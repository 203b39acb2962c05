"""FrozenLake whose every step computes for 5 ms, for workers.py."""

from __future__ import annotations

import time

from silva.environments.tasks import Tasks, generated
from silva.environments.worlds.frozen_lake import FrozenLake, FrozenLakeGame
from silva.types import Message, Step

WORK = 0.005  # seconds of CPU


class BusyLake(FrozenLake):
    type: str = ""  # type: ignore[assignment]

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: Busy(self, task))


class Busy(FrozenLakeGame):
    async def step(self, message: Message) -> Step:
        end = time.process_time() + WORK
        while time.process_time() < end:
            pass
        return await super().step(message)

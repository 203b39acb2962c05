"""An environment with a tool; some of its episodes are slow, fail, hang or say nonsense: by the task's seed.

So the same episode has the same fault however often, and whenever, it is played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from random import Random
from typing import Any, Literal

from silva.config.sections import Fraction, Positive
from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.tools.function import tool
from silva.types import Message, Observation, Step, Task

LONG = 1000.0  # seconds, far above every limit
FAULTS = ("raises", "hangs", "exits", "late", "nothing", "nan", "cancels")
PLACES = ("construction", "reset", "step", "close", "tool")


PLAYED: ContextVar[Episode] = ContextVar("PLAYED")
"""The episode whose step runs."""


async def look() -> str:
    """Look at the number."""
    await PLAYED.get().befall("tool")
    return str(PLAYED.get().task.data["number"])


LOOK = tool(look)
"""One for all episodes, because a description takes a millisecond to make."""


class World(ToolDialogueSettings):
    type: Literal["simulated"] = "simulated"
    turns: Positive = 2
    share: Fraction = 0.0
    """Of episodes that have a fault."""
    train_size: int = 4
    eval_size: int = 1
    tool_timeout: float = 2.0

    def taskset(self) -> Tasks:
        return generated(self, lambda rng: Draft({"number": rng.randrange(10_000)}), self._build)

    def _build(self, task: Task) -> Episode:
        episode = Episode(self, task)
        if episode.place == "construction" and episode.fault in ("raises", "exits"):
            raise SystemExit(3) if episode.fault == "exits" else ValueError("no such world")
        return episode


class Episode(ToolDialogue):
    settings: World

    def __init__(self, settings: World, task: Task) -> None:
        super().__init__(settings, task, ())
        self.luck = Random(f"{task.seed}/fault")
        faulty = self.luck.random() < settings.share
        self.place = self.luck.choice(PLACES) if faulty else ""
        self.fault = self.luck.choice(FAULTS)
        self.said = 0

    def opening(self) -> Sequence[Message]:
        return (self.say(f"{self.task.data['number']}"),)

    def own_tools(self) -> Any:
        return (LOOK,)

    async def reset(self) -> Observation:
        await self.befall("reset")
        return await super().reset()

    async def step(self, message: Message) -> Step:
        PLAYED.set(self)
        return await self.befall("step", await super().step(message))

    async def answered(self, message: Message) -> Step:
        self.said += 1
        right = (sum(map(ord, message.content)) + self.task.data["number"]) % 2 == 0
        done = self.said >= self.settings.turns
        metrics = {"success": float(right)} if done else {}
        return Step(self.show(self.say("go on")), {"right": float(right)}, terminated=done, metrics=metrics)

    async def out_of_calls(self, message: Message) -> Step:
        return Step(self.show(self.say("no calls are left")), truncated=True, metrics={"success": 0.0})

    async def close(self) -> None:
        await self.befall("close")
        await super().close()

    async def befall(self, place: str, found: Any = None) -> Any:
        await asyncio.sleep(self.luck.expovariate(20))
        if place != self.place:
            return found
        if self.fault == "late":
            await asyncio.sleep(1.0)
        if self.fault == "hangs":
            await asyncio.sleep(LONG)
        if self.fault == "raises":
            raise ValueError(f"the {place} is broken")
        if self.fault == "exits":
            raise SystemExit(3)
        if self.fault == "cancels":
            raise asyncio.CancelledError
        if self.fault == "nothing":
            return None
        if self.fault == "nan" and isinstance(found, Step):
            return Step(found.observation, {"right": float("nan")}, terminated=found.terminated)
        return found

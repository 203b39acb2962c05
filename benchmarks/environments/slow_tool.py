"""A dialogue in which every reply waits for a slow tool, for overlap.py. Tasks have 2 to 6 turns."""

from __future__ import annotations

import asyncio

from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, generated
from silva.protocols import TaskSet
from silva.types import Message, Observation, Step, Task

TURNS = (2, 6)  # fewest and most


class SlowTool(EnvironmentSettings):
    type: str = ""
    seconds: float = 2.0

    def taskset(self) -> TaskSet:
        return generated(
            self,
            lambda rng: Draft({"number": rng.randrange(10**9), "turns": rng.randint(*TURNS)}),
            lambda task: Dialogue(self, task),
        )


class Dialogue:
    """The reward is the share of letters in the replies: something that random bytes differ in."""

    def __init__(self, settings: SlowTool, task: Task) -> None:
        self.settings, self.task = settings, task
        self.replies: list[str] = []

    async def reset(self) -> Observation:
        return Observation((self._says(f"What do you ask about number {self.task.data['number']}?"),))

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(self.settings.seconds)
        self.replies.append(message.content)
        if len(self.replies) < self.task.data["turns"]:
            return Step(Observation((self._says(f"Answer {len(self.replies)}: it is there, so go on."),)))
        text = "".join(self.replies)
        return Step(rewards={"letters": sum(map(str.isalpha, text)) / max(1, len(text))}, terminated=True)

    async def close(self) -> None:
        pass

    def _says(self, text: str) -> Message:
        return Message("user", text, id=f"tool-{len(self.replies)}")

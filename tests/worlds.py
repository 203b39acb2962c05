"""Worlds for tests of whole runs: quick, rewarding to a random model, slow at random, broken on demand.

They are named in a configuration by path (`tests/worlds.py:Parity`), as a user's own would be.
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Literal

from silva.config.sections import Fraction, Natural, Positive
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.types import Message, Observation, Step, Task

_REAL = random.SystemRandom()  # delays differ in every run, whatever its seed


class Parity(EnvironmentSettings):
    """Reward 1 a turn where the characters of the reply add up to the parity of the task's number."""

    type: Literal["parity"] = "parity"
    turns: Positive = 2
    train_size: Natural = 256
    """Every run compares all of them with those held out."""
    eval_size: Positive = 12
    delay: float = 0.0
    """Milliseconds at most."""
    paid: Literal["parity", "length", "constant", "nan"] = "parity"
    """What is rewarded: `length` is a share of the reply's letters, `constant` is always 1."""
    fails: Literal["construction", "reset", "step", "close", "hang"] = "step"
    share: Fraction = 0.0
    """Share of episodes that fail, by the episode's seed."""

    def taskset(self) -> Tasks:
        return generated(self, lambda rng: Draft({"number": rng.randrange(10_000)}), self._build)

    def _build(self, task: Task) -> ParityEpisode:
        broken = random.Random(task.seed).random() < self.share
        if broken and self.fails == "construction":
            raise OSError("no such world")
        return ParityEpisode(self, task, broken)


class ParityEpisode:
    def __init__(self, settings: Parity, task: Task, broken: bool):
        self.settings, self.task, self.broken = settings, task, broken
        self.turn, self.solved = 0, True

    async def _wait(self) -> None:
        if self.settings.delay:
            await asyncio.sleep(_REAL.uniform(0, self.settings.delay) / 1000)

    def _break(self, where: str) -> None:
        if self.broken and self.settings.fails == where:
            raise ValueError(f"the {where} is broken")

    def _say(self) -> Message:
        return Message("user", f"{self.turn}:{self.task.data['number']}", id=f"environment-{self.turn}")

    async def reset(self) -> Observation:
        await self._wait()
        self._break("reset")
        if self.broken and self.settings.fails == "hang":
            await asyncio.sleep(3600)
        return Observation((self._say(),))

    async def step(self, message: Message) -> Step:
        await self._wait()
        self.turn += 1
        if self.turn == self.settings.turns:
            self._break("step")
        letters = [c for c in message.content if c.isalpha()]
        right = (sum(map(ord, message.content)) + self.task.data["number"]) % 2 == 0
        self.solved = self.solved and right
        pay = {
            "parity": float(right),
            "length": len(letters) / (1 + len(message.content)),
            "constant": 1.0,
            "nan": float("nan"),
        }
        done = self.turn >= self.settings.turns
        return Step(
            Observation((self._say(),)),
            rewards={"pay": pay[self.settings.paid]},
            shaped={"short": -0.01 * len(message.content)},
            terminated=done,
            metrics={"success": float(self.solved)} if done else {},
        )

    async def fork(self, seed: int) -> ParityEpisode:
        await self._wait()
        return copy.copy(self)

    async def close(self) -> None:
        self._break("close")

    def expert_reply(self) -> str:
        return "b" if self.task.data["number"] % 2 == 0 else "a"

    def random_reply(self, seed: int) -> str:
        return random.Random(seed).choice("ab")


class Letters(Parity):
    """One turn; a reward of many values."""

    type: Literal["letters"] = "letters"
    turns: Positive = 1
    paid: Literal["parity", "length", "constant", "nan"] = "length"

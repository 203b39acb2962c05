"""An environment with one fault, which its key `fault` chooses."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError
from silva.types import Message, Observation, Step

SHARED: list[int] = []


class Faulty(EnvironmentSettings):
    """Say the number."""

    fault: str = ""
    eval_size: int = 4

    def taskset(self) -> Any:
        if self.fault == "taskset":
            raise KeyError("no data")
        if self.fault == "refused":
            raise CapabilityError("no images")
        key = (lambda n: {n: "x"}) if self.fault == "json" else (lambda n: {"n": n})
        drafts = [Draft(key(n), n) for n in range(40)]
        tasks = listed(self, drafts, lambda task: Episode(self, task))
        return Overlapping(tasks) if self.fault == "overlap" else tasks


class Overlapping:
    def __init__(self, tasks: Any) -> None:
        self.inner, self.environment = tasks, tasks.environment

    def tasks(self, split: str) -> Any:
        return [dataclasses.replace(task, split=split) for task in self.inner.tasks("train")[:4]]


class Episode:
    def __init__(self, settings: Faulty, task: Any) -> None:
        self.fault, self.task, self.turns = settings.fault, task, 0
        self.rng = random.Random(task.seed)

    async def reset(self) -> Any:
        text = f"Say {self.task.answer}."
        if self.fault == "chance":
            text += str(time.perf_counter_ns())
        if self.fault == "prompt":
            text += str(self.rng.random())
        if self.fault == "role":
            return Observation((Message("assistant", text, id="q"),))
        if self.fault == "empty":
            return Observation()
        if self.fault == "text":
            return text
        return Observation((Message("user", text, id="q"),))

    async def step(self, message: Message) -> Any:
        if self.fault == "crash":
            message.content.split()[0]
        if self.fault == "shared":
            SHARED.append(1)
            return self.end(0.0, {"success": 0.0, "steps_before": float(len(SHARED))})
        if self.fault == "endless":
            return Step()
        right = message.content.strip() == str(self.task.answer)
        if self.fault == "pays":
            said = message.content.isdigit()
            return self.end(float(right) or -float(said), {"success": float(right)})
        if self.fault == "nan":
            return self.end(float("nan"), {"success": 0.0})
        if self.fault == "success":
            return self.end(float(right), {})
        if self.fault == "partial":
            return self.end(1.0, {"success": float(right)})
        if self.fault == "none":
            return None
        return self.end(float(right), {"success": float(right)})

    def end(self, reward: float, metrics: dict[str, float]) -> Step:
        return Step(rewards={"right": reward}, terminated=True, metrics=metrics)

    async def close(self) -> None:
        if self.fault == "close":
            del self.task

    async def fork(self, seed: int) -> Episode:
        if self.fault == "fork":
            return self
        twin = Episode.__new__(Episode)
        vars(twin).update(vars(self))
        return twin

    def expert_reply(self) -> str:
        return "wrong" if self.fault == "expert" else str(self.task.answer)

    def random_reply(self, seed: int) -> str:
        return str(seed % 40)

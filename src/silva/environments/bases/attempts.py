"""Environments of one question. If there are several attempts, a wrong one is answered and asked again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, NamedTuple

from silva.environments.bases.environment import BaseEnvironment
from silva.thoughts import answer_of
from silva.types import Message, Observation, Step, Task


class Verdict(NamedTuple):
    """On one attempt.

    `feedback` is shown if another attempt follows; `partial` is credit for a wrong one (0 to 1), which only
    the last attempt earns; `valid`: it could be read.
    """

    solved: bool
    feedback: str = ""
    partial: float = 0.0
    valid: bool = True


class Attempts(BaseEnvironment, ABC):
    """Attempt k (from 0) earns `decay ** k` if it is right; if none is, the last one earns
    `partial_weight * partial`.

    `partial_weight` must stay below the least that a right attempt earns.
    """

    attempts = 1
    decay = 1.0
    partial_weight = 0.0
    format_penalty = 0.0

    def __init__(self, settings: Any, task: Task) -> None:
        super().__init__(settings, task)
        self.attempt = 0

    @abstractmethod
    def prompt(self) -> str:
        """The question."""

    @abstractmethod
    def judge(self, reply: str) -> Verdict | Awaitable[Verdict]:
        """Judges the text of a reply (without its thoughts)."""

    async def reset(self) -> Observation:
        self._begin()
        return Observation((self.say(self.prompt()),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        judged = self.judge(answer_of(message.content))
        verdict = judged if isinstance(judged, Verdict) else await judged
        last = self.attempt + 1 == self.attempts
        reward = self.decay**self.attempt if verdict.solved else self.partial_weight * verdict.partial * last
        self.attempt += 1
        over = verdict.solved or last
        metrics = {"action_is_valid": float(verdict.valid)}
        if over:
            self._end()
            metrics["success"] = float(verdict.solved)
        if over and self.attempts > 1:
            metrics["attempts"] = float(self.attempt)
        return Step(
            Observation() if over else Observation((self.say(verdict.feedback),)),
            rewards={"correct": reward},
            shaped={"format": 0.0 if verdict.valid else self.format_penalty},
            terminated=over,
            metrics=metrics,
        )

"""Environments of one question and one answer: a subclass says what is asked and how an answer is graded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import NamedTuple

from silva.environments.bases.episode import Episode
from silva.thoughts import answer_of
from silva.types import Message, Observation, Step


class Grade(NamedTuple):
    """Of one answer. `partial` is credit for an unsolved one (0 to 1); `valid`: it could be read."""

    solved: bool
    partial: float = 0.0
    valid: bool = True


class SingleAnswer(Episode, ABC):
    """Reward 1 for a solution, else `partial_weight * partial`, which must stay below 1."""

    partial_weight = 0.0
    format_penalty = 0.0

    @abstractmethod
    def prompt(self) -> str:
        """The question."""

    @abstractmethod
    def grade(self, reply: str) -> Grade | Awaitable[Grade]:
        """Grades the text of the reply (without its thoughts)."""

    @abstractmethod
    def expert_reply(self) -> str: ...

    @abstractmethod
    def random_reply(self, seed: int) -> str: ...

    async def reset(self) -> Observation:
        self._begin()
        return Observation((self.say(self.prompt()),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        self._end()
        grade = self.grade(answer_of(message.content))
        if not isinstance(grade, Grade):
            grade = await grade
        return Step(
            rewards={"correct": 1.0 if grade.solved else self.partial_weight * grade.partial},
            shaped={"format": 0.0 if grade.valid else self.format_penalty},
            terminated=True,
            metrics={"success": float(grade.solved), "action_is_valid": float(grade.valid)},
        )

"""Guess a number from a range in a few turns; each wrong guess is answered "higher" or "lower".

Reward 1 when it is found (with `discount`, less for later guesses), else 0. Held-out tasks use ranges
(10 to 16, say) that do not occur in training; the rules and the wording are the same, so they test the
same skill on other numbers, not another skill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.rewards.text import integers
from silva.thoughts import answer_of
from silva.types import Message, Observation, Step, Task


class GuessNumber(EnvironmentSettings):
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["guess_number"] = "guess_number"
    style: Literal["full", "compact"] = "full"
    """`full` asks in words; `compact` shows range and hints alone (small models trained from scratch)."""
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of all ranges that is held out."""
    numbers: Annotated[int, Field(ge=2, le=1000)] = 7
    """Numbers in the range."""
    guesses: Positive = 3
    """Turns of one episode; a reply without a number uses up one."""
    lowest: Annotated[int, Field(ge=0)] = 1
    """First number of the first range."""
    ranges: Annotated[int, Field(ge=2, le=1000)] = 90
    """How many ranges there are; each begins one higher than the one before."""
    read: Literal["last", "first"] = "last"
    """Which number of a reply is the guess."""
    discount: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Taken off the reward for each guess before the right one."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a turn without a number."""

    @model_validator(mode="after")
    def _always_worth_it(self) -> Self:
        if self.discount * (self.guesses - 1) >= 1:
            raise ValueError(
                f"discount = {self.discount}: the last of {self.guesses} guesses would earn nothing"
            )
        return self

    def taskset(self) -> Tasks:
        return listed(self, self._drafts(), lambda task: GuessEpisode(self, task))

    def _drafts(self) -> Iterator[Draft]:
        for low in range(self.lowest, self.lowest + self.ranges):
            high = low + self.numbers - 1
            for number in range(low, high + 1):
                yield Draft({"low": low, "high": high}, number, keys=[[low, high]])


class GuessEpisode(BaseEnvironment):
    settings: GuessNumber

    def __init__(self, settings: GuessNumber, task: Task) -> None:
        super().__init__(settings, task)
        self.low: int = task.data["low"]  # what the hints leave open
        self.high: int = task.data["high"]
        self.guesses = 0

    async def reset(self) -> Observation:
        self._begin()
        low, high = self.low, self.high
        if self.settings.style == "compact":
            return Observation((self.say(f"{low}-{high}"),))
        text = f"Guess my number from {low} to {high}. Reply with the number only."
        return Observation((self.say(text),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        found = integers(answer_of(message.content))
        guess = None if not found else found[-1 if self.settings.read == "last" else 0]
        reward = 1.0 - self.settings.discount * self.guesses if guess == self.task.answer else 0.0
        self.guesses += 1
        solved = guess == self.task.answer
        truncated = not solved and self.guesses == self.settings.guesses
        metrics = {"action_is_valid": float(guess is not None)}
        if solved or truncated:
            self._end()
            metrics |= {"success": float(solved), "guesses": float(self.guesses)}
        return Step(
            Observation((self.say(self._hint(guess)),)),
            rewards={"found": reward},
            shaped={"format": self.settings.format_penalty if guess is None else 0.0},
            terminated=solved,
            truncated=truncated,
            metrics=metrics,
        )

    def expert_reply(self) -> str:
        """The middle of what the hints leave open."""
        return str((self.low + self.high) // 2)

    def random_reply(self, seed: int) -> str:
        """Any number of the whole range, whatever the hints."""
        low, high = self.task.data["low"], self.task.data["high"]
        return str(random.Random(f"{seed}/{self.guesses}").randint(low, high))

    def _hint(self, guess: int | None) -> str:
        compact = self.settings.style == "compact"
        if guess is None:
            return "?" if compact else "Reply with a number."
        if guess == self.task.answer:
            return "=" if compact else "Right."
        higher = self.task.answer > guess
        if higher:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        word = "higher" if higher else "lower"
        return word if compact else f"It is {word} than {guess}."

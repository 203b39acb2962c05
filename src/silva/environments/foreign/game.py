"""Games of other libraries: a reply is an action, an observation is text. A subclass says how to play it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.foreign.library import OwnRandomness, finite, solved
from silva.environments.foreign.settings import ForeignSettings
from silva.errors import CapabilityError
from silva.thoughts import answer_of
from silva.types import Message, Observation, Step, Task


class ForeignGameSettings(ForeignSettings):
    solved_at: float = 1.0
    """An episode counts as solved if its rewards add up to this."""
    max_actions: Positive = 50
    """Replies of one episode, also those that are no action; the game may end earlier."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a reply from which no action could be read, which also costs what the worst action
    does."""


class Told(NamedTuple):
    """What the game answered. `valid`: the reply was an action."""

    text: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    valid: bool = True
    metrics: Mapping[str, float] = {}


class ForeignGame(BaseEnvironment, ABC):
    settings: ForeignGameSettings

    def __init__(self, settings: ForeignGameSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.actions_left = settings.max_actions
        self.total = 0.0  # of the game's rewards
        self.worst = 0.0  # the lowest reward of an action that is known, from 0 down

    # What a library's episode defines.

    @abstractmethod
    async def begin(self) -> str:
        """Starts the game; the first text that is shown."""

    @abstractmethod
    async def play(self, reply: str) -> Told:
        """Plays what a reply says, without its thoughts."""

    # The environment.

    async def reset(self) -> Observation:
        self._begin()
        return Observation((self.say(await self.begin()),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        told = await self.play(answer_of(message.content).strip())
        reward = finite(told.reward, f"environment {self.settings.label}")
        self.total += reward
        if told.valid:
            self.worst = min(self.worst, reward)
        else:  # otherwise it would pay to say nothing where every action costs something
            reward += self.worst
        self.actions_left -= 1
        truncated = not told.done and (told.truncated or self.actions_left == 0)
        metrics = {**told.metrics, "action_is_valid": float(told.valid)}
        if told.done or truncated:
            self._end()
            metrics["success"] = float(solved(self.total, self.settings.solved_at))
        return Step(
            Observation((self.say(told.text),)),
            rewards={"score": reward},
            shaped={"format": 0.0 if told.valid else self.settings.format_penalty},
            terminated=told.done,
            truncated=truncated,
            metrics=metrics,
        )


class SeededGame(ForeignGame):
    """A game of a library that draws from the random numbers of the process, and is copied for a fork.

    The problem is that of the seed in the task's data; what happens by chance is the episode's.
    """

    def __init__(self, settings: ForeignGameSettings, task: Task, library: Any) -> None:
        super().__init__(settings, task)
        self.library = library
        self.own = OwnRandomness(task.data["seed"])

    def chance(self, what: str) -> None:
        """What happens by chance from here on."""
        self.own.seed(f"{self.task.seed}/{what}")

    async def fork(self, seed: int) -> Self:
        try:
            twin = await super().fork(seed)
        except Exception as error:
            raise CapabilityError(
                f"environment {self.settings.label}: cannot be copied ({type(error).__name__}: {error})"
            ) from error
        if seed != self._seed:
            twin.chance(f"fork/{seed}")
        return twin

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.library)

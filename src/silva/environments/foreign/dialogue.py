"""Dialogues with tools whose state, tools and grades are another library's: one session holds all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.environments.foreign.library import finite, solved
from silva.protocols import Tool
from silva.types import Message, Role, Step, Task


class ForeignDialogueSettings(ToolDialogueSettings):
    solved_at: float = 1.0
    """An episode counts as solved if its reward is at least this."""


class Graded(NamedTuple):
    reward: float
    metrics: Mapping[str, float] = {}


class ForeignSession(ABC):
    """One episode of the library: a `silva.protocols.ToolSession` that also opens and grades the dialogue.

    Attributes, once it has started:
        tools: on offer.
        opening: role and text of the first messages.
    """

    tools: Sequence[Tool] = ()
    opening: Sequence[tuple[Role, str]] = ()

    async def start(self) -> None:  # noqa: B027  (nothing to wait for is common)
        """If it raises, the session is closed."""

    @abstractmethod
    async def grade(self, messages: Sequence[Message]) -> Graded:
        """The reward of the finished dialogue. An exception means that there is none."""

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:  # noqa: B027  (nothing to free is the usual case)
        pass


class ForeignDialogue(ToolDialogue):
    """Until a reply calls no tool: then the library grades. A call that takes too long ends the episode
    without a result.

    Args:
        make: the library's episode, not started.
    """

    settings: ForeignDialogueSettings

    def __init__(
        self, settings: ForeignDialogueSettings, task: Task, make: Callable[[], ForeignSession]
    ) -> None:
        super().__init__(settings, task, [_Started(make)])
        # What a call that was cut off still does in the library's state, nobody knows.
        self.calls.limits = settings.limits._replace(late_is_fault=True)

    @property
    def session(self) -> Any:
        return self.sessions[0]

    def opening(self) -> Sequence[Message]:
        said = list(self.session.opening)
        if self.settings.instructions:
            first = next((i for i, (role, _) in enumerate(said) if role == "user"), 0)
            said[first] = (said[first][0], f"{self.settings.instructions}\n{said[first][1]}")
        return [self.say(text, role) for role, text in said]

    async def answered(self, message: Message) -> Step:
        return await self.end(terminated=True)

    async def out_of_calls(self, message: Message) -> Step:
        return await self.end(terminated=False)

    async def end(self, *, terminated: bool) -> Step:
        """The last step, with the library's grade."""
        self._end()
        graded = await self.session.grade(self.history)
        reward = finite(graded.reward, f"environment {self.settings.label}")
        return Step(
            rewards={"reward": reward},
            terminated=terminated,
            truncated=not terminated,
            metrics={**graded.metrics, "success": float(solved(reward, self.settings.solved_at))},
        )


class _Started:
    """A `silva.protocols.Toolset` of one episode."""

    def __init__(self, make: Callable[[], ForeignSession]) -> None:
        self._make = make

    async def open(self, seed: int) -> ForeignSession:
        session = self._make()
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

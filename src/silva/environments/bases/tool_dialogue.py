"""Episodes in which a model calls tools, as often as it likes within limits, and then answers."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.settings import EnvironmentSettings
from silva.errors import CapabilityError, RecordError
from silva.protocols import Attempt, ForkableTools, Reward, Tool, ToolSession, Toolset
from silva.rendering.tool_calls import write_calls
from silva.tools.calls import CallLimits, CallResult, Calls
from silva.tools.fixed import Fixed
from silva.tools.function import ToolDefinitionError
from silva.types import Message, Observation, Step, Task, ToolCall, ToolSpec


class ToolDialogueSettings(EnvironmentSettings):
    """Limits of tool calls and of their results."""

    instructions: str = ""
    """Stands before the first question."""
    tool_required: bool = False
    """An answer without a successful tool call since the question was asked is sent back."""
    max_tool_calls: Positive = 8
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""
    max_calls_of: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    """The same for single tools, by name: {python = 3}."""
    concurrent_calls: Positive = 8
    """Calls of one reply that run at the same time."""
    tool_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds one tool call may take, where a tool has no limit of its own."""
    max_result_chars: Positive = 2000
    """Characters of a tool result that are shown, where a tool has no limit of its own."""

    @property
    def limits(self) -> CallLimits:
        return CallLimits(
            self.max_tool_calls,
            self.max_calls_of,
            self.tool_timeout,
            self.max_result_chars,
            self.concurrent_calls,
        )


class ToolDialogue(BaseEnvironment, ABC):
    """Base of such an episode, `Forkable` as far as its tools are.

    A reply that calls tools is answered with their results, any other reply by `answered`. Tools may come and
    go with each call; where they do, the whole context is shown again, since they are described at its start.
    """

    settings: ToolDialogueSettings

    def __init__(self, settings: ToolDialogueSettings, task: Task, toolsets: Sequence[Toolset]) -> None:
        super().__init__(settings, task)
        self.toolsets = toolsets
        self.sessions: Sequence[ToolSession] = ()
        self.calls = Calls(settings.limits, settings.max_tool_calls)
        self.called = 0  # calls that succeeded since the question was asked
        self.history: list[Message] = []
        self._offered: tuple[ToolSpec, ...] = ()

    # What a subclass defines.

    @abstractmethod
    def opening(self) -> Sequence[Message]:
        """The first messages."""

    @abstractmethod
    async def answered(self, message: Message) -> Step:
        """The step after a reply without a call; it stands in `history` already."""

    @abstractmethod
    async def out_of_calls(self, message: Message) -> Step:
        """The last step: a reply calls, or should have called, though no calls are left."""

    def own_tools(self) -> Sequence[Callable[..., Any]]:
        """Methods of this episode that are tools. Their state is in its attributes, which a fork copies."""
        return ()

    # The environment.

    async def reset(self) -> Observation:
        self._begin()
        sessions: list[ToolSession] = []
        self.sessions = sessions  # so that `close` finds those that were opened before one fails
        for toolset in self.toolsets:
            sessions.append(await toolset.open(self.task.seed))
        sessions.append(Fixed(self.own_tools()))
        self._offered = self._specs()
        return self.show(*self.opening())

    async def step(self, message: Message) -> Step:
        self._check_running()
        self.history.append(message)
        calls = bool(message.tool_calls or message.errors)
        if calls and self.calls.left == 0:
            return await self.out_of_calls(message)
        if calls:
            return await self._use_tools(message)
        if self.settings.tool_required and not self.called:
            if self.calls.left == 0:
                return await self.out_of_calls(message)
            self.calls.left -= 1
            return Step(self.show(self.say("Call a tool before you answer.")))
        return await self.answered(message)

    async def fork(self, seed: int) -> Self:
        *sessions, _ = self.sessions  # the last one holds the tools that are methods of this episode
        for session in sessions:
            if not isinstance(session, ForkableTools):
                name = type(session).__name__
                raise CapabilityError(f"environment {self.settings.label}: {name} cannot be forked")
        twin = await super().fork(seed)
        forks = [await session.fork(seed) for session in sessions]  # type: ignore[attr-defined]
        twin.sessions = [*forks, Fixed(twin.own_tools())]
        return twin

    async def close(self) -> None:
        await super().close()
        sessions, self.sessions = self.sessions, ()
        for session in sessions:
            await session.close()

    # For subclasses.

    @property
    def tools(self) -> Mapping[str, Tool]:
        """On offer now.

        Raises:
            ToolDefinitionError: two have the same name.
        """
        found: dict[str, Tool] = {}
        for session in self.sessions:
            for tool in session.tools:
                if found.setdefault(tool.spec.name, tool) is not tool:
                    raise ToolDefinitionError(
                        f"environment {self.settings.label}: two tools are called {tool.spec.name}"
                    )
        return found

    def next_of(self, calls: Sequence[ToolCall], answer: str) -> str:
        """What an expert says next that makes these calls, one a turn, as JSON in <tool_call> (Hermes), and
        then answers."""
        return write_calls([calls[self.called]]) if self.called < len(calls) else answer

    def show(self, *messages: Message) -> Observation:
        """The observation that adds these messages."""
        self.history.extend(messages)
        return Observation(messages, tools=self._offered)

    async def _use_tools(self, message: Message) -> Step:
        results = [CallResult(f"Error: {error}", "error") for error in message.errors]
        self.calls.left -= min(len(results), self.calls.left)
        results += await self.calls.run(message.tool_calls, self.tools)
        names = [None] * len(message.errors) + [call.name for call in message.tool_calls]
        shown = [self.say(result.text, "tool", name) for result, name in zip(results, names, strict=True)]
        how = Counter(result.how for result in results)
        self.called += how["ok"]
        metrics = {
            "tool_calls": float(len(results)),
            "tool_errors": float(len(results) - how["ok"]),
            "tool_exceptions": float(how["exception"]),
            "tool_timeouts": float(how["timeout"]),
        }
        for session in self.sessions:
            for name, value in session.metrics().items():
                metrics[name] = metrics.get(name, 0.0) + value
        return Step(self._observe_results(shown), metrics=metrics)

    def _observe_results(self, results: Sequence[Message]) -> Observation:
        offered, self._offered = self._offered, self._specs()
        if self._offered == offered:
            return self.show(*results)
        if any(not message.id for message in self.history):
            raise RecordError(
                f"task {self.task.id}: tools that change need replies with an id, got one without"
            )
        self.history = [*self.history, *results]
        return dataclasses.replace(self.show(), context=tuple(self.history))

    def _specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools.values())

    def _shared(self) -> tuple[Any, ...]:
        return (
            *super()._shared(),
            self.toolsets,
            self.sessions,
            self.calls.limits,
            self._offered,
            *self.history,
        )


class RewardedDialogue(ToolDialogue):
    """A dialogue that ends with its first answer, which a reward grades."""

    reward_name = "reward"

    def __init__(
        self, settings: ToolDialogueSettings, task: Task, toolsets: Sequence[Toolset], reward: Reward
    ) -> None:
        super().__init__(settings, task, toolsets)
        self.reward = reward

    @abstractmethod
    def columns(self) -> Mapping[str, Any]:
        """What the reward may read besides the dialogue and the answer of the task."""

    async def answered(self, message: Message) -> Step:
        self._end()
        return await self.grade(self.history, terminated=True)

    async def out_of_calls(self, message: Message) -> Step:
        self._end()
        return await self.grade(self.history, terminated=False)

    async def grade(self, messages: Sequence[Message], *, terminated: bool) -> Step:
        """The last step of an episode with this dialogue.

        Args:
            terminated: it ended with an answer; otherwise no calls were left.
        """
        if not terminated:  # whatever stands beside the call is no answer
            messages = [*messages[:-1], Message("assistant", "")]
        score = await self.reward.score(Attempt(tuple(messages), self.task.answer, self.columns()))
        if not math.isfinite(score.value):
            raise ValueError(
                f"environment {self.settings.label}: the reward is {score.value}, expected a finite number"
            )
        return Step(
            rewards={self.reward_name: score.value},
            terminated=terminated,
            truncated=not terminated,
            metrics={"success": float(score.solved), **score.metrics},
        )

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.reward)

"""Questions to be answered with tools: a world of your own takes a function and a list.

    def inhabitants(city: str) -> int:
        '''How many people live in a city.'''
        if city not in CENSUS:
            raise ToolError(f"unknown city {city}")
        return CENSUS[city]

    class Cities(ToolQA):
        type: Literal["cities"] = "cities"
        eval_size: int = 20

        def questions(self):
            return [Question(f"How many people live in {city}?", str(n)) for city, n in CENSUS.items()]

        def tools(self):
            return [inhabitants]

Reward 1 if every question of the episode is answered rightly, else 0; the first wrong answer ends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.episode import Episode
from silva.environments.grading import exact_match, extract_answer, last_number, same_number
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, listed
from silva.errors import RecordError
from silva.tools.function import ToolError, tool
from silva.types import Message, Observation, Step, Task, ToolCall

if TYPE_CHECKING:
    from silva.protocols import TaskSet, Tool

HIDDEN = "..."


class Question(NamedTuple):
    text: str
    answer: str


class ToolQA(EnvironmentSettings):
    """Base of the settings of a tool world: define `questions` and `tools`, where wanted `grade`."""

    instructions: str = ""
    """Stands before the first question."""
    tool_required: bool = False
    """An answer without a tool call since the question was asked is sent back."""
    max_tool_calls: Positive = 8
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""
    hide_observations: bool = False
    """Show only the newest tool results: older ones are replaced by "..."."""
    tool_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds one tool call may take."""
    max_result_chars: Positive = 2000
    """Characters of a tool result that are shown."""

    def questions(self) -> Sequence[Question | Sequence[Question]]:
        """One entry an episode: a question, or several that are asked one after the other."""
        raise TypeError(f"{type(self).__name__} must define questions()")

    def tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Functions (docstring and type hints tell the model how to call them), or tools."""
        raise TypeError(f"{type(self).__name__} must define tools()")

    def grade(self, reply: str, answer: str) -> bool:
        """Whether a reply is right: a number is compared with the last one of the reply, other answers
        with the text of <answer>...</answer> or the whole reply, apart from case and punctuation."""
        if exact_match(extract_answer(reply), answer):
            return True
        return _is_number(answer) and same_number(reply, answer)

    def taskset(self) -> TaskSet:
        return listed(self, (draft(entry) for entry in self.questions()), self.builder())

    def builder(self) -> Callable[[Task], ToolEpisode]:
        """What makes the episode of a task; the tools are shared by all of them."""
        tools = self.wrapped_tools()
        return lambda task: ToolEpisode(self, task, tools)

    def wrapped_tools(self) -> tuple[Tool, ...]:
        return tuple(self._wrap(entry) for entry in self.tools())

    def _wrap(self, entry: Callable[..., Any] | Tool) -> Tool:
        if hasattr(entry, "spec"):
            return entry  # type: ignore[return-value]
        return tool(entry, timeout=self.tool_timeout, max_chars=self.max_result_chars)


def draft(entry: Question | Sequence[Question]) -> Draft:
    """The draft of an episode that asks these questions."""
    chain = [entry] if isinstance(entry, Question) else list(entry)
    return Draft({"questions": [q.text for q in chain]}, [q.answer for q in chain])


class ToolEpisode(Episode):
    """A `Forkable` environment: asks, runs the tools that are called, grades the answers."""

    settings: ToolQA

    def __init__(self, settings: ToolQA, task: Task, tools: Sequence[Tool]) -> None:
        super().__init__(settings, task)
        self.tools = {one.spec.name: one for one in tools}
        self.calls_left = settings.max_tool_calls
        self.question = 0  # index of the one that is open
        self.called = False  # a tool ran since it was asked
        self.history: list[Message] = []

    async def reset(self) -> Observation:
        self._begin()
        text = self.task.data["questions"][0]
        return self._append(self.say(f"{self.settings.instructions}\n{text}".strip()))

    async def step(self, message: Message) -> Step:
        self._check_running()
        self.history.append(message)
        if message.tool_calls or message.errors:
            return await self._use_tools(message)
        if self.settings.tool_required and not self.called:
            if self.calls_left == 0:
                return self._final(truncated=True)
            self.calls_left -= 1
            return Step(self._append(self.say("Call a tool before you answer.")), {"correct": 0.0})
        return self._judge(message)

    async def _use_tools(self, message: Message) -> Step:
        if self.calls_left == 0:
            return self._final(truncated=True)
        results, failed = [], 0
        for error in message.errors:
            results.append(self.say(f"Error: {error}", "tool"))
            failed += 1
            self.calls_left -= 1
        for call in message.tool_calls:
            try:
                if self.calls_left <= 0:
                    raise ToolError("no tool calls are left")
                self.calls_left -= 1
                text = await self._call(call)
            except ToolError as error:
                text = f"Error: {error}"
                failed += 1
            results.append(self.say(text, "tool", call.name))
        self.calls_left = max(self.calls_left, 0)
        metrics = {"tool_calls": float(len(results)), "tool_errors": float(failed)}
        return Step(self._observe_results(results), {"correct": 0.0}, metrics=metrics)

    async def _call(self, call: ToolCall) -> str:
        if call.name not in self.tools:
            raise ToolError(f"no tool called {call.name!r}: there is {', '.join(self.tools) or 'none'}")
        result = await self.tools[call.name](call.arguments)
        self.called = True
        return result

    def _judge(self, message: Message) -> Step:
        reply = message.content.rpartition("</think>")[2]
        if not self.settings.grade(reply, self.task.answer[self.question]):
            return self._final()
        self.question += 1
        self.called = False
        if self.question == len(self.task.answer):
            return self._final(solved=True)
        return Step(self._append(self.say(self.task.data["questions"][self.question])), {"correct": 0.0})

    def _final(self, solved: bool = False, truncated: bool = False) -> Step:
        self._end()
        metrics = {"success": float(solved), "answered": self.question / len(self.task.answer)}
        return Step(rewards={"correct": float(solved)}, terminated=not truncated, truncated=truncated,
                    metrics=metrics)  # fmt: skip

    def _append(self, *messages: Message) -> Observation:
        self.history.extend(messages)
        return Observation(messages, tools=tuple(one.spec for one in self.tools.values()))

    def _observe_results(self, results: list[Message]) -> Observation:
        shown = [message for message in self.history if message.role == "tool" and message.content != HIDDEN]
        if not (self.settings.hide_observations and shown):
            return self._append(*results)
        if any(not message.id for message in self.history):
            raise RecordError(
                f"task {self.task.id}: hide_observations needs replies with an id, got one without"
            )
        kept = [dataclasses.replace(m, content=HIDDEN) if m.role == "tool" else m for m in self.history]
        self.history = [*kept, *results]
        return dataclasses.replace(self._append(), context=tuple(self.history))

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), *self.tools.values())


def _is_number(answer: str) -> bool:
    text = answer.strip()
    return last_number(text) is not None and not text.strip("-−0123456789.,")

"""Episodes whose tools come from sessions: opened, changed, counted, forked, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.environments.conftest import call, said

from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.errors import CapabilityError, RecordError
from silva.protocols import Tool
from silva.tools.fixed import Fixed
from silva.tools.function import ToolDefinitionError, tool
from silva.types import Message, Step, Task, ToolCall

TASK = Task("t", "w", 7, {})


class Doors:
    """A toolset. `open_door` is on offer until it is called, then `close_door` is."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.seeds, self.closed = fails, [], 0

    async def open(self, seed: int) -> Door:
        self.seeds.append(seed)
        if self.fails:
            raise ConnectionError("no doors today")
        return Door(self)


class Door:
    def __init__(self, doors: Doors) -> None:
        self.doors, self.is_open, self.moved = doors, False, 0

    @property
    def tools(self) -> Sequence[Tool]:
        return [tool(self.close_door)] if self.is_open else [tool(self.open_door)]

    async def open_door(self) -> str:
        """Open it."""
        self.is_open, self.moved = True, self.moved + 1
        return "open"

    async def close_door(self) -> str:
        """Close it."""
        self.is_open, self.moved = False, self.moved + 1
        return "closed"

    def metrics(self) -> Mapping[str, float]:
        moved, self.moved = self.moved, 0
        return {"moved": float(moved)}

    async def close(self) -> None:
        self.doors.closed += 1


def look() -> str:
    """Look around."""
    return "a door"


class Dialogue(ToolDialogue):
    def opening(self) -> Sequence[Message]:
        return [self.say("Go.")]

    async def answered(self, message: Message) -> Step:
        return Step(rewards={"said": 1.0}, terminated=True)

    async def out_of_calls(self, message: Message) -> Step:
        return Step(rewards={"said": 0.0}, truncated=True)


def play(*messages: Message, toolsets: Sequence[Any], **keys: Any) -> list[Any]:
    async def go() -> list[Any]:
        episode = Dialogue(ToolDialogueSettings(**keys), TASK, toolsets)
        try:
            told: list[Any] = [await episode.reset()]
            for number, message in enumerate(messages):
                told.append(await episode.step(replace(message, id=message.id or f"r{number}")))
            return told
        finally:
            await episode.close()

    return asyncio.run(go())


def test_sessions_are_opened_with_the_tasks_seed_and_closed() -> None:
    doors = Doors()
    first, *_ = play(toolsets=[Fixed([look]), doors])
    assert [spec.name for spec in first.tools] == ["look", "open_door"]
    assert (doors.seeds, doors.closed) == ([7], 1)


def test_what_was_opened_is_closed_if_the_next_one_fails() -> None:
    doors = Doors()
    with pytest.raises(ConnectionError, match="no doors"):
        play(toolsets=[doors, Doors(fails=True)])
    assert doors.closed == 1


def test_tools_that_change_are_told_in_a_whole_new_context() -> None:
    _, opened, looked, again = play(
        call("open_door"), call("look"), call("open_door"), toolsets=[Fixed([look]), Doors()]
    )
    assert [m.content for m in opened.observation.context] == ["Go.", "", "open"]
    assert [spec.name for spec in opened.observation.tools] == ["look", "close_door"]
    assert looked.observation.context is None and said(looked) == "a door"
    assert said(again) == "Error: no tool called 'open_door': there is look, close_door"
    nameless = Dialogue(ToolDialogueSettings(), TASK, [Doors()])
    asyncio.run(nameless.reset())
    with pytest.raises(RecordError, match="tools that change need replies with an id"):
        asyncio.run(nameless.step(call("open_door")))


def test_what_sessions_count_is_added_to_the_metrics_of_the_step() -> None:
    both = Message("assistant", "", tool_calls=(ToolCall("open_door", {}), ToolCall("look", {})), id="r")
    _, step = play(both, toolsets=[Fixed([look]), Doors()])
    assert step.metrics == {
        "tool_calls": 2.0, "tool_errors": 0.0, "tool_exceptions": 0.0, "tool_timeouts": 0.0, "moved": 1.0
    }  # fmt: skip


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="two tools are called look"):
        play(toolsets=[Fixed([look]), Fixed([look])])


def test_limits_by_tool_and_in_all() -> None:
    _, first, second, last = play(
        call("look"), call("look"), call("look"), toolsets=[Fixed([look])], max_tool_calls=2,
        max_calls_of={"look": 1},
    )  # fmt: skip
    assert said(first) == "a door"
    assert said(second) == "Error: no calls of look are left (1 were allowed)"
    assert last.truncated and last.rewards == {"said": 0.0}


def test_a_required_tool_cannot_be_waited_out() -> None:
    answer = Message("assistant", "42", id="a")
    told = play(answer, answer, answer, toolsets=[Fixed([look])], tool_required=True, max_tool_calls=2)
    assert [step.truncated for step in told[1:]] == [False, False, True]
    _, looked, done = play(call("look"), answer, toolsets=[Fixed([look])], tool_required=True)
    assert not looked.terminated and done.rewards == {"said": 1.0}


def test_an_episode_forks_as_far_as_its_tools_do() -> None:
    async def fork(toolsets: Sequence[Any]) -> Any:
        episode = Dialogue(ToolDialogueSettings(), TASK, toolsets)
        await episode.reset()
        return await episode.fork(1)

    twin = asyncio.run(fork([Fixed([look])]))
    assert list(twin.tools) == ["look"]
    with pytest.raises(CapabilityError, match="Door cannot be forked"):
        asyncio.run(fork([Doors()]))

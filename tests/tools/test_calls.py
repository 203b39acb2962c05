"""Limits of an episode's tool calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from silva.errors import Escaped
from silva.tools import calls as module
from silva.tools.calls import CallLimits, CallResult, Calls, ToolLate
from silva.tools.fixed import Fixed
from silva.tools.function import ToolError, cut, tool
from silva.types import ToolCall, ToolSpec


class Meeting:
    """Tools that wait for each other: `meet` returns once `people` are there."""

    def __init__(self, people: int = 1) -> None:
        self.people, self.there, self.most, self.cancelled = people, 0, 0, 0

    async def meet(self, word: str = "met") -> str:
        """Wait for the others."""
        self.there += 1
        self.most = max(self.most, self.there)
        try:
            while self.most < self.people:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.there -= 1
        return word

    async def lose(self) -> str:
        """Lose the connection."""
        raise ConnectionError("lost")

    async def refuse(self, why: str = "no such page") -> str:
        """Refuse."""
        raise ToolError(why)


def made(limits: CallLimits, meeting: Meeting, *batches: Sequence[ToolCall]) -> list[list[CallResult]]:
    async def play() -> list[list[CallResult]]:
        calls = Calls(limits, limits.calls)
        return [await calls.run(batch, tools) for batch in batches]

    wrapped = [tool(meeting.meet), tool(meeting.lose), tool(meeting.refuse)]
    tools = {one.spec.name: one for one in Fixed(wrapped).tools}
    return asyncio.run(play())


def limits(
    calls: int = 8, timeout: float = 5.0, max_chars: int = 100, concurrent: int = 8, **per: int
) -> CallLimits:
    return CallLimits(calls, per, timeout, max_chars, concurrent)


def meet(word: str = "met") -> ToolCall:
    return ToolCall("meet", {"word": word})


def test_the_calls_of_one_reply_run_side_by_side_and_answer_in_order() -> None:
    meeting = Meeting(people=3)
    assert made(limits(), meeting, [meet("a"), meet("b"), meet("c")]) == [[CallResult(w) for w in "abc"]]
    assert meeting.most == 3


def test_at_most_so_many_at_once() -> None:
    meeting = Meeting(people=2)
    made(limits(concurrent=2), meeting, [meet()] * 6)
    assert meeting.most == 2


def test_calls_are_counted_by_episode_and_by_tool() -> None:
    first, second = made(
        limits(4, meet=2), Meeting(), [meet(), meet(), meet()], [ToolCall("refuse", {}), meet()]
    )
    assert [r.how for r in first] == ["ok", "ok", "refused"]
    assert first[2].text == "Error: no calls of meet are left (2 were allowed)"
    assert second == [
        CallResult("Error: no such page", "error"),
        CallResult("Error: no tool calls are left", "refused"),
    ]


def test_an_unknown_tool_counts_too() -> None:
    ((unknown, refused),) = made(limits(1), Meeting(), [ToolCall("search", {}), meet()])
    assert unknown == CallResult("Error: no tool called 'search': there is meet, lose, refuse", "error")
    assert refused.how == "refused"


def test_a_slow_call_is_cancelled_and_the_others_are_not() -> None:
    """A tool's own limits go before those of the episode."""
    meeting = Meeting(people=9)

    async def play() -> list[CallResult]:
        own = [tool(meeting.meet, timeout=0.02), tool(meeting.refuse, max_chars=7)]
        tools = {one.spec.name: one for one in Fixed(own).tools}
        return await Calls(limits(timeout=60.0), 8).run([meet(), ToolCall("refuse", {})], tools)

    slow, short = asyncio.run(play())
    assert slow == CallResult("Error: meet took longer than 0.02 s", "timeout") and meeting.cancelled == 1
    assert short == CallResult("Error: \n[cut: 7 of 19 characters shown]", "error")


def test_a_slow_call_of_a_session_that_it_would_spoil_is_a_fault() -> None:
    spoilt = limits(timeout=0.02)._replace(late_is_fault=True)
    with pytest.raises(ToolLate, match=r"meet took longer than 0\.02 s"):
        made(spoilt, Meeting(people=2), [ToolCall("meet", {})])


def test_a_tool_of_a_users_own_class_that_exits_ends_no_loop() -> None:
    class Exits:
        spec = ToolSpec("exits", "Exits.", {})

        async def __call__(self, arguments) -> str:
            raise SystemExit(0)

    async def run() -> None:
        calls = [ToolCall("exits", {})] * 2
        await Calls(limits(), 8).run(calls, {"exits": Exits()})

    with pytest.raises(Escaped, match="SystemExit: 0"):
        asyncio.run(run())


def test_a_broken_tool_ends_the_others() -> None:
    meeting = Meeting(people=9)
    with pytest.raises(ConnectionError, match="lost"):
        made(limits(), meeting, [meet(), ToolCall("lose", {}), meet()])
    assert meeting.cancelled == 2


def test_the_limit_holds_for_threads_and_for_calls_that_will_not_be_cancelled(monkeypatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.02)
    release, ended = threading.Event(), asyncio.Event()

    def thread() -> bool:
        """Wait in a thread."""
        return release.wait(60)

    async def stubborn() -> str:
        """Will not be cancelled."""
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await ended.wait()
        raise ConnectionError("late, and nobody hears it")

    async def play() -> list[CallResult]:
        tools = {one.spec.name: one for one in Fixed([thread, stubborn]).tools}
        try:
            return await Calls(limits(timeout=0.02), 8).run([ToolCall(name, {}) for name in tools], tools)
        finally:
            ended.set()
            release.set()
            await asyncio.sleep(0)

    assert [result.how for result in asyncio.run(play())] == ["timeout", "timeout"]


def test_an_episode_that_is_given_up_takes_its_calls_along() -> None:
    meeting = Meeting(people=9)

    async def play() -> None:
        tools = {one.spec.name: one for one in Fixed([meeting.meet]).tools}
        async with asyncio.timeout(0.02):
            await Calls(limits(), 8).run([meet()], tools)

    with pytest.raises(TimeoutError):
        asyncio.run(play())
    assert meeting.cancelled == 1


def test_long_results_are_cut_and_say_so() -> None:
    ((long, wrong),) = made(
        limits(max_chars=9), Meeting(), [meet("x" * 12), ToolCall("refuse", {"why": "y" * 12})]
    )
    assert long.text == "xxxxxxxxx\n[cut: 9 of 12 characters shown]"
    assert wrong.text == "Error: yy\n[cut: 9 of 19 characters shown]"
    assert cut("12345", 5) == "12345"

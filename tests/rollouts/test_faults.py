"""Faults in words: whose line, which kind, how often; and who keeps the event loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from silva.actors.script import Script
from silva.ports import Clock, use_clock
from silva.rollouts.episode import play
from silva.rollouts.faults import Watch, kind, tally, watched
from silva.types import Message, Observation, Step

HERE = "tests/rollouts/test_faults.py"


class Listener(Watch):
    def __init__(self) -> None:
        self.faults: list[tuple[str, str, str]] = []
        self.blocks: list[tuple[str, str, float]] = []

    def fault(self, *what: Any) -> None:
        self.faults.append(what)

    def blocked(self, *what: Any) -> None:
        self.blocks.append(what)


@pytest.fixture
def run(task, renderer, policy, limits, speaker):
    """`run(world)` -> the trajectory, and what was told."""

    def go(world, actor=None, **values: Any):
        listener = Listener()
        actor = actor or policy(speaker("yes"), renderer)
        playing = play(task, world, actor, renderer, limits(**values), id="e", seed=1, watch=listener)
        return asyncio.run(playing), listener

    return go


def line_of(function: Any, plus: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + plus}"


def test_a_fault_names_the_users_line_and_the_whole_trace_is_told(run, world, talk) -> None:
    """The library that raises is not where the user looks."""

    class Broken(talk):
        async def reset(self) -> Observation:
            return json.loads("{")

    trajectory, told = run(world(Broken))
    where = line_of(Broken.reset, 1)
    ((name, error, trace),) = told.faults
    assert name == "talk" and error == trajectory.error
    assert error.startswith("reset: JSONDecodeError: ") and error.endswith(f" ({where})")
    assert "json/decoder.py" in trace and HERE in trace and "JSONDecodeError" in trace


def test_what_no_line_of_the_user_raised_names_their_class(run, world, talk) -> None:
    class Wrong(talk):
        async def step(self, message: Message) -> Step:
            return None  # type: ignore[return-value]

    trajectory, _ = run(world(Wrong))
    assert trajectory.error.startswith("step: TypeError: got NoneType, expected Step (Wrong of " + HERE)


def test_a_scripts_own_fault_is_one_of_the_environment(run, world, talk, renderer) -> None:
    class Player(talk):
        def expert_reply(self) -> str:
            return [][0]

        def random_reply(self, seed: int) -> str:
            return "no"

    trajectory, told = run(world(Player), Script(renderer))
    assert trajectory.failure == "redo" and len(told.faults) == 1
    assert trajectory.error == (
        f"expert_reply: IndexError: list index out of range ({line_of(Player.expert_reply, 1)})"
    )


def test_limits_are_told_without_a_trace(run, world, talk) -> None:
    _, told = run(world(talk), max_episode_tokens=5)
    ((_, error, trace),) = told.faults
    assert "max_episode_tokens = 5" in error and trace == ""


def test_errors_of_one_kind_differ_in_numbers_alone() -> None:
    assert kind("prompt of 231 tokens in a context of 230") == kind("prompt of 9 tokens in a context of 230")
    assert kind("step: KeyError: 'a' (w.py:12)") != kind("step: KeyError: 'a' (w.py:13)")
    assert kind("step: KeyError: 'x1'") != kind("step: KeyError: 'x2'")


def test_a_tally_counts_kinds_and_shows_the_commonest_first() -> None:
    errors = ["a 1", "b", "a 2", "c", "d", "a 3", None]
    assert tally(errors) == "3 x a 1; 1 x b; 1 x c; 2 x other errors"
    assert tally(["a", "a"]) == "2 x a"


class Still(Clock):
    """Time passes only where a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock():
    clock = Still()
    with use_clock(clock):
        yield clock


def test_a_step_that_keeps_the_event_loop_is_told_and_one_that_waits_is_not(run, world, talk, clock) -> None:
    class Slow(talk):
        async def reset(self) -> Observation:
            await asyncio.sleep(0)
            clock.now += 0.05  # short
            return await super().reset()

        async def step(self, message: Message) -> Step:
            clock.now += 5.0  # as time.sleep would
            for _ in range(3):
                await asyncio.sleep(0)
            clock.now += 0.25
            return await super().step(message)

    trajectory, told = run(world(Slow), max_turns=1)
    assert told.blocks == [("talk", "step", 5.0), ("talk", "step", 0.25)]
    assert trajectory == run(world(talk), max_turns=1)[0]


def test_time_that_others_take_is_not_the_environments(run, world, talk, clock) -> None:
    class Waits(talk):
        async def step(self, message: Message) -> Step:
            asyncio.get_running_loop().call_soon(setattr, clock, "now", clock.now + 60.0)
            await asyncio.sleep(0)
            return await super().step(message)

    assert run(world(Waits))[1].blocks == []


def test_a_slow_construction_is_told(run, world, talk, clock) -> None:
    def make(task):
        clock.now += 2.0
        return talk(task)

    assert run(world(make))[1].blocks == [("talk", "construction", 2.0)]


def test_watching_a_call_changes_nothing_about_it() -> None:
    """Results, exceptions and cancellation go through; what was opened is closed."""
    closed = []

    async def call(fail: bool, forever: bool = False) -> int:
        try:
            await asyncio.sleep(0)
            if fail:
                raise KeyError("x")
            if forever:
                await asyncio.Event().wait()
            return 7
        finally:
            closed.append(fail)

    async def go() -> None:
        tell = closed.append
        assert await watched(call, False, tell=tell) == 7
        with pytest.raises(KeyError):
            await watched(call, True, tell=tell)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await watched(call, False, True, tell=tell)

    asyncio.run(go())
    assert closed == [False, True, False]

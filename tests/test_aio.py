"""Coroutines together: what is returned, what is raised, and that nothing goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from silva.aio import Turnstile, cancelled, first, gather


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # it takes a moment to clean up
        ended.append(name)


async def soon(value: Any) -> Any:
    await asyncio.sleep(0)
    if isinstance(value, Exception):
        raise value
    return value


def test_results_come_in_order() -> None:
    assert asyncio.run(gather(soon(i) for i in range(3))) == [0, 1, 2]


def test_the_first_error_ends_the_others_and_is_raised_as_it_is() -> None:
    async def run(ended: list[str]) -> None:
        error = ValueError("one")
        with pytest.raises(ValueError) as raised:
            await gather([forever(ended, "a"), soon(error), forever(ended, "b")])
        assert raised.value is error and ended == ["a", "b"]

    asyncio.run(run([]))


def test_who_is_cancelled_ends_all() -> None:
    async def run(ended: list[str]) -> None:
        for waiting in (gather([forever(ended, "a")]), first(forever(ended, "b"), forever(ended, "c"))):
            task = asyncio.ensure_future(waiting)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ended == ["a", "b", "c"]

    asyncio.run(run([]))


def test_the_first_of_two_ends_the_other() -> None:
    async def run(ended: list[str]) -> None:
        done = await first(soon(1), forever(ended, "other"))
        assert done is not None and done.result() == 1
        assert await first(forever(ended, "work"), soon(2)) is None
        failed = await first(soon(ValueError("one")), forever(ended, "third"))
        with pytest.raises(ValueError, match="one"):
            failed and failed.result()
        assert ended == ["other", "work", "third"]

    asyncio.run(run([]))


def test_a_turnstile_lets_a_few_pass_in_each_turn_of_the_loop_in_their_order() -> None:
    """And one that is cancelled while it waits takes nobody's place."""

    async def run() -> list[tuple[int, str]]:
        turnstile, turn, passed = Turnstile(2), [0], list[tuple[int, str]]()

        async def count() -> None:
            while True:
                turn[0] += 1
                await asyncio.sleep(0)

        async def enter(name: str) -> None:
            await turnstile()
            passed.append((turn[0], name))

        counting = asyncio.ensure_future(count())
        tasks = {name: asyncio.ensure_future(enter(name)) for name in "abcdefg"}
        await asyncio.sleep(0)
        await cancelled([tasks.pop("d")])
        await asyncio.gather(*tasks.values())
        await enter("h")  # the door stands open again
        await cancelled([counting])
        return passed

    passed = asyncio.run(run())
    assert [name for _, name in passed] == list("abcefgh")
    assert max(sum(turn == each for turn, _ in passed) for each, _ in passed) == 2

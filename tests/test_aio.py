"""Coroutines together: what is returned, what is raised, and that nothing goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from silva.aio import first, gather


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

"""Coroutines together: whoever stops waiting for one cancels it, and waits until it has ended."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and wait until each has ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather(works: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; the first error cancels the others and is raised as it is."""
    works = list(works)
    if len(works) < 2:  # a task would cost turns of the event loop
        return [await work for work in works]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def first(work: Awaitable[T], other: Awaitable[Any]) -> asyncio.Future[T] | None:
    """`work` when it has ended, or None if `other` ended before. Neither goes on afterwards."""
    both = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return both[0] if both[0].done() else None
    finally:
        await cancelled(both)


class Turnstile:
    """Lets coroutines pass in the order in which they come, `most` of them in each turn of the event loop.

    Tens of thousands that begin at once would otherwise run before a timer fires or a connection is read.
    """

    def __init__(self, most: int) -> None:
        self._most, self._passed = most, 0
        self._waiting = deque[asyncio.Future[None]]()

    async def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._passed == 0:
            loop.call_soon(self._turn)
        if self._passed < self._most:
            self._passed += 1
        else:
            self._waiting.append(waiting := loop.create_future())
            await waiting

    def _turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._most:
            if not (waiting := self._waiting.popleft()).done():  # else it was cancelled
                waiting.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._turn)


async def received(channel: socket.socket, size: int) -> bytes:
    """So many bytes of a socket that does not block. EOFError if it is closed before."""
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    while size:
        part = await loop.sock_recv(channel, min(size, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

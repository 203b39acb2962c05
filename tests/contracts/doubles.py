"""Slow and failing doubles of a part: every method takes a moment, and the next calls of one may fail."""

from __future__ import annotations

import asyncio
from typing import Any

from silva.errors import EngineError


class Slow:
    """Hands everything on to `inner`; each coroutine waits first, so that calls overlap."""

    def __init__(self, inner: Any, turns: int = 3) -> None:
        self._inner, self._turns = inner, turns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._waiting(found) if asyncio.iscoroutinefunction(found) else found

    def _waiting(self, method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            return await method(*args, **kwargs)

        return call


class Failing(Slow):
    """The next `failures` calls of `method` raise an EngineError, as a server that is gone does."""

    def __init__(self, inner: Any, method: str, failures: int = 1) -> None:
        super().__init__(inner)
        self._method, self._left = method, failures

    def __getattr__(self, name: str) -> Any:
        if name != self._method or not self._left:
            return super().__getattr__(name)
        self._left -= 1

        async def fail(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            raise EngineError(f"{name}: the connection was cut")

        return fail

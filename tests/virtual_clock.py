"""An event loop whose clock jumps to the next timer as soon as nothing is left to run: hours take no time.

Sockets whose both ends are in the loop belong to what is left to run: what one has sent the other can read.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from silva.ports import Clock

T = TypeVar("T")
LONGEST_CALL = 30  # real seconds that a call in another thread may take


class Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:  # no timer: another thread computes, or nobody will ever go on
            ready = super().select(LONGEST_CALL)
            assert ready, "every task waits for another one"
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, selector: Jumping | None = None) -> None:
        self._jumping = selector or Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopClock(Clock):
    """Silva's clock, by the running loop. `ahead`: seconds by which it is ahead of the loop's timers."""

    ahead = 0.0

    def monotonic(self) -> float:
        return now() + self.ahead


class NoWait(Clock):
    """Nobody waits: a pause is noted, and moves the clock on."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now, self.slept = now, list[float]()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class InLine(Executor):
    """Computes where it is asked to, so that no time passes meanwhile."""

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        found: Future[T] = Future()
        try:
            found.set_result(work(*args, **kwargs))
        except BaseException as error:
            found.set_exception(error)
        return found


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on a clock of its own that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()

"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run at the next safe point, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

from silva.aio import first
from silva.errors import PartLost
from silva.signals import Interrupted, stop_signals

T = TypeVar("T")


class Interrupt:
    """Listens for SIGINT, SIGTERM and SIGHUP while entered; what is ignored (nohup) stays ignored.

    `during(work)` gives up the work when the signal comes (rollouts can be played again); work that must not
    be cut (an update, a checkpoint) is simply awaited, and `check()` afterwards stops. If a part is lost
    meanwhile, the run ends too, instead of beginning again.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signals = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in stop_signals():
            try:  # not the loop's own handlers: these also end work that blocks the loop
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: a library's use
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None or issubclass(kind, PartLost):
            self.check()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._signals and number != signal.SIGHUP:  # a terminal that closes may send it more than once
            raise KeyboardInterrupt
        self._signals += 1
        self._loop.call_soon_threadsafe(self._asked.set)

    def check(self) -> None:
        if self._signals:
            raise Interrupted

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        if (done := await first(work, self._asked.wait())) is None:
            raise Interrupted
        return done.result()

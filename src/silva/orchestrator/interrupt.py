"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run at the next safe point, the second at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

from silva.aio import first
from silva.errors import PartLost
from silva.signals import Interrupted, stop_signals

T = TypeVar("T")


class Interrupt:
    """Listens for SIGINT, SIGTERM and SIGHUP while entered; what is ignored (nohup) stays ignored.

    `during(work)` gives up the work when the signal comes (rollouts can be played again); work that must not
    be cut (an update, a checkpoint) is simply awaited, and `check()` afterwards stops. If a part is lost
    meanwhile, the run ends too, instead of beginning again. A signal reaches all that are entered.
    """

    _entered: ClassVar[list[Interrupt]] = []
    _before: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signals = 0

    def __enter__(self) -> Interrupt:
        for number in [] if self._entered else stop_signals():
            try:  # not the loop's own handlers: these also end work that blocks the loop
                self._before[number] = signal.signal(number, _heard)
            except ValueError:  # not in the main thread: a library's use
                break
        self._entered.append(self)
        if any(each._signals for each in self._entered):
            self._ask()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.remove(self)
        while self._before and not self._entered:
            signal.signal(*self._before.popitem())
        if kind is None or issubclass(kind, PartLost):
            self.check()

    def _ask(self) -> None:
        self._signals += 1
        self._loop.call_soon_threadsafe(self._asked.set)

    def check(self) -> None:
        if self._signals:
            raise Interrupted

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        if (done := await first(work, self._asked.wait())) is None:
            raise Interrupted
        return done.result()


def _heard(number: int, frame: FrameType | None) -> None:
    again = any(each._signals for each in Interrupt._entered)
    if again and number != signal.SIGHUP:  # a terminal that closes may send it more than once
        raise KeyboardInterrupt
    for each in Interrupt._entered:
        each._ask()

"""Notices that nothing happens any more and shows where every thread and task stands. Never kills.

The main program calls `beat` whenever something moves. A daemon thread compares the last beat with the
clock; after `stall_after` seconds of silence it reports, and again after twice that time, four times it,
and so on, until the next beat.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from silva.ports import CLOCK


class Watchdog:
    """`report` gets the seconds of silence, those of them that this process computed (on all cores), and the
    stacks as text; it runs in the watchdog's thread."""

    def __init__(
        self,
        stall_after: float,
        report: Callable[[float, float, str], None],
        clock: Callable[[], float] = CLOCK.monotonic,
    ) -> None:
        self._stall_after = stall_after
        self._report = report
        self._clock = clock
        self._last, self._computed = clock(), time.process_time()
        self._next = stall_after
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silva-watchdog", daemon=True)

    def start(self) -> None:
        self._last, self._computed = self._clock(), time.process_time()
        self._thread.start()

    def beat(self) -> None:
        """Something moved. Cheap, callable from any thread; remembers the event loop it runs in."""
        self._last, self._computed = self._clock(), time.process_time()
        self._loop = asyncio._get_running_loop() or self._loop

    def check(self) -> None:
        """Report if the silence has lasted long enough."""
        silence = self._clock() - self._last
        if silence < self._stall_after:
            self._next = self._stall_after
        elif silence >= self._next:
            self._next *= 2
            self._report(silence, time.process_time() - self._computed, stacks(self._loop))

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._stall_after / 4)):
            self.check()


def stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Stacks of all Python threads and of the loop's unfinished tasks; equal ones are shown once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
        for ident, frame in _frames().items()
        if ident != threading.get_ident()
    ]
    if loop is not None and not loop.is_closed():
        parts += _task_stacks(loop)
    return "\n".join(parts)


def _frames() -> dict[int, FrameType]:
    """Of all threads. Some releases of Python 3.11 and 3.12 may collect garbage in here while they hold the
    lock of all threads, and stand still where a finalizer waits (python/cpython#106883)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collecting:
            gc.enable()


def _task_stacks(loop: asyncio.AbstractEventLoop) -> list[str]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the set kept changing under us: then the loop is not stuck
        return ["asyncio tasks: could not be listed"]
    found: Counter[str] = Counter()
    example: dict[str, str] = {}
    for task in sorted(tasks, key=lambda t: t.get_name()):
        place = "".join(_awaiting(task.get_coro()))
        found[place] += 1
        example.setdefault(place, task.get_name())
    return [
        f"asyncio task {example[place]}"
        + (f" and {n - 1} more at the same place" if n > 1 else "")
        + f"\n{place}"
        for place, n in found.most_common()
    ]


def _awaiting(coroutine: Any) -> list[str]:
    """Where a suspended coroutine stands, outermost first (`Task.get_stack` shows only the outermost)."""
    lines: list[str] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            if not lines or hasattr(coroutine, "__await__"):
                lines.append(f"  waiting for {coroutine!r:.200}\n")
            break
        lines += traceback.format_list([traceback.extract_stack(frame, limit=1)[-1]])
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return lines

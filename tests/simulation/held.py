"""What a seed needs of the real process: an end, no garbage collections, and what takes long made once."""

from __future__ import annotations

import contextlib
import gc
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.loop import Hang

LIMIT = 60
"""Seconds that a seed may compute: code that never comes back to the loop is a hang, too."""
ASLEEP = 900
"""Real seconds of a seed, which may wait for a core: code that sleeps for ever is one as well."""


@contextlib.contextmanager
def in_real_time() -> Iterator[None]:
    """A seed that does not end is a `Hang`."""

    def late(number: int, frame: Any) -> None:
        end = f"{LIMIT} seconds of computing" if number == signal.SIGPROF else f"{ASLEEP} real seconds"
        raise Hang(f"no end within {end}\n" + "".join(traceback.format_stack(frame)))

    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    left = signal.alarm(ASLEEP)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(left)
        for number, handler in before.items():
            signal.signal(number, handler)


_played = 0  # seeds of this process


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python would look through all of torch again and again; what a seed leaves behind is little."""
    global _played
    if not _played:
        gc.collect()
        gc.freeze()
    _played += 1
    if _played % 20 == 0:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_MADE: dict[tuple[str, object], Any] = {}


def once(function: Callable[..., Any], key: object) -> Callable[..., Any]:
    """What takes long and depends on the configuration alone is made once in a process."""

    def made(*arguments: Any, **named: Any) -> Any:
        place = function.__name__, key
        if place not in _MADE:
            _MADE[place] = function(*arguments, **named)
        return _MADE[place]

    return made

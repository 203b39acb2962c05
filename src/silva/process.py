"""What a command does to its process: the allocator, for good, and garbage collection while it runs."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

PARENT = "SILVA_PARENT"
"""Environment variable: the process with which this one ends."""
LOOK_AGAIN = 600.0
SELDOM = 1
"""Collections of the middle generation after which all young objects are looked through, of Python's 10."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def loaded() -> Iterator[None]:
    """While it lasts, what is loaded now stays, and so does what a full collection has found in use.

    Python would look through all of it again and again while episodes are played, and the event loop would
    stand still for a tenth of a second each time, or for seconds if 100,000 of them are live. Full
    collections come often, so that each finds little that is new. What is not referred to any more is freed
    at once all the same; rings of such objects are after `LOOK_AGAIN` seconds.
    """
    first, middle, last = gc.get_threshold()
    gc.set_threshold(first, middle, min(last, SELDOM))
    gc.collect()
    gc.freeze()
    looked = time.monotonic()

    def keep(phase: str, info: Mapping[str, int]) -> None:
        nonlocal looked
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
        elif phase == "start" and info["generation"] == 2 and time.monotonic() - looked > LOOK_AGAIN:
            looked = time.monotonic()
            gc.unfreeze()

    gc.callbacks.append(keep)
    try:
        yield
    finally:
        gc.callbacks.remove(keep)
        gc.set_threshold(first, middle, last)
        gc.unfreeze()


def prepare() -> None:
    """Before anything is loaded: let this process open as many files as the system allows (one a request)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    from silva.models.memory import keep_freed_memory  # imports torch

    keep_freed_memory()


def report_exit() -> None:
    """From here on `os._exit` in code that is not Silva's says where, and the status is not 0."""
    process, leave = os.getpid(), os._exit

    def told(status: int) -> NoReturn:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        if os.getpid() == process and not file.startswith(os.path.dirname(__file__)):  # not in a fork
            words = f"silva: ended by os._exit({status}) ({file}:{caller.f_lineno})\n"
            os.write(2, words.encode("utf-8", "replace"))
            status = status or 1
        leave(status)

    os._exit = told


def tie_to_parent() -> bool:
    """Die with the process that began this one and said so (SILVA_PARENT), whatever ends it.

    Linux kills this process then, even if it is stopped; elsewhere it looks every second.

    Returns:
        Whether a process said so.
    """
    parent = os.environ.pop(PARENT, "")  # not for the children of this process
    if not parent:
        return False
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before that
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()
    return True


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def forget() -> None:
    """A model refers to itself: without this the next one of the process stands beside it."""
    gc.collect()

"""What a command does to its process: the allocator, for good, and garbage collection while it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from silva.models.memory import keep_freed_memory


@contextmanager
def loaded() -> Iterator[None]:
    """While it lasts, what is loaded now stays.

    Python would look through it again and again while episodes are played, and the event loop would stand
    still for a tenth of a second each time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def prepare() -> None:
    """Before anything is loaded."""
    keep_freed_memory()


def forget() -> None:
    """A model refers to itself: without this the next one of the process stands beside it."""
    gc.collect()

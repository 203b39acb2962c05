"""A folder for the supervisor's processes, and the handlers of signals as they were."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.placement.processes import Park, left


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets; what is left of the processes is killed."""
    with tempfile.TemporaryDirectory(prefix="silva-") as name:
        yield Path(name)
        for pid in left(Park(Path(name), "trainer", "inference")):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def handlers() -> Iterator[None]:
    """A loop that closes resets the handlers of signals."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)

"""A folder for the supervisor's processes, and the handlers of signals as they were."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.coroutines import in_loop
from tests.placement.processes import SOON, Park, left


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * SOON))


pytest_pyfunc_call = in_loop(run)


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

"""Sandboxes to call, and the processes that they leave."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from silva.sandbox import starting
from silva.sandbox.process import Result, Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, _chosen

Story = Callable[[Sandbox], Coroutine[Any, Any, Any]]
AUTO = _chosen("auto")
NEEDS_WALLS = pytest.mark.skipif(isinstance(AUTO, str), reason=str(AUTO))


def play(story: Story, walls: Walls | None = None, seed: int = 0, **limits: Any) -> Any:
    async def go() -> Any:
        sandbox = Sandbox(SandboxSettings(**({"seconds": 5.0} | limits)), walls, seed)
        try:
            return await story(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(go())


def runs(*codes: str, walls: Walls | None = None, seed: int = 0, **limits: Any) -> list[Result]:
    async def story(sandbox: Sandbox) -> list[Result]:
        return [await sandbox.run(code) for code in codes]

    return play(story, walls, seed, **limits)


def end_of_those_in_advance() -> None:
    """End the sandboxes that have been started in advance, also the one that is being started."""
    starting._asked.join()
    while starting._next:
        starting._next.popitem()[1].end()


def children(process: int = os.getpid()) -> set[str]:
    """Processes whose parent is this one, or another."""
    own, found = f"PPid:\t{process}\n", set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found |= {entry.name} if own in (entry / "status").read_text() else set()
    return found


def comes_true(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Whether it does, in a time that is long also for a busy machine."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def states(process: int) -> list[str]:
    """Of a process and of all that descend from it: S sleeps, R runs, T is stopped."""
    found = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [found, *(state for child in below for state in states(int(child)))]

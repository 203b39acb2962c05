"""Engines whose every step the test sees."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings as Settings
from silva.models.loading import LoadedModel


class Stepper(Executor):
    """In place of the compute thread: runs one job each time `tick` is called, in the test's own thread."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future, Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        self.jobs.append((future, partial(work, *args, **kwargs)))
        return future

    async def tick(self, times: int = 1) -> None:
        """Run this many jobs, and let everybody who waited for them go on."""
        for _ in range(times):
            await self.settle()
            future, job = self.jobs.popleft()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def stepped() -> Callable[..., tuple[LocalEngine, Stepper]]:
    """`stepped(loaded, max_concurrent=2)`: an engine without drafts, and what makes it step."""

    def make(loaded: LoadedModel, **settings: Any) -> tuple[LocalEngine, Stepper]:
        stepper, routes = Stepper(), settings.pop("routes", False)
        chosen = Settings(**{"drafts": "off"} | settings)
        return LocalEngine(loaded, chosen, stepper, routes=routes), stepper

    return make


@pytest.fixture
def make_engine() -> Iterator[Callable[..., LocalEngine]]:
    """`make_engine(loaded, max_concurrent=2)`: an engine on a compute thread."""
    with ThreadPoolExecutor(1) as compute:
        yield lambda loaded, **settings: LocalEngine(loaded, Settings(**settings), compute)

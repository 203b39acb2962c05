"""One Tinker service: its parts over one folder, and what it does beside answering.

    DIR/tinker.sqlite    what is known (tables.py), or PostgreSQL
    DIR/weights/         folders of weights, named by chance

A second server over the same folder is refused. Not here: the base model and its engine, which are given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from pathlib import Path

from silva.aio import cancelled
from silva.ports import CLOCK
from silva.server.tinker import checkpoints
from silva.server.tinker.downloads import TinkerDownloads
from silva.server.tinker.futures import Futures
from silva.server.tinker.listings import TinkerListings
from silva.server.tinker.live_models import Runs
from silva.server.tinker.quotas import Quotas
from silva.server.tinker.routes import ServedModel, TinkerRoutes, routed
from silva.server.tinker.sampling import SampleQueue, Sampler
from silva.server.tinker.tables import Tables
from silva.server.tinker.training import TrainQueue
from silva.wire.guard import Application

TIDY = 60.0  # seconds


class TinkerServer:
    """The routes and the work behind them.

    Args:
        state: folder of the service.
        compute: where `runs` are called.
        places: samples that the engine works on at once.
        full: runs of all weights in memory.
        log: gets a line for each fault that is not a client's.
        quotas: of each API key.
        database: the address of one in PostgreSQL; "" for a file in `state`.

    Attributes:
        admitting: makes a check for the guard of one of keys.

    Raises:
        ConfigError: another server uses the folder.
    """

    def __init__(
        self,
        state: Path,
        model: ServedModel,
        runs: Runs,
        compute: Executor,
        sampler: Sampler,
        places: int,
        full: int,
        log: Callable[[str], None],
        quotas: Quotas = Quotas(),
        database: str = "",
    ) -> None:
        self._weights = state / "weights"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._tables = Tables(database or state / "tinker.sqlite")
        self._futures, self._log = Futures(self._tables, quotas), log
        self._training = TrainQueue(
            self._tables, self._futures, runs, compute, self._weights, full, log, quotas
        )
        self._sampling = SampleQueue(self._tables, self._futures, sampler, places, self._weights, log)
        requests = TinkerRoutes(self._tables, self._futures, self._training, self._sampling, model, quotas)
        listings = TinkerListings(self._tables, model)
        downloads = TinkerDownloads(self._tables, self._weights)
        self.app = Application(routed({**requests.routes(), **downloads.routes(), **listings.routes()}))
        self.admitting = downloads.admitting

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Requests are done while it lasts, also those that a server before this one accepted."""
        await self._sampling.resume()
        tasks = [asyncio.ensure_future(each) for each in (self._training.work(), self._tidied())]
        try:
            yield
        finally:
            await cancelled(tasks)
            await self._sampling.close()
            await self._tables.close()

    async def _tidied(self) -> None:
        while True:
            try:
                await self._futures.tidy()
                await checkpoints.tidy(self._tables, self._weights)
            except Exception as error:
                self._log(f"tinker: tidying: {type(error).__name__}: {error}")
            await CLOCK.sleep(TIDY)

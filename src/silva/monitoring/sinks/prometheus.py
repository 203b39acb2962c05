"""The newest numbers of a run behind one address that Prometheus reads: GET /metrics, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from silva.monitoring.exposition import CONTENT_TYPE, sample
from silva.monitoring.sinks.outlet import Tracked
from silva.storage.rollouts import RolloutRow
from silva.wire.guard import Application, Guard
from silva.wire.listening import Bind, check_bind, serve


class Prometheus:
    """A `Sink`. Each number is a series of the gauge silva_metric, with the labels run and metric."""

    def __init__(self, bind: Bind, key: str, run: Tracked) -> None:
        """
        Args:
            key: readers must bring it; "" for none.

        Raises:
            ConfigError: the address is taken, or others could reach it without a key.
        """
        check_bind(bind, key)
        self._run, self._numbers, self._step, self._warnings = run, dict[str, float](), 0, 0
        self._lock = threading.Lock()
        self._app = Guard(
            Application([Route("/metrics", self._answer, methods=["GET"])]), bind, key=key, log=run.say
        )
        self._end: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        address = Future[str]()
        self._thread = threading.Thread(
            target=self._serve, args=(bind, address), name="silva-prometheus", daemon=True
        )
        self._thread.start()
        run.say(f"Prometheus reads the numbers of this run at {address.result()}/metrics")

    def _serve(self, bind: Bind, address: Future[str]) -> None:
        async def serving() -> None:
            task = asyncio.ensure_future(serve(self._app, bind, ready=address.set_result))
            self._end = asyncio.get_running_loop(), task
            await asyncio.wait((task,))
            error = None if task.cancelled() else task.exception()
            if not address.done():
                address.set_exception(error or RuntimeError("the server ended before it listened"))

        asyncio.run(serving())

    async def _answer(self, request: Request) -> Response:
        return Response(self.text(), headers={"content-type": CONTENT_TYPE})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step = step
            self._numbers |= metrics

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """It shows numbers only."""

    def message(self, level: str, text: str) -> None:
        with self._lock:
            self._warnings += level in ("warning", "error")

    def text(self) -> str:
        """What a reader gets now."""
        run = ("run", self._run.name)
        with self._lock:
            lines = [
                "# TYPE silva_step gauge", sample("silva_step", self._step, [run]),
                "# TYPE silva_warnings_total counter", sample("silva_warnings_total", self._warnings, [run]),
                "# TYPE silva_metric gauge",
            ]  # fmt: skip
            lines += [
                sample("silva_metric", value, [run, ("metric", key)])
                for key, value in sorted(self._numbers.items())
            ]
        return "\n".join(lines) + "\n"

    def close(self, finished: bool) -> None:
        if self._end is not None:
            loop, task = self._end
            loop.call_soon_threadsafe(task.cancel)
        self._thread.join()

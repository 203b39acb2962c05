"""All sinks of one run: TensorBoard and those of `[[monitoring.sinks]]`."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from silva.errors import RecordError
from silva.monitoring.report_rollouts import spread
from silva.monitoring.settings import Monitoring
from silva.monitoring.sinks.outlet import Outlet, Tracked
from silva.monitoring.sinks.settings import SinkSettings
from silva.monitoring.sinks.tensorboard import TensorBoard
from silva.storage.layout import Layout
from silva.storage.plain import read_plain, write_plain
from silva.storage.rollouts import RolloutRow

BOARD_PATIENCE = 120.0  # seconds; its files are local, and to import it may take a while


class Outlets:
    """Nothing that happens here raises, or keeps its caller waiting except in `close`."""

    def __init__(self, settings: Monitoring) -> None:
        self._settings = settings
        self._sinks: list[tuple[SinkSettings, Outlet]] = []
        self._board: Outlet | None = None

    def open(
        self,
        folder: Layout,
        name: str,
        config: Mapping[str, Any],
        after: int | None,
        say: Callable[..., None],
    ) -> None:
        """Start them; `say(text, level)` tells people what they have to say. The rest as of `Tracked`."""
        complain = partial(say, level="warning")
        if self._settings.tensorboard:
            build = partial(TensorBoard, folder.tensorboard, None if after is None else after + 1)
            self._board = Outlet("TensorBoard", build, complain, "tensorboard")
        if self._settings.sinks:
            run = Tracked(folder, name, _id(folder, complain), config, after, say)
            self._sinks = [
                (each, Outlet(each.title, partial(each.build, run), complain, each.extra))
                for each in self._settings.sinks
            ]

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {key: value for key, value in sorted(metrics.items()) if math.isfinite(value)}
        for outlet in self._all():
            outlet.put(lambda sink: sink.step(step, finite))

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        for settings, outlet in self._sinks:
            chosen = spread(rows, settings.samples) if settings.samples else []
            if chosen and (step <= 1 or step % settings.samples_every == 0):
                outlet.put(lambda sink, chosen=chosen: sink.samples(step, chosen))  # type: ignore[misc]

    def message(self, level: str, text: str) -> None:
        for _, outlet in self._sinks:
            outlet.put(lambda sink: sink.message(level, text))

    def close(self, finished: bool) -> None:
        """Wait for all of them at once, for each no longer than its patience."""
        began = time.monotonic()
        for outlet in self._all():
            outlet.end(finished)
        if self._board is not None:
            self._board.join(began + BOARD_PATIENCE - time.monotonic())
        for settings, outlet in self._sinks:
            outlet.join(began + settings.patience - time.monotonic())

    def _all(self) -> list[Outlet]:
        return [*([self._board] if self._board else []), *(outlet for _, outlet in self._sinks)]


def _id(folder: Layout, complain: Callable[[str], None]) -> str:
    """The run's name for trackers: drawn once, and kept in its folder."""
    try:
        found = read_plain(folder.tracking).get("id")
        if isinstance(found, str) and found.isalnum():
            return found
    except FileNotFoundError:
        pass
    except RecordError as error:
        complain(f"trackers get a new run: {error}")
    new = uuid.uuid4().hex[:8]
    try:
        write_plain(folder.tracking, {"id": new})
    except OSError as error:
        complain(f"a resumed run will be new for trackers: {folder.tracking} cannot be written: {error}")
    return new

"""`now.json`: what a run does and for whom it waits, for those who look at its folder from outside.

Written at most once a second, by a thread of its own: a disk that hangs stops neither the run nor the
watchdog. Not here: what the run does (terminal.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from silva.monitoring.terminal import duration
from silva.ports import CLOCK

EVERY = 1.0  # seconds


class Heartbeat:
    """Tells `doing()`, words and since when by the clock of the wall, in `path` until it is stopped."""

    def __init__(self, path: Path, doing: Callable[[], tuple[str, float]]) -> None:
        self._path, self._doing, self._told = path, doing, ("", 0.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silva-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        with suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            if (now := self._doing()) != self._told:
                self._told = now
                told = json.dumps({"doing": now[0], "since": now[1]})
                with suppress(OSError):  # it only shows, and is no write of those that tests count
                    self._path.write_text(told)


def read_heartbeat(path: Path) -> str:
    """Such as "rollout 12/64, waiting for frozen_lake, 35s"; "" if nothing is told there."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_bytes())
        return f"{told['doing']}, {duration(CLOCK.time() - told['since'])}"
    return ""

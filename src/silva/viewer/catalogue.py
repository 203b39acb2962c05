"""Which runs there are under the folders that the viewer was given, and how each stands, from its files
alone.

A run is known by a name made of the path from its folder. A name that was not found under a given folder
names nothing, so no request reaches another file. Not here: what is in the runs (pages.py, query.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silva.errors import ConfigError, RecordError
from silva.monitoring.heartbeat import read_heartbeat
from silva.monitoring.run_log import read_log
from silva.storage.layout import Layout, steps_in
from silva.storage.metrics import last_step
from silva.storage.plain import read_plain
from silva.storage.rollouts import rollouts_in
from silva.storage.run_folder import LOCK, Standing, standing

DEPTH = 4  # folders in one another that are looked through
FRESH = 2.0  # seconds that a list of runs is used again
STALLED = "nothing has moved"  # how the watchdog begins


@dataclass(frozen=True)
class FoundRun:
    """`name`: for people and in addresses. An evaluation has its episodes in one file."""

    name: str
    layout: Layout

    @property
    def evaluation(self) -> bool:
        return self.layout.episodes.is_file()

    def rollouts(self) -> dict[int, Path]:
        """Files of rollouts by step, the first step first. Those of an evaluation are one file, under 0."""
        if self.evaluation:
            return {0: self.layout.episodes}
        return rollouts_in(self.layout.rollouts)

    def stamp(self) -> str:
        """Changes if a file does that a page shows."""
        run = self.layout
        paths = [run.metrics, run.summary, run.log, run.ledger, run.rollouts, run.episodes, run.checkpoints]
        times = []
        for path in paths:
            with suppress(OSError):
                found = path.stat()
                times.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
        return "-".join(times)


class Catalogue:
    """The runs under some folders, found again every few seconds.

    Raises:
        ConfigError: a folder is missing.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"{root}: no such folder; expected a run's folder, or one with runs")
        self._roots = [root.resolve() for root in roots]
        self._found: dict[str, FoundRun] = {}
        self._stood: dict[str, tuple[tuple[str, Standing], dict[str, Any]]] = {}
        self._at = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> dict[str, FoundRun]:
        """By name."""
        with self._lock:
            if time.monotonic() - self._at > FRESH:
                self._found = _named([folder for root in self._roots for folder in _under(root)])
                self._at = time.monotonic()
            return self._found

    def run(self, name: str) -> FoundRun:
        """Raises ConfigError if there is none of that name."""
        if (found := self.runs().get(name)) is None:
            raise ConfigError(f"no run {name!r} in the folders that are shown")
        return found

    def status(self, run: FoundRun) -> dict[str, Any]:
        """How it stands; its files are read again if one of them has changed."""
        now = run.stamp(), standing(run.layout.path)
        then, found = self._stood.get(run.name, (None, {}))
        if then != now:
            found = _status(run, now[1])
            self._stood[run.name] = now, found
        return found | {"waiting": _waiting(run.layout)} if now[1] == "running" else found


def _named(found: Sequence[tuple[Path, str]]) -> dict[str, FoundRun]:
    """Each folder once. One whose name another has has its path for a name."""
    names: dict[str, Path] = {}
    for folder, name in dict(found).items():
        name = _readable(name)
        names[name if name not in names else _readable(folder.as_posix())] = folder
    return {name: FoundRun(name, Layout(folder)) for name, folder in names.items()}


def _readable(name: str) -> str:
    """Bytes of a folder's name that are no UTF-8 as \\xff: addresses and JSON hold text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _under(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders of runs, with the path that begins with the root's name."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        if is_run(folder):
            yield folder, folder.relative_to(root.parent).as_posix()
        elif len(folder.relative_to(root).parts) < DEPTH:
            with suppress(OSError):
                waiting += [each for each in folder.iterdir() if _inside(each)]


def _inside(folder: Path) -> bool:
    """No link leads out of the folders that are shown."""
    return folder.is_dir() and not folder.is_symlink() and not folder.name.startswith(".")


def is_run(folder: Path) -> bool:
    """The folder of several seeds is none: it holds runs."""
    run = Layout(folder)
    return any(path.is_file() for path in (folder / LOCK, run.ledger, run.metrics, run.episodes))


def _status(run: FoundRun, state: Standing) -> dict[str, Any]:
    """`waiting`: what it does and for whom it waits, in words."""
    layout = run.layout
    found: dict[str, Any] = {
        "run": run.name,
        "kind": "evaluation" if run.evaluation else "run",
        "state": state,
        "step": last_step(layout.metrics),
        "steps": _steps(layout),
        "rollouts": len(run.rollouts()),
        "checkpoints": len(steps_in(layout.checkpoints)),
        "stamp": run.stamp(),
        "changed": _changed(layout),
        "waiting": "",
    }
    with suppress(OSError):
        if (log := read_log(layout.log)) is not None:
            found |= {"began": log.began, "said": log.ended, "warnings": len(log.warnings)}
    return found


def _steps(layout: Layout) -> int | None:
    """That the run shall have."""
    with suppress(OSError, RecordError):
        steps = read_plain(layout.config_json).get("steps")
        return steps if isinstance(steps, int) else None
    return None


def _changed(layout: Layout) -> float | None:
    """When something was written last, in seconds since 1970."""
    times = []
    for path in (layout.metrics, layout.log, layout.rollouts, layout.summary, layout.episodes):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _waiting(layout: Layout) -> str:
    """The last stall that the watchdog reported, if nothing was written since; otherwise the heartbeat."""
    with suppress(OSError):
        lines = [line for line in _tail(layout.log).splitlines() if line[:4].isdigit()]
        if lines and STALLED in lines[-1]:
            return STALLED + lines[-1].partition(STALLED)[2]
    return read_heartbeat(layout.now)


def _tail(path: Path, size: int = 1 << 16) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", "replace")

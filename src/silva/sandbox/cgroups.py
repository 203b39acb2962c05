"""Control groups: limits that a whole sandbox shares. Version 1 as root, version 2 where it is delegated."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_left: set[Path] = set()  # groups that could not be removed yet: their last processes were still going


@cache
def parents() -> tuple[Path, ...]:
    """Where groups for sandboxes can be made; empty: nowhere."""
    v2 = (ROOT / "cgroup.controllers").is_file()
    found = [_own_v2()] if v2 else [ROOT / name / "silva" for name in ("memory", "pids")]
    usable = [path for path in found if path is not None and _usable(path)]
    for group in (group for parent in usable for group in parent.glob("sandbox-*-*-*")):
        _, process, started, _ = group.name.split("-")
        if _started(process) != started:  # left by a run that was killed
            _removed(group)
    return tuple(usable) if len(usable) == len(found) else ()


class ControlGroup:
    """The groups of one sandbox."""

    def __init__(self, memory: int, processes: int) -> None:
        for path in list(_left):
            _removed(path)
        name = _name()
        self.paths = [parent / name for parent in parents()]
        limits: Mapping[str, int] = {
            "memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory,
            "pids.max": processes,
        }  # fmt: skip
        try:
            for path in self.paths:
                path.mkdir()
                for key, value in limits.items():
                    if (path / key).exists():
                        (path / key).write_text(str(value))
        except OSError:
            self.remove()
            raise

    def add(self, process: int) -> None:
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(process))

    def remove(self) -> None:
        """Its processes have been killed; they may need a moment to go, and more with a full /tmp. What is
        not gone by then is removed with a later group, or when this process ends."""
        _wait_for(self.paths, 0.1)


def _wait_for(paths: Iterable[Path], seconds: float) -> None:
    ends = time.monotonic() + seconds
    for path in list(paths):
        while not _removed(path) and time.monotonic() < ends:
            time.sleep(0.002)


@atexit.register
def _at_the_end() -> None:
    _wait_for(_left, 5.0)


def _removed(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            path.rmdir()
        except OSError:
            _left.add(path)
            return False
    _left.discard(path)
    return True


def _name() -> str:
    """Of a new group: whose it is can be read from it, and nobody has it."""
    return f"sandbox-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(8)}"


def _started(process: int | str) -> str:
    """When a process began, in ticks since the start of the machine; empty: there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _own_v2() -> Path | None:
    """The group of this process, if children of it get both controllers."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((ROOT / line[4:] for line in lines if line.startswith("0::/")), None)
    if own is None:
        return None
    with contextlib.suppress(OSError):
        if {"memory", "pids"} <= set((own / "cgroup.subtree_control").read_text().split()):
            return own
    return None


def _usable(path: Path) -> bool:
    try:
        path.mkdir(exist_ok=True)
        probe = path / _name()
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True

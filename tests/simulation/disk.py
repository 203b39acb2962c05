"""A disk with faults: writes that fail, a process that dies in the middle of one, a power cut.

Files are real ones, in a folder of memory, since Silva reads with plain `Path`. What has not been synced is
known beside them, and a power cut undoes some of it, as POSIX allows and journals do it:

    content     written since the file's last fsync: any beginning of it may be there
    names       made, renamed or removed since the folder's last fsync_dir: the newest may be undone
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from silva.ports import Files

Step = Callable[[str, Path], None]
"""Told before each operation; it may raise."""


@dataclass(frozen=True)
class _Named:
    """A change of names that the folders do not durably have yet."""

    folders: tuple[Path, ...]
    undo: Callable[[], None]


class SimulatedDisk(Files):
    """Attributes:
    before: called before each operation with its name and path.
    tears: the next write is half done when `before` is told so ("torn").
    unsynced: content at the last sync, of files that have changed since; None: there was no file.
    """

    def __init__(self, root: Path, before: Step) -> None:
        self.root, self.before = root, before
        self.graves = root / ".graves"
        self.graves.mkdir(parents=True)
        self.unsynced: dict[Path, bytes | None] = {}
        self._names: list[_Named] = []
        self._count, self.tears = 0, False

    # --- what Silva calls

    def append(self, path: Path, data: bytes, sync: bool = True) -> None:
        self.before("open", path)
        self._touched(path)
        super().append(path, data, sync)

    def write(self, path: Path, data: bytes, mode: str = "wb") -> None:
        try:
            self.before("write", path)
        except OSError:
            self._touched(path)
            super().write(path, data[: len(data) // 2], mode)
            raise
        self._touched(path)
        if self.tears:
            self.tears = False
            super().write(path, data[: len(data) // 2], mode)
            self.before("torn", path)
        super().write(path, data, mode)

    def truncate(self, path: Path, size: int) -> None:
        self.before("truncate", path)
        self._touched(path)
        super().truncate(path, size)

    def fsync(self, path: Path) -> None:
        self.before("fsync", path)
        os.stat(path)
        self.unsynced.pop(path, None)

    def fsync_dir(self, path: Path) -> None:
        self.before("fsync_dir", path)
        os.stat(path)
        newest = max((i for i, each in enumerate(self._names) if path in each.folders), default=-1)
        del self._names[: newest + 1]  # a journal keeps its order: what came before is durable too

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", target)
        aside = self._grave(target) if target.is_file() else None
        if aside is not None:
            os.replace(target, aside)
        os.replace(source, target)

        def undo() -> None:
            os.replace(target, source)
            if aside is not None:
                os.replace(aside, target)

        self._moved(source, target)
        self._names.append(_Named((source.parent, target.parent), undo))

    def remove_tree(self, path: Path) -> None:
        self.before("remove", path)
        if not path.exists():
            return
        aside = self._grave(path)
        os.replace(path, aside)
        self._forget(path)
        self._names.append(_Named((path.parent,), lambda: os.replace(aside, path)))

    # --- what befalls it

    def power_cut(self, rng: Random) -> None:
        """Undo the newest names, then cut contents, as far as `rng` says."""
        if rng.random() < 0.75:  # otherwise all had reached the disk
            for named in reversed(self._names[rng.randint(0, len(self._names)) :]):
                try:
                    named.undo()
                except OSError:  # what it was in is gone by itself
                    continue
            for path, before in self.unsynced.items():
                if path.is_file():
                    path.write_bytes(_torn(before, path.read_bytes(), rng))
        self.settle()

    def settle(self) -> None:
        """All that is there is durable."""
        self.unsynced.clear()
        self._names.clear()

    def is_durable(self, path: Path) -> bool:
        return path not in self.unsynced

    def _touched(self, path: Path) -> None:
        if path in self.unsynced:
            return
        there = path.exists()
        self.unsynced[path] = path.read_bytes() if there else None
        if not there:
            self._names.append(_Named((path.parent,), lambda: path.unlink(missing_ok=True)))

    def _moved(self, source: Path, target: Path) -> None:
        self._forget(target)
        for path in [path for path in self.unsynced if path == source or source in path.parents]:
            self.unsynced[target / path.relative_to(source)] = self.unsynced.pop(path)

    def _forget(self, gone: Path) -> None:
        for path in [path for path in self.unsynced if path == gone or gone in path.parents]:
            del self.unsynced[path]

    def _grave(self, path: Path) -> Path:
        self._count += 1
        return self.graves / f"{self._count}-{path.name}"


def _torn(before: bytes | None, now: bytes, rng: Random) -> bytes:
    """What a file may hold that was not synced."""
    old = before or b""
    if now.startswith(old):
        return now[: rng.randint(len(old), len(now))]
    return now[: rng.randint(0, len(now))]


FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


def fault(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


def emptied(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)

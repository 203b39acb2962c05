"""The small doors to the outside: files, clock, randomness, crash points.

Everything that must survive a crash is written through `FILES`, every time is read from `CLOCK`, so
that a test or a simulation can put another implementation behind them (`use_files`, `use_clock`).
Random numbers are counter-based: a function of (seed, position), never of the order of calls.

    FILES.write_atomic(path, data)      old content or new content, never half of either
    FILES.append(path, data)            one write, durable on return, undone when it fails
    CLOCK.monotonic()                   seconds
    uniform(derive(seed, task.id, sample), positions)      float64 in [0, 1)
    crash_point("rename")               nothing, unless SILVA_CRASH names it

Not here: reading files (plain `Path` does), and random numbers inside torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from silva.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


class Files:
    """The real file system. `write_atomic` and `append` are made of the primitives below them.

    Every method raises OSError as the operating system does.
    """

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Replace `path` by `data` durably; a crash at any point leaves the old or the new content."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            self.write(temporary, data)
            self.fsync(temporary)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self.fsync_dir(path.parent)

    def append(self, path: Path, data: bytes, sync: bool = True) -> None:
        """Add `data` at the end of `path` (made if missing). A failed append is cut off again."""
        path = Path(path)
        with open(path, "ab") as file:
            before = os.fstat(file.fileno()).st_size
        try:
            self.write(path, data, "ab")
            if sync:
                self.fsync(path)
        except OSError:
            with contextlib.suppress(OSError):  # what cannot be cut off here is cut off at the next open
                os.truncate(path, before)
            raise

    def write(self, path: Path, data: bytes, mode: str = "wb") -> None:
        with open(path, mode) as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def fsync(self, path: Path) -> None:
        """Make the content of one file durable."""
        _fsync(path, os.O_RDWR)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a folder durable (a rename is not, before this)."""
        _fsync(path, os.O_RDONLY)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it, or one file; nothing there is no error, nor is what another process
        removes at the same time."""
        path = Path(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_unless_gone)
        else:
            path.unlink(missing_ok=True)


def _unless_gone(_function: Any, _path: str, raised: tuple[Any, Any, Any]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FaultyFiles(Files):
    """A disk on which every `every_k`-th write, fsync or rename fails with `error`.

    A failing write leaves the first half of its data behind, as a full disk does. `operations` counts
    what was tried and `fired` what failed: a test in which `fired` stayed 0 has tested nothing.
    """

    def __init__(self, every_k: int, error: int = errno.ENOSPC) -> None:
        if every_k < 1:
            raise ValueError(f"every_k: got {every_k}, expected 1 or more")
        self.every_k, self.error = every_k, error
        self.operations = self.fired = 0

    def write(self, path: Path, data: bytes, mode: str = "wb") -> None:
        try:
            self._next(path)
        except OSError:
            super().write(path, data[: len(data) // 2], mode)
            raise
        super().write(path, data, mode)

    def fsync(self, path: Path) -> None:
        self._next(path)
        super().fsync(path)

    def fsync_dir(self, path: Path) -> None:
        self._next(path)
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._next(target)
        super().rename(source, target)

    def _next(self, path: Path) -> None:
        self.operations += 1
        if self.operations % self.every_k == 0:
            self.fired += 1
            raise OSError(self.error, os.strerror(self.error), str(path))


class Clock:
    """Seconds: `monotonic` for durations, `time` (since 1970, UTC) for people; `sleep` waits."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Current:
    """Stands for the port in use, so that `from silva.ports import FILES` sees a replacement too."""

    def __init__(self, port: Any) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


_files, _clock = _Current(Files()), _Current(Clock())
FILES: Files = cast(Files, _files)
CLOCK: Clock = cast(Clock, _clock)


@contextlib.contextmanager
def _use(current: _Current, port: Any) -> Iterator[Any]:
    before, current.port = current.port, port
    try:
        yield port
    finally:
        current.port = before


use_files = functools.partial(_use, _files)
"""`with use_files(FaultyFiles(every_k=3)) as disk:` for the whole process, all threads."""
use_clock = functools.partial(_use, _clock)
"""`with use_clock(my_clock):` for the whole process, all threads."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64's output function, on uint64 arrays (Steele, Lea, Flood 2014; constants of Vigna)."""
    import numpy as np

    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int | Sequence[int], positions: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1), float64, of the shape of `positions`: a function of (seed, position).

    The value at position p is output p of splitmix64 started at state mix(seed), its top 53 bits as a
    fraction; so it depends neither on the other positions nor on the order of calls. One seed for all
    positions, or one for each.
    """
    import numpy as np  # here, because light commands read settings that lead to this module

    seeds = [seed] if isinstance(seed, int) else seed
    counter = np.atleast_1d(np.asarray(positions)).astype(np.int64).astype(np.uint64)
    state = _mix(np.array([(s + _GOLDEN) & _MASK for s in seeds], dtype=np.uint64))
    bits = _mix(state + (counter + np.uint64(1)) * np.uint64(_GOLDEN))
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(np.shape(positions))


def derive(seed: int, *parts: str | int) -> int:
    """A child seed in [0, 2**63) from a seed and names; the same in every process and on every platform.

    blake2b over the parts, each with its type and length, so that ("ab", "c"), ("a", "bc") and 1, "1"
    all differ. TypeError for parts that are neither str nor int.
    """
    written = list[bytes]()
    for part in (seed, *parts):
        if not isinstance(part, (str, int)):
            raise TypeError(f"derive: got a part of type {type(part).__name__}, expected str or int")
        text = str(int(part)) if isinstance(part, int) else part
        data = text.encode()
        written += f"{'i' if isinstance(part, int) else 's'}{len(data)}:".encode(), data
    digest = hashlib.blake2b(b"".join(written), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


CRASH_POINTS = (
    "issue",  # groups are recorded as issued, nothing sampled yet
    "seal",
    "backward",
    "optim",
    "publish",
    "checkpoint_file",  # after each file of a checkpoint
    "rename",  # the checkpoint is complete under its temporary name
    "latest",  # the checkpoint is durable, the hint still names the one before
    "prune",  # before old checkpoints go
    "ledger",  # a batch of events is durable, nothing that depends on it has happened
)

_crash = os.environ.get("SILVA_CRASH", "")  # read once: a crash point costs one check of a string when off
_reached = 0


def crash_point(name: str) -> None:
    """Kill this process (SIGKILL) if SILVA_CRASH says so: "backward:3" is the third time it gets there.

    Proof that it fired there, and nowhere else: where SILVA_CRASH_PROOF names a file, the point's name
    is written to it, durably, before the kill. ConfigError for a name that is not in `CRASH_POINTS`.
    """
    if _crash:
        _reach(name)


def crash_setting() -> tuple[str, int] | None:
    """What SILVA_CRASH asks for, as (name, count), or None; ConfigError where it makes no sense."""
    if not _crash:
        return None
    name, _, count = _crash.partition(":")
    _known(name, "SILVA_CRASH")
    if not (count or "1").isdecimal() or int(count or "1") < 1:
        raise ConfigError(f"SILVA_CRASH={_crash}: got count {count!r}, expected a number from 1")
    return name, int(count or "1")


def _known(name: str, where: str) -> None:
    if name not in CRASH_POINTS:
        raise ConfigError(f"{where}: got the crash point {name!r}, expected one of {', '.join(CRASH_POINTS)}")


def _reach(name: str) -> None:
    global _reached
    _known(name, "crash_point")
    setting = crash_setting()
    if setting is None or setting[0] != name:
        return
    _reached += 1
    if _reached != setting[1]:
        return
    if proof := os.environ.get("SILVA_CRASH_PROOF"):
        disk = Files()  # not the replaceable port: an injected fault must not eat the proof
        disk.write(Path(proof), name.encode())
        disk.fsync(Path(proof))
    os.kill(os.getpid(), signal.SIGKILL)

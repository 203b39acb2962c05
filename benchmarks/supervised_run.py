"""`silva rl` in processes of its own: what it writes, who is alive, and who of them has which role."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from silva.placement.carrier import part_of
from silva.placement.ray import PART

ROLES = ("inference", "trainer", "orchestrator")
RANK = "rank"  # the trainer's last one
WORKER = "worker"  # one of an environment's processes; on Ray its actor
SERVICES = ("--placement.type=services", "--placement.threads=1")
PLACED = {
    "services": SERVICES,
    "ray": (  # whose actors share the cores, however few there are
        "--placement.type=ray", "--placement.threads=1", "--placement.trainer_needs.CPU=0.1",
        "--placement.server_needs.CPU=0.1", "--placement.worker_needs.CPU=0.1",
    ),
}  # fmt: skip
SILVA = (sys.executable, "-m", "silva")
MARK = "SILVA_CHAOS_RUN"
"""Environment variable by which all processes of a run are known, whoever is their parent by now."""
SECONDS_LEFT = 10.0  # after which nothing of a run that has ended may be left
LIMIT = 600.0  # seconds for one run, many times what it needs


Found = TypeVar("Found")


class Supervised:
    """`silva rl` in processes of its own.

    Attributes:
        lines: what was written, each line with its time.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, by: Sequence[str] = SILVA
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [*by, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: self.mark},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append((time.time(), line.rstrip()))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def said(self, *words: str) -> float | None:
        """When the first line with these words was written; None if there is none."""
        return next((at for at, line in [*self.lines] if all(word in line for word in words)), None)

    def pid(self, role: str) -> int | None:
        """Of the process that has this role now: a child of ours, of one of these, or a Ray actor."""
        for pid in self.alive():
            argv = _read(f"/proc/{pid}/cmdline").split(b"\0")
            environ = dict(each.partition(b"=")[::2] for each in _read(f"/proc/{pid}/environ").split(b"\0"))
            part = environ.get(PART.encode(), b"").decode().partition("@")[0]
            rank = environ.get(b"RANK", b"0")
            if argv[1:4] == [b"-m", b"silva", role.encode()] and _parent(pid) == self.process.pid:
                return pid
            if part and role == (RANK if part.removeprefix("trainer").isdecimal() else part_of(part)):
                return pid
            if role == WORKER and argv[1:3] == [b"-m", b"silva.environments.process.worker"]:
                if _parent(pid) == self.pid("orchestrator"):  # else an actor has it
                    return pid
                continue
            if not part and role == RANK and rank != b"0":
                return pid
        return None

    def alive(self) -> list[int]:
        """All processes of this run, the supervisor included."""
        mark = f"{MARK}={self.mark}".encode()
        return [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdecimal()
            and mark in _read(path / "environ").split(b"\0")
            and state(int(path.name)) not in ("Z", "X", "")
        ]

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code; what was written has been read then.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        code = self.process.wait(limit)
        self._reader.join(SECONDS_LEFT)
        return code

    def left(self) -> list[str]:
        """The commands of what is still there SECONDS_LEFT after the end."""
        wait_for(lambda: not self.alive(), SECONDS_LEFT)
        return [_read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode() for pid in self.alive()]

    def kill(self) -> None:
        """Whatever there is of it."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def supervised(
    argv: Sequence[str], env: Mapping[str, str] | None = None, by: Sequence[str] = SILVA
) -> Iterator[Supervised]:
    """At the end of the block nothing is left of it. `by`: what runs the command."""
    run = Supervised(argv, env, by)
    try:
        yield run
    finally:
        run.kill()


def wait_for(condition: Callable[[], Found], seconds: float) -> Found:
    """What it gives as soon as that is true, or its last answer if it never is in that time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def state(pid: int) -> str:
    """One letter, as ps shows it; empty if it has ended."""
    return next(iter(_stat(pid)), "")


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended
        return b""


def _stat(pid: int) -> list[str]:
    """From the state on; empty if it has ended."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()


def _parent(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])

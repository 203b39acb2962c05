"""Small processes that compute nothing, the folder of their notes, and the supervisor of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from silva.errors import SilvaError
from silva.placement.supervisor import Part, Supervisor

SOON = 120.0  # seconds within which everything happens, or the test fails
SERVICE = """
import http.server, os, pathlib, signal, socketserver, subprocess, sys, time
from silva.process import tie_to_parent
from silva.signals import STOP_PART, end_as_a_part

tie_to_parent()
end_as_a_part()
signal.signal(STOP_PART, signal.SIG_DFL)
folder, name, path = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(folder / f"{name}.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
print(f"{name} begins {os.environ.get('GIVEN', '')}", flush=True)
if (folder / f"{name}.fails").exists():
    print("the last line", file=sys.stderr, flush=True)
    sys.exit(3)
child = subprocess.Popen(["sleep", "1000"], start_new_session=(folder / f"{name}.daemon").exists())
(folder / f"{name}.child").write_text(str(child.pid))
if (folder / f"{name}.long").exists():
    sys.stdout.write("x" * 1_000_000)
    sys.stdout.flush()
    print("\\nafter it", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        hung = "core" if self.path == "/core" else "hangs"
        while (folder / f"{name}.{hung}").exists():
            time.sleep(0.01)
        if (folder / f"{name}.key").exists() and self.headers.get("authorization") != "Bearer k":
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
        (folder / f"{name}.asked").touch()
    def address_string(self):
        return "unix"
    def log_message(self, *arguments):
        pass

pathlib.Path(path).unlink(missing_ok=True)
socketserver.ThreadingUnixStreamServer(path, Handler).serve_forever()
"""
ORCHESTRATOR = """
import os, pathlib, signal, sys, time
from silva.process import tie_to_parent
from silva.signals import STOP_PART, end_as_a_part

tie_to_parent()
folder = pathlib.Path(sys.argv[1])
os.kill(os.getpid(), signal.SIGTERM)  # it has not said yet which signals it listens to
end_as_a_part()

def note(number, frame):
    with open(folder / "signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if not (folder / "stubborn").exists():
        sys.exit(130)

signal.signal(STOP_PART, note)
with open(folder / "orchestrator.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
with open(folder / "arguments", "a") as file:
    file.write(" ".join(sys.argv[2:]) + f" {os.environ.get('ONCE', '-')}\\n")
if (folder / "dies").exists():
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "end").exists():
    time.sleep(0.01)
sys.exit(int((folder / "end").read_text()))
"""


class Park:
    """The folder in which the processes leave their notes, and the supervisor of them."""

    def __init__(self, folder: Path, *services: str) -> None:
        self.folder, self.services = folder, services or ("trainer",)
        self.said: list[tuple[float, str]] = []
        self.lines: list[str] = []

    def parts(self, **fields: Any) -> list[Part]:
        """`fields`: of the services."""
        python = sys.executable
        made = [
            Part(
                name,
                [python, "-c", SERVICE, str(self.folder), name, f"{self.folder}/{name}.sock"],
                address=f"unix:{self.folder}/{name}.sock",
                **fields,
            )
            for name in self.services
        ]
        line = [python, "-c", ORCHESTRATOR, str(self.folder)]
        return [*made, Part("orchestrator", [*line, "first"], lambda: [*line, "again"], once={"ONCE": "1"})]

    def pids(self, name: str) -> list[int]:
        """Of the process of that name and of those before it."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / f"{name}.pids").read_text().split()]
        return []

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self, code: int = 0) -> None:
        written = self.folder / ".end"
        written.write_text(str(code))
        written.rename(self.folder / "end")

    @property
    def up(self) -> bool:
        """All processes run, and the services have answered."""
        asked = all((self.folder / f"{name}.asked").exists() for name in self.services)
        return asked and bool(self.pids("orchestrator"))

    def everyone(self) -> list[int]:
        """All processes that were ever started."""
        children = [int(self.text(f"{name}.child") or 0) for name in self.services]
        return [pid for name in (*self.services, "orchestrator") for pid in self.pids(name)] + [
            *filter(None, children)
        ]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async with asyncio.timeout(SOON):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_said(self, *words: str) -> float:
        """The seconds from now until a line with these words is said."""
        began, count = time.monotonic(), len(self.said)
        await self.until(
            lambda: any(all(w in text for w in words) for _, text in self.said[count:]), f"said: {words}"
        )
        return next(at for at, text in self.said[count:] if all(w in text for w in words)) - began

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[asyncio.Task[int]]:
        """The supervisor; at the end of the block it is told to end if it has not."""
        parts = options.pop("parts", None) or self.parts()
        made = Supervisor(
            parts,
            log=self.lines.append,
            say=lambda text: self.said.append((time.monotonic(), text)),
            **options,
        )
        task = asyncio.create_task(made.run())
        try:
            yield task
        finally:
            if not task.done():
                self.end()
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), SOON)

    @contextlib.asynccontextmanager
    async def supervised(self, **options: Any) -> AsyncIterator[asyncio.Task[int]]:
        """The same; afterwards no process is left."""
        async with self.running(**options) as task:
            yield task
        assert self.everyone() and gone(self, 10)


def lives(pid: int) -> bool:
    """Also if it is stopped; not if it has ended and nobody has asked for its code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def left(park: Park) -> list[int]:
    return [pid for pid in park.everyone() if lives(pid)]


def gone(park: Park, seconds: float) -> bool:
    """Whether all processes end within so many seconds."""
    until = time.monotonic() + seconds
    while left(park) and time.monotonic() < until:
        time.sleep(0.01)
    return not left(park)


async def end_of(task: asyncio.Task[int]) -> int:
    """The exit code."""
    return await asyncio.wait_for(asyncio.shield(task), SOON)


async def failure(park: Park, **options: Any) -> str:
    """What the supervisor says when it gives up by itself."""
    async with park.supervised(**options) as task:
        with pytest.raises(SilvaError) as failed:
            await end_of(task)
    return str(failed.value)

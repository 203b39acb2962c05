"""A worker process on this machine, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import weakref

from silva.aio import received
from silva.environments.process.variables import variables
from silva.environments.process.worker import LENGTH, frame
from silva.protocols import WorkerSpec
from silva.signals import is_stopped

LARGEST = 1 << 28  # bytes of an answer
LOOK = 0.5  # seconds between two looks whether somebody has stopped it (SIGSTOP)
LAST = 2.0  # seconds that a process without a channel has to end by itself


class WorkerProcess:
    """Implements `WorkerChannel`. The process ends with this object, if it does not before."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "silva.environments.process.worker", number, spec.type, spec.settings],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=variables(spec.variables),
            )
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._stopped = False

    async def ready(self) -> bytes:
        return await self._answer(b"")

    async def ask(self, call: bytes) -> bytes:
        return await self._answer(frame(call))

    def stop(self) -> None:
        self._end()

    async def _answer(self, sent: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        self._look_again(loop)
        try:
            await loop.sock_sendall(self._channel, sent)
            size = int.from_bytes(await received(self._channel, LENGTH), "little")
            if size > LARGEST:  # worker.py writes no such size: other code uses its channel
                raise EOFError
            return await received(self._channel, size)
        except (OSError, EOFError) as error:
            raise EOFError(await self._status()) from error
        finally:
            self._timer.cancel()

    def _look_again(self, loop: asyncio.AbstractEventLoop, before: bool = False) -> None:
        self._timer = loop.call_later(LOOK, self._look, loop, before)

    def _look(self, loop: asyncio.AbstractEventLoop, before: bool) -> None:
        """End a process that would never answer. One look is not enough: a run that is continued after
        Ctrl-Z may look before its workers are continued."""
        stopped = is_stopped(self._process.pid)
        if stopped and before:
            self._stopped = True
            self._process.kill()
        else:
            self._look_again(loop, stopped)

    async def _status(self) -> str:
        """How it ended. Code of an environment may write to the channel, or close it, and live on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                while self._process.poll() is None:
                    await asyncio.sleep(0.01)
                return "SIGSTOP" if self._stopped else f"exit status {self._process.returncode}"
        return "it gave no answer that can be read, and did not end"


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()

"""One sandbox: a process within walls that runs code, and is killed from outside."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import marshal
import select
import struct
from collections.abc import Sequence
from typing import Literal

from silva.aio import received
from silva.ports import derive
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.starting import SandboxFault, Started, start
from silva.sandbox.walls import MIB, Walls, chosen

How = Literal["ok", "raised", "timeout", "output", "signal", "exit", "lost"]
HOW: tuple[How, ...] = ("ok", "raised", "timeout", "output", "signal", "exit")  # in the order of inside.py
MOST_ERRORS = 1 << 16  # bytes; inside.py sends fewer
MOST_KEPT = 1_000_000  # characters of a call that keeps state: what inside.py has room for
GRACE = 2.0  # seconds after its own limit that a call may still be silent
HEADER = struct.Struct("<BiII")
NOTICE, NOTICE_SIZE = 0xC0502100, 80  # SECCOMP_IOCTL_NOTIF_RECV
VERDICT = 0xC0182101  # SECCOMP_IOCTL_NOTIF_SEND
EACCES = 13
MOST_ATTEMPTS = 1000  # of one sandbox that are counted; more would only keep the event loop busy


# A process of root may write settings of the kernel without any capability.
PROBE = """
import os
written = []
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        written.append(path)
    except OSError:
        pass
print(os.getuid(), written)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Of one call.

    Attributes:
        how: ok; raised an exception; was stopped after its time or its output; ended by a signal (`detail`)
            or with an exit status (`detail`); lost: the whole sandbox was ended.
        output: standard output and error in the order of writing, at most `output_chars` long. Of a program:
            standard output alone.
        cut: there was more output.
        network_attempts: sockets that the code tried to open.
        errors: the end of a program's standard error.
    """

    how: How
    output: str = ""
    detail: int = 0
    cut: bool = False
    network_attempts: int = 0
    errors: str = ""


class Sandbox:
    """Started by its first call. One call runs at a time, others wait.

    Random numbers of a call are those of `seed` and of `calls`, the number of calls before it.

    Args:
        ready: modules that are imported once, so that each call finds them.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        walls: Walls | None = None,
        seed: int = 0,
        ready: Sequence[str] = (),
    ) -> None:
        self.settings, self.seed, self.ready = settings, seed, ready
        self.walls = walls or chosen(settings)
        self.calls = 0
        self._process: _Process | None = None
        self._alone = asyncio.Lock()

    async def run(
        self, code: str, stdin: str = "", *, program: bool = False, output_chars: int | None = None
    ) -> Result:
        """Run code and wait for it. Cancelling it ends the whole sandbox, as does a call that cannot be
        stopped from within; the next call starts another one, without state.

        Args:
            program: run it as `python file.py` does: standard error is apart, the value of a last expression
                is not shown, threads are waited for, and the interpreter ends in order. Otherwise it is run
                as by an interactive interpreter.
            output_chars: instead of the settings' own.

        Raises:
            SandboxFault: it cannot be started, or `stdin` is larger than its files may be.
            ValueError: a program is to keep state, or a call that does is larger than 1,000,000 characters.
        """
        settings, data = self.settings, stdin.encode()
        limit = output_chars or settings.output_chars
        if settings.keep_state and (program or len(code) + len(stdin) > MOST_KEPT):
            got = "a program" if program else f"{len(code) + len(stdin):,} characters"
            raise ValueError(
                f"call of a sandbox with keep_state: got {got}, expected at most {MOST_KEPT:,} characters of "
                "code and input, and no program"
            )
        if len(data) > settings.file_mb * MIB:
            raise SandboxFault(
                f"the input of a call: got {len(data)} bytes, expected at most {settings.file_mb} MiB; "
                "raise file_mb"
            )
        async with self._alone:
            if self._process is None:
                self._process = await _Process.start(self.walls, settings, self.ready)
            process, attempts = self._process, self._process.attempts
            seed = derive(self.seed, self.calls) % 2**32  # numpy takes no larger one
            self.calls += 1
            try:
                async with asyncio.timeout(settings.seconds + GRACE):
                    result = await process.call((code, data, seed, program, 4 * limit))
            except (TimeoutError, OSError, EOFError) as error:
                await self.close()
                result = Result("timeout" if isinstance(error, TimeoutError) else "lost")
            except BaseException:
                await asyncio.shield(self.close())
                raise
            return dataclasses.replace(
                result, output=result.output[:limit], cut=result.cut or len(result.output) > limit,
                network_attempts=process.attempts - attempts,
            )  # fmt: skip

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


def works(walls: Walls, packages: bool) -> str:
    """Why these walls do not stand here; empty: they do, and code runs between them."""

    async def probe() -> str:
        sandbox = Sandbox(SandboxSettings(packages=packages), walls)
        try:
            result = await sandbox.run(PROBE)
        except SandboxFault as error:
            return str(error)
        finally:
            await sandbox.close()
        return "" if result.output == "65534 []\n" else f"{result.how}: {result.output[-300:].strip()}"

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        return thread.submit(asyncio.run, probe()).result()


class _Process:
    """A started sandbox, to be called.

    `attempts`: of opening a socket that leads out, up to `MOST_ATTEMPTS`. After that nobody answers
    the kernel, which then refuses them itself.
    """

    def __init__(self, started: Started) -> None:
        self.started, self.attempts = started, 0
        self._loop = asyncio.get_running_loop()
        if started.listener >= 0:
            self._loop.add_reader(started.listener, self._refuse)

    @classmethod
    async def start(cls, walls: Walls, settings: SandboxSettings, ready: Sequence[str]) -> _Process:
        # Not cancelled with this: a sandbox that nobody waits for any more ends as soon as it has started.
        return cls(await asyncio.shield(asyncio.to_thread(start, walls, settings, ready)))

    async def call(self, request: tuple[str, bytes, int, bool, int]) -> Result:
        """A call of code, input, seed, whether it is a program, and its most bytes of output.

        Raises:
            EOFError, OSError: the sandbox ends, or answers what nothing inside.py would.
        """
        body = marshal.dumps(request)
        await self._loop.sock_sendall(self.started.channel, len(body).to_bytes(4, "little") + body)
        how, detail, *sizes = HEADER.unpack(await received(self.started.channel, HEADER.size))
        if how >= len(HOW) or sizes[0] > request[-1] or sizes[1] > MOST_ERRORS:
            raise EOFError("not an answer")
        output, errors = [
            (await received(self.started.channel, size)).decode(errors="replace") for size in sizes
        ]
        return Result(HOW[how], output, detail, HOW[how] == "output", errors=errors)

    async def end(self) -> None:
        self._stop_listening()
        await asyncio.to_thread(self.started.end)  # waits for the processes to be gone

    def _refuse(self) -> None:
        """Count an attempt to open a socket, and let it fail."""
        asked = select.poll()
        asked.register(self.started.listener, select.POLLIN)
        if not any(event & select.POLLIN for _, event in asked.poll(0)):
            # All that could ask are gone. Kernels before 6.11 would wait for them for ever, with this loop.
            self._stop_listening()
            return
        notice = bytearray(NOTICE_SIZE)
        try:
            fcntl.ioctl(self.started.listener, NOTICE, notice)
            (number,) = struct.unpack_from("<Q", notice)
            self.attempts += 1
            fcntl.ioctl(self.started.listener, VERDICT, struct.pack("<QqiI", number, 0, -EACCES, 0))
        except FileNotFoundError:  # who asked is gone
            pass
        except OSError:
            self._stop_listening()
        if self.attempts >= MOST_ATTEMPTS:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self.started.listener >= 0:
            self._loop.remove_reader(self.started.listener)
            self.started.close_listener()

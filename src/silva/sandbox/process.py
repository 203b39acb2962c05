"""One sandbox: a process within walls that runs code, and is killed from outside."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import fcntl
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Sequence
from typing import Literal

from silva.aio import received
from silva.errors import SilvaError
from silva.ports import derive
from silva.sandbox import cgroups
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import MIB, Walls, chosen, command

How = Literal["ok", "raised", "timeout", "output", "signal", "exit", "lost"]
HOW: tuple[How, ...] = ("ok", "raised", "timeout", "output", "signal", "exit")  # in the order of inside.py
START = 20.0  # seconds that a start may take on a busy machine
START_IMPORTS = 60.0  # more, if it imports modules
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


class SandboxFault(SilvaError, OSError):
    """A sandbox could not be started: it is the machine's fault, not the code's."""


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
    """A started interpreter and the socket to it.

    `attempts`: of opening a socket that leads out, up to `MOST_ATTEMPTS`. After that nobody answers
    the kernel, which then refuses them itself.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, group: cgroups.ControlGroup | None
    ) -> None:
        self.process, self.channel, self.attempts = process, channel, 0
        self._loop = asyncio.get_running_loop()
        self._listener = -1
        self._ended = weakref.finalize(self, _end, process, channel, group)

    @classmethod
    async def start(cls, walls: Walls, settings: SandboxSettings, ready: Sequence[str]) -> _Process:
        ours, theirs = socket.socketpair()
        gate = cgroups.Gate() if walls.kind != "none" and cgroups.parents() else None
        arguments, inherited = command(walls, settings, gate, ready)
        group = None
        try:
            if gate is not None:
                group = cgroups.ControlGroup(settings.memory_mb * MIB, settings.processes)
            process = subprocess.Popen(
                arguments, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=inherited, cwd="/",
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONHASHSEED": "0"},
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )  # fmt: skip
        except OSError as error:
            ours.close()
            if gate is not None:
                gate.close()
            if group is not None:
                group.remove()
            raise SandboxFault(f"sandbox: {error}") from error
        finally:
            theirs.close()
            for fd in inherited:
                os.close(fd)
        ours.setblocking(False)
        started = cls(process, ours, group)
        try:
            async with asyncio.timeout(START + START_IMPORTS * bool(ready)):
                if gate is not None and group is not None:
                    # Not cancelled with this: the thread closes the gate, if need be when the process ends.
                    await asyncio.shield(asyncio.to_thread(gate.let_in, group))
                await started._greet()
        except (TimeoutError, OSError) as error:
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)  # what is left of it may live, and say no more
            words = (process.stderr.read(2000) or b"").decode(errors="replace").strip()
            await started.end()
            raise SandboxFault(f"sandbox did not start: {words or error or type(error).__name__}") from error
        except BaseException:
            await asyncio.shield(started.end())
            raise
        return started

    async def call(self, request: tuple[str, bytes, int, bool, int]) -> Result:
        """A call of code, input, seed, whether it is a program, and its most bytes of output.

        Raises:
            EOFError, OSError: the sandbox ends, or answers what nothing inside.py would.
        """
        body = marshal.dumps(request)
        await self._loop.sock_sendall(self.channel, len(body).to_bytes(4, "little") + body)
        how, detail, *sizes = HEADER.unpack(await received(self.channel, HEADER.size))
        if how >= len(HOW) or sizes[0] > request[-1] or sizes[1] > MOST_ERRORS:
            raise EOFError("not an answer")
        output, errors = [(await received(self.channel, size)).decode(errors="replace") for size in sizes]
        return Result(HOW[how], output, detail, HOW[how] == "output", errors=errors)

    async def end(self) -> None:
        self._stop_listening()
        await asyncio.to_thread(self._ended)  # waits for the processes to be gone

    async def _greet(self) -> None:
        """Wait until it is ready; take the descriptor that the kernel tells network attempts to."""
        readable = asyncio.Event()
        self._loop.add_reader(self.channel, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self.channel)
        word, control, _, _ = self.channel.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if word not in (b"0", b"1"):
            raise ConnectionError("it ended at its start")
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (self._listener,) = array.array("i", data[:4])
                self._loop.add_reader(self._listener, self._refuse)

    def _refuse(self) -> None:
        """Count an attempt to open a socket, and let it fail."""
        asked = select.poll()
        asked.register(self._listener, select.POLLIN)
        if not any(event & select.POLLIN for _, event in asked.poll(0)):
            # All that could ask are gone. Kernels before 6.11 would wait for them for ever, with this loop.
            self._stop_listening()
            return
        notice = bytearray(NOTICE_SIZE)
        try:
            fcntl.ioctl(self._listener, NOTICE, notice)
            (number,) = struct.unpack_from("<Q", notice)
            self.attempts += 1
            fcntl.ioctl(self._listener, VERDICT, struct.pack("<QqiI", number, 0, -EACCES, 0))
        except FileNotFoundError:  # who asked is gone
            pass
        except OSError:
            self._stop_listening()
        if self.attempts >= MOST_ATTEMPTS:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener >= 0:
            self._loop.remove_reader(self._listener)
            os.close(self._listener)
            self._listener = -1


def _end(
    process: subprocess.Popen[bytes], channel: socket.socket, group: cgroups.ControlGroup | None
) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
    if group is not None:
        with contextlib.suppress(OSError):
            group.remove()

"""Starts the processes of a run, notices which of them are dead, and starts these again.

    Supervisor ──> trainer, inference ...     log: their lines, with the part's name
              └──> orchestrator               has the terminal; its end is the end of all

    a part is lost if it                       noticed within
    has ended, however                         TICK
    is stopped (SIGSTOP)                       TICK (Linux)
    does not answer /alive                     CHECK + DEAD_AFTER, once it has answered before
    has a core that computes no more           Part.core_patience

A lost part is killed and started again at the same address. What it knew the orchestrator gives it again, out
of a checkpoint. Every process dies with this one (process.tie_to_parent).

    this process gets                          the orchestrator gets
    SIGINT, SIGTERM, the first SIGHUP          STOP_PART: it ends with a checkpoint, or at the second at once
    SIGTSTP (Ctrl-Z), then SIGCONT             SIGSTOP, then SIGCONT, and so does every part

Parts listen to no other signal (signals.end_as_a_part). Not here: what the parts do, and torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from silva.aio import cancelled, first
from silva.errors import SilvaError
from silva.ports import CLOCK
from silva.signals import STOP_PART, held, is_stopped, stop_signals
from silva.wire.transport import Peer, Refused, Unreachable, silence

TICK = 0.2  # seconds between two looks at the processes
SOON = 0.02  # seconds between two looks at a process that has been told to end
CHECK = 1.0  # seconds between two questions whether a part is alive
DEAD_AFTER = 4.0  # seconds without an answer
GRACE = 5.0  # seconds that a process has to end when it is told to
SHORT = 20.0  # an orchestrator that lives for less than these seconds has failed at its start
MOST_FAILURES = 3  # starts in a row that fail, and the run ends
MOST_LOSSES = 10  # of one part since the newest checkpoint: it would be lost in the same place for ever
INTERRUPTED = 130  # exit code
KEPT = 30  # lines of a part that are shown when it fails for good


@dataclass(frozen=True)
class Part:
    """A process to run.

    Attributes:
        again: says its arguments when it is started again; None for the same.
        address: where it listens; "" for the orchestrator, whose end is the end of all.
        once: environment variables of the first start only.
        told: the signal by which it is told to end.
        core: a path that what computes in it answers, between two of its steps; "" if only its server would.
        core_patience: seconds that it may take for that. A load of weights counts.
        lasting: whether an orchestrator that was killed is started again.
    """

    name: str
    argv: Sequence[str]
    again: Callable[[], Sequence[str]] | None = None
    address: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    once: Mapping[str, str] = field(default_factory=dict)
    told: int = STOP_PART
    core: str = ""
    core_patience: float = 0.0
    lasting: bool = True


@dataclass
class Running:
    """A part's process and what is known of it. `heard`: it has answered; `silent`: why it counts as hung."""

    part: Part
    process: asyncio.subprocess.Process
    began: float
    heard: bool = False
    silent: str = ""
    failures: int = 0  # starts in a row that failed
    losses: int = 0  # since these checkpoints were the newest
    checkpoints: object = None
    reader: asyncio.Task[None] | None = None
    watcher: asyncio.Task[None] | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))


class Supervisor:
    """Runs the parts until the orchestrator ends.

    Args:
        parts: with one orchestrator among them.
        log: takes every line that a part writes.
        say: takes what people should know.
        key: that the parts ask for.
        checkpoints: what there are; any value that changes with the next one.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        log: Callable[[str], None],
        say: Callable[[str], None],
        key: str = "",
        checkpoints: Callable[[], object] = lambda: None,
    ) -> None:
        self._parts, self._log, self._say, self._key = parts, log, say, key
        self._checkpoints = checkpoints
        self._running: dict[str, Running] = {}
        self._asked = 0  # signals that ask to end

    async def run(self) -> int:
        """The exit code of the orchestrator.

        Raises:
            SilvaError: a part fails at every start, or is lost again and again before the next checkpoint.
        """
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._pass_on, number)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGTSTP, self._pause)
        try:
            for part in self._parts:
                await self._start(part, first=True)
                if self._asked:  # there was no orchestrator to tell
                    return INTERRUPTED
            while True:
                for running in list(self._running.values()):
                    code = await self._look(running)
                    if code is not None:
                        return code
                await CLOCK.sleep(TICK)
        finally:
            await self._end()

    async def _look(self, running: Running) -> int | None:
        """Start a part that is lost again; the orchestrator's exit code if all is over."""
        why = self._lost(running)
        if not why:
            return None
        part, code = running.part, running.process.returncode
        if not part.address and code is not None and (code >= 0 or self._asked or not part.lasting):
            if code < 0 and not self._asked:
                self._say(f"{part.name} {why}: it is not started again")
            return code if code >= 0 else 128 - code
        await self._kill(running)
        await self._no_more(running)
        failures = running.failures + 1 if self._failed(running) else 0
        checkpoints = self._checkpoints()
        losses = running.losses + 1 if checkpoints == running.checkpoints else 1
        if losses >= MOST_LOSSES:
            why += f", lost {losses} times without a new checkpoint"
        if failures >= MOST_FAILURES or losses >= MOST_LOSSES:
            raise SilvaError("\n  ".join([f"{part.name} {why}; its last lines:", *running.lines]))
        self._say(f"{part.name} {why}: it is started again")
        again = await self._start(part, first=False)
        again.failures, again.losses, again.checkpoints = failures, losses, checkpoints
        return INTERRUPTED if self._asked and not part.address else None

    def _failed(self, running: Running) -> bool:
        """Whether it never came so far as to work: loading a model may take minutes before it fails."""
        if running.part.address:
            return not running.heard
        return CLOCK.monotonic() - running.began < SHORT

    def _lost(self, running: Running) -> str:
        """Why the part is lost, in words; "" if it is not."""
        code = running.process.returncode
        if code is not None:
            return (
                f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
            )
        if is_stopped(running.process.pid):
            # An orchestrator that somebody stopped may go on; it holds locks and has the terminal.
            return "was stopped (SIGSTOP)" if running.part.address else ""
        return running.silent

    async def _start(self, part: Part, *, first: bool) -> Running:
        argv = part.argv if first or part.again is None else part.again()
        env = {**os.environ, **part.env, **(part.once if first else {}), "SILVA_PARENT": str(os.getpid())}
        output = asyncio.subprocess.PIPE if part.address else None
        with held():
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT if part.address else None,
                process_group=0,  # Ctrl-C reaches this process alone, which passes it on
            )
        running = self._running[part.name] = Running(part, process, CLOCK.monotonic())
        if part.address:
            running.reader = asyncio.create_task(self._read(running))
            running.watcher = asyncio.create_task(self._watch(running))
        return running

    async def _read(self, running: Running) -> None:
        stream = running.process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # it is too long and dropped: a full pipe would stop the part
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            running.lines.append(text)
            self._log(f"{running.part.name}: {text}")

    async def _watch(self, running: Running) -> None:
        peer = Peer(running.part.address, name=running.part.name, key=self._key)
        try:
            while not running.heard:
                try:
                    await peer.get("/alive", timeout=DEAD_AFTER)
                except Unreachable:
                    await CLOCK.sleep(CHECK)
                    continue
                except Refused:  # a server of somebody else's has no such route
                    pass
                running.heard = True
            running.silent = await _silent(peer, running.part)
        finally:
            await peer.close()

    async def _no_more(self, running: Running) -> None:
        """The tasks of a process that has ended; what it wrote last is read."""
        if running.reader is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.reader, 1.0)
        await cancelled(task for task in (running.reader, running.watcher) if task is not None)

    async def _kill(self, running: Running) -> None:
        _signal_group(running, signal.SIGKILL)
        await _ended(running.process)

    def pid(self, name: str) -> int:
        """Of a part's process; 0 before it is started."""
        return self._running[name].process.pid if name in self._running else 0

    async def _end(self) -> None:
        """Orchestrator first, if it still lives: it uses the others."""
        everyone = sorted(self._running.values(), key=lambda running: bool(running.part.address))
        for running in everyone:
            if running.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    running.process.send_signal(running.part.told)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_ended(running.process), GRACE)
            await self._kill(running)
            await self._no_more(running)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGHUP and self._asked:  # a terminal that closes may send it more than once
            return
        self._asked += 1
        for running in self._running.values():
            if not running.part.address and running.process.returncode is None:
                running.process.send_signal(running.part.told)

    def _pause(self) -> None:
        """Everybody stops, until this process is continued."""
        for running in self._running.values():
            _signal_group(running, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for running in self._running.values():
            _signal_group(running, signal.SIGCONT)


async def _silent(peer: Peer, part: Part) -> str:
    """Returns when a part hangs: what it does no more, in words."""
    alive = silence(peer, patience=DEAD_AFTER, every=CHECK)
    if part.core:
        core = silence(peer, patience=part.core_patience, every=CHECK, path=part.core)
        if await first(alive, core) is None:
            return f"answers, but what computes in it has not for {part.core_patience:g} s ({part.core})"
    else:
        await alive
    return f"has not answered for {DEAD_AFTER:g} s"


def _signal_group(running: Running, number: int) -> None:
    """The process and all that it has started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, number)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """`process.wait()` would also wait for the children that hold its output."""
    while process.returncode is None:
        await CLOCK.sleep(SOON)


def line_writer(path: Path, ready: Callable[[], bool]) -> Callable[[str], None]:
    """Appends lines to `path` while it is `ready`; the others wait until then."""
    waiting: list[str] = []

    def write(line: str) -> None:
        waiting.append(line)
        if ready():
            with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{each}\n" for each in waiting))
                waiting.clear()

    return write

"""Starts sandboxes: each is a fork of a warm template (template.py), put into control groups of its own.

A template is started with the first sandbox of its kind, which takes as long as Python does, and ends with
this process. To put a lone process into groups of version 1 takes 10 ms, which the kernel waits: so the next
sandbox of each of the last kinds is started in advance. A fork of this process has none of all that.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from silva.errors import SilvaError
from silva.sandbox import cgroups
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import ENVIRONMENT, MIB, Walls, command, told

START = 20.0  # seconds that a start may take on a busy machine
START_IMPORTS = 60.0  # more, if it imports modules
LAST_WORDS = 1.0  # seconds that a template which failed has to end
MOST_AT_THE_END = 1.0  # seconds that the end of this process waits for what is started in advance
_templates: dict[tuple[str, ...], _Template] = {}  # by their command lines
_lock = threading.Lock()


class SandboxFault(SilvaError, OSError):
    """A sandbox could not be started: it is the machine's fault, not the code's."""


class Started:
    """A sandbox that is ready for calls.

    `channel` leads to it. `listener` is the descriptor that the kernel tells attempts to open a socket to,
    -1 if it does not. `pid` is the number of its first process.

    Raises:
        OSError: it did not start, or not in time; nothing is left of it.
    """

    def __init__(self, template: _Template, kind: _Kind) -> None:
        self.channel, theirs = socket.socketpair()
        self._template = template  # which ends once nobody has a sandbox of it
        self._listener = _Descriptor()
        ends: list[Callable[[], None]] = [self.channel.close, self._listener.close]
        self.end = weakref.finalize(self, _end, ends)
        _all.add(self)
        try:
            self.channel.settimeout(START + START_IMPORTS * bool(kind.ready))
            with theirs:
                template.fork(told(kind.walls, kind.settings), theirs)
            self._process = template.answered(self.channel, b"p")
            ends.append(partial(_kill, self._process))
            with open(f"/proc/self/fdinfo/{self._process}") as file:
                self.pid = next(int(line[4:]) for line in file if line.startswith("Pid:"))
            if kind.walls.kind == "none":  # there no namespace ends with its first process
                ends.insert(-1, partial(_kill_session, self.pid))
            if kind.walls.kind != "none" and cgroups.parents():
                group = cgroups.ControlGroup(kind.settings.memory_mb * MIB, kind.settings.processes)
                ends.append(group.remove)
                group.add(self.pid)
            self._listener.number = template.answered(self.channel, b"01")
            self.channel.sendall(b"g")  # it forks nothing before it is in its groups
        except BaseException as error:
            self.end()
            if isinstance(error, TimeoutError):
                template.give_up()
            raise
        self.channel.setblocking(False)

    @property
    def listener(self) -> int:
        return self._listener.number

    def close_listener(self) -> None:
        """The kernel refuses all further attempts itself."""
        self._listener.close()

    @property
    def waits(self) -> bool:
        """For a call: it has not ended, and nobody has stopped it."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return not _gone(self._process, 0) and file.read().rpartition(")")[2].split()[0] not in "Tt"
        return False


@dataclass(frozen=True, slots=True)
class _Kind:
    """Sandboxes of one kind are alike."""

    walls: Walls
    settings: SandboxSettings
    ready: tuple[str, ...]

    def started(self) -> Started:
        return Started(_Template.of(command(self.walls, self.settings.packages, self.ready)), self)


MOST_AHEAD = 4  # kinds of which one is started in advance: the last ones that were asked for
_next: dict[_Kind, Started] = {}
_asked = queue.Queue[_Kind | None]()  # to be started in advance; None: nothing further
_starter: threading.Thread | None = None
_all: weakref.WeakSet[Started] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: what there is belongs to the parent, and lives on when the child ends."""
    global _lock, _asked, _starter
    for started in _all:
        started.end.detach()
    _all.clear()
    _next.clear()
    _templates.clear()
    _lock, _asked, _starter = threading.Lock(), queue.Queue(), None


os.register_at_fork(after_in_child=_after_fork)


def start(walls: Walls, settings: SandboxSettings, ready: Sequence[str]) -> Started:
    """Wait until a sandbox is ready for calls.

    Args:
        ready: modules that each call finds imported.

    Raises:
        SandboxFault: it did not start.
    """
    kind = _Kind(walls, settings, tuple(ready))
    try:
        found = _next.pop(kind, None)
        if found is not None and not found.waits:
            found.end()
            found = None
        found = found or kind.started()
    except OSError as error:
        raise SandboxFault(f"sandbox did not start: {error or type(error).__name__}") from error
    global _starter
    _asked.put(kind)
    with _lock:
        if _starter is None:
            # The end of this process does not wait for it: a template that is stopped would hold it up.
            _starter = threading.Thread(target=_start_asked, args=(_asked,), name="sandbox", daemon=True)
            _starter.start()
    return found


def _start_asked(asked: queue.Queue[_Kind | None]) -> None:
    while kind := asked.get():
        with contextlib.suppress(OSError):  # if it still does not start when it is needed, that says why
            if kind not in _next:
                _next[kind] = kind.started()
        while len(ahead := [*_next]) > MOST_AHEAD:
            with contextlib.suppress(KeyError):  # somebody else has taken it
                _next.pop(ahead[0]).end()
        asked.task_done()


# What is registered later ends earlier: finalizers end what was started in advance, so theirs comes first.
weakref.finalize(_Kind, lambda: None).detach()


@atexit.register
def _at_the_end() -> None:
    _asked.put(None)
    if _starter is not None:
        _starter.join(MOST_AT_THE_END)


class _Template:
    def __init__(self, arguments: Sequence[str]) -> None:
        self._words = ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(self._control.close)
            self._control.settimeout(START)
            self._process = subprocess.Popen(
                arguments, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
                env=ENVIRONMENT,
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )  # fmt: skip
            failed.pop_all()

    @classmethod
    def of(cls, arguments: Sequence[str]) -> _Template:
        key = tuple(arguments)
        with _lock:
            found = _templates.get(key)
            if found is None or found._process.poll() is not None:
                found = _templates[key] = cls(arguments)
            return found

    def fork(self, message: bytes, channel: socket.socket) -> None:
        """Ask for a sandbox. If the template has ended, the channel tells.

        Raises:
            TimeoutError: it does not read.
        """
        try:
            socket.send_fds(self._control, [message], [channel.fileno()])
        except TimeoutError:
            raise
        except OSError:
            pass

    def give_up(self) -> None:
        """It does not answer: the next sandbox is one of another template, and those of this one go on."""
        with _lock:
            for key in [key for key, template in _templates.items() if template is self]:
                del _templates[key]

    def answered(self, channel: socket.socket, words: bytes) -> int:
        """The descriptor that came with one of these words of a new sandbox; -1: none did.

        Raises:
            OSError: it has ended, or sends something else.
        """
        word, control, flags, _ = channel.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no descriptor is left for what it sends")
        if word == b"!":
            raise OSError(channel.recv(2000).decode(errors="replace"))
        if not word or word not in words:
            raise OSError(self._last_words() or "it ended at its start")
        return next((array.array("i", data[:4])[0] for *_, data in control), -1)

    def _last_words(self) -> str:
        """What it wrote before it ended; empty: it has not, or said nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS)
        errors = self._process.stderr
        with _lock:
            if errors is not None and not errors.closed and self._process.returncode is not None:
                os.set_blocking(errors.fileno(), False)  # what is left of it may live, and say no more
                self._words = (errors.read(2000) or b"").decode(errors="replace").strip()
                errors.close()
                self._control.close()
        return self._words


def _gone(process: int, milliseconds: int | None = None) -> bool:
    """Wait so long, or for ever, for the end of the process that a descriptor stands for."""
    asked = select.poll()
    asked.register(process, select.POLLIN)
    return bool(asked.poll(milliseconds))


class _Descriptor:
    number = -1

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


def _kill_session(leader: int) -> None:
    """Kill all of the session that a process leads: each call in it is a group of its own."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            if os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


def _kill(process: int) -> None:
    """Kill the process that a descriptor stands for, and close that."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _gone(process)
    os.close(process)


def _end(ends: Sequence[Callable[[], None]]) -> None:
    for each in ends:
        with contextlib.suppress(OSError):
            each()

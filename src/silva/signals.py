"""What Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) do to a command.

    entry ──end_at_once──> imports, configuration ──be_caught──> the command ──> orchestrator/interrupt.py
            end_as_a_part

While modules are imported, a signal ends the process: there is nothing to save, and libraries would turn an
exception into one of their own ("Could not import module"). After that, each of the three raises
KeyboardInterrupt. During training, `Interrupt` handles them and ends the run with a checkpoint.

A part of `silva rl` listens to STOP_PART alone, which its supervisor sends it. The others may be sent to all
processes of a service or a job at once: trainer and inference have to last until the orchestrator has its
checkpoint, and the orchestrator would take its own and the supervisor's for two.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_PART = signal.SIGUSR2


class Interrupted(Exception):
    """The user asked to stop a run; raised where stopping loses no more than it must."""


def end_at_once() -> None:
    """A signal that was ignored when the process began (nohup, a shell's background job) stays ignored."""
    for number in stop_signals():
        signal.signal(number, _end)


def end_as_a_part() -> None:
    """The same for a process of `silva rl`, which was begun with its signals `held`."""
    for number in NUMBERS:
        signal.signal(number, _ignore)
    signal.signal(STOP_PART, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*NUMBERS, STOP_PART))


@contextmanager
def held() -> Iterator[None]:
    """A process that is begun here gets no signal before it has said which it listens to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*NUMBERS, STOP_PART))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_signals() -> list[int]:
    """The signals by which this process is told to end."""
    numbers = (STOP_PART,) if signal.getsignal(signal.SIGINT) is _ignore else NUMBERS
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def be_caught() -> None:
    """From here on a signal raises KeyboardInterrupt. Does nothing if `end_at_once` was not called."""
    for number in stop_signals():
        if signal.getsignal(number) is _end:
            direct = number in (signal.SIGINT, STOP_PART)
            signal.signal(number, signal.default_int_handler if direct else _as_ctrl_c)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"silva: interrupted\n")
    finally:  # the terminal may be gone
        os._exit(130)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, as children would inherit SIG_IGN, and could not be told to end."""


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own for it


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (SIGSTOP); False where the system does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # no /proc: silence tells
        return False
    return state in (b"T", b"t")

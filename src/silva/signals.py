"""What Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) do to a command.

    entry ──end_at_once──> imports, configuration ──be_caught──> the command ──> orchestrator/interrupt.py

While modules are imported, a signal ends the process: there is nothing to save, and libraries would turn an
exception into one of their own ("Could not import module"). After that, each of the three raises
KeyboardInterrupt. During training, `Interrupt` handles them and ends the run with a checkpoint.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """A signal that was ignored when the process began (nohup, a shell's background job) stays ignored."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def be_caught() -> None:
    """From here on a signal raises KeyboardInterrupt. Does nothing if `end_at_once` was not called."""
    for number in NUMBERS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _as_ctrl_c)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"silva: interrupted\n")
    finally:  # the terminal may be gone
        os._exit(130)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own for it

"""Everything Silva raises on purpose. Each exception is also a standard type, so plain `except` works.

A message says what went wrong, where, what was got and what was expected. `exit_code` is what the
command line returns: 1 a run failed, 2 the input was wrong, 3 training gave up, 130 interrupted.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class SilvaError(Exception):
    exit_code = 1


class ConfigError(SilvaError, ValueError):
    """The configuration is wrong: unknown key, wrong type, missing file, impossible combination."""

    exit_code = 2


class RecordError(SilvaError, ValueError):
    """A record (Task, Segment, Sample, ...) does not hold together."""


class RenderingError(SilvaError, ValueError):
    """A chat template cannot do what was asked of it."""

    exit_code = 2


class CapabilityError(SilvaError, ValueError):
    """A part was asked for something it cannot do."""

    exit_code = 2


class ModelError(SilvaError, OSError):
    """A model folder, file or package is missing or unusable."""

    exit_code = 2


class OutputError(SilvaError, OSError):
    """Standard output takes no more, such as a file on a full disk."""


class RemoteFault(SilvaError, RuntimeError):
    """Something raised in another process.

    Attributes:
        trace: its traceback as text; "" if there is none.
        frames: the same as (file, line), the outermost first.
    """

    def __init__(self, text: str, *, trace: str = "", frames: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(text)
        self.trace, self.frames = trace, frames


class PartLost(SilvaError, ConnectionError):
    """A part in another process is gone, and what it knew too. The run goes on from its last checkpoint."""


class RewardError(SilvaError, RuntimeError):
    """An attempt could not be graded: it has no result."""


class EngineError(SilvaError, RuntimeError):
    """Sampling failed for a reason of the engine's own (never the model's answer)."""


class NoReply(EngineError):
    """One request got no reply, others may get theirs: its episode has no result, the run goes on."""


class CostLimit(EngineError):
    """One more request to a paid service might cost more than the configuration allows."""


class ContextOverflow(SilvaError, ValueError):
    """The prompt leaves no room for a single token. An error of that trajectory, not of the run."""


class RunFolderError(SilvaError, FileExistsError):
    """The run's directory is in the way, or cannot be written."""

    exit_code = 2


class CheckpointError(SilvaError, OSError):
    """A checkpoint is torn, damaged or does not belong to this run."""


class LedgerError(SilvaError, RuntimeError):
    """The ledger is missing, damaged, or contradicts what is asked."""


class NonFiniteError(SilvaError, ArithmeticError):
    """Loss or gradient was not finite too many times in a row."""

    exit_code = 3


class NoSignalError(SilvaError, RuntimeError):
    """No group of rollouts could be collected: every episode failed."""

    exit_code = 3


class OutOfMemory(SilvaError, MemoryError):
    """Memory ran out; the message names what to lower."""


def shorten(text: str, most: int) -> str:
    """A text in a message: all of it, or its beginning and "...", in at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str, most: int) -> str:
    """The same without line breaks, each run of whitespace as one space."""
    return shorten(" ".join(text.split()), most)


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """An error of Silva's inside begins with what it is about."""
    try:
        yield
    except SilvaError as error:
        raise type(error)(f"{what}: {error}") from error.__cause__


def error_named(name: str, message: str) -> SilvaError | None:
    """What another process of Silva raised, by the name of its class; None if no class here has it."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, SilvaError)):
        return None
    return kind(message)


class Escaped(SilvaError, RuntimeError):
    """Code that is not Silva's raised what would end a program: SystemExit, a panic of Rust, ..."""


@contextmanager
def contained() -> Iterator[None]:
    """Makes what other people's code raises an Exception: `exit()` in an environment must not end a run.

    What is Silva's own passes: a cancellation that was asked for, and Ctrl-C, which Python raises in the main
    thread alone.

    Raises:
        Escaped: for any other BaseException.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        if _is_ours(error):
            raise
        text = f"{type(error).__name__}: {error}"
        raise Escaped(text).with_traceback(error.__traceback__) from error


def _is_ours(error: BaseException) -> bool:
    from asyncio import CancelledError, current_task  # late, so that help stays quick

    if isinstance(error, KeyboardInterrupt):
        heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # not in a worker
        return heard and threading.current_thread() is threading.main_thread()
    if not isinstance(error, CancelledError):
        return False
    try:
        task = current_task()
    except RuntimeError:  # no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0

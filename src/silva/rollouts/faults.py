"""Descriptions of faults in episodes: where they were raised, which are of the same kind, which calls block.

Not here: what a fault means for its episode (episode.py), and where the descriptions are shown.
"""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

import silva
from silva.errors import Escaped, RemoteFault
from silva.ports import CLOCK

T = TypeVar("T")

BLOCKING = 0.1
"""A call that blocks the event loop for more seconds is reported: asyncio's own threshold."""
_SILVA = str(Path(silva.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NUMBER = re.compile(r"(?<![\w:])\d+(\.\d+)?")  # not the digits in "file.py:12" or in names


class Watch:
    """Receives the faults of episodes. This one ignores them."""

    def fault(self, environment: str, error: str, trace: str) -> None:
        """An episode failed, or its `close` did; `trace` is empty if no environment code raised."""

    def blocked(self, environment: str, call: str, seconds: float) -> None:
        """A call of the environment (reset, step, ...) blocked the event loop for so many seconds."""


UNWATCHED = Watch()


def place(fault: BaseException, environment: object) -> str:
    """Where the user should look first: file and line of the innermost frame of their own code.

    If none of their code is in the traceback, the innermost frame and the class of the environment are named.
    """
    if own := own_place(fault):
        return own
    # A frame of Silva does not help: it only checks what it was given.
    inner = [frame for frame in _frames(fault)[-1:] if not frame[0].startswith(str(Path(__file__).parent))]
    return "; ".join([*(_shown(*frame) for frame in inner), *_home(environment)])


def own_place(fault: BaseException) -> str:
    """File and line of the innermost frame that is neither Silva's nor a library's; "" if there is none."""
    own = [frame for frame in _frames(fault) if _is_own(frame[0])]
    return _shown(*own[-1]) if own else ""


def _frames(fault: BaseException) -> list[tuple[str, int]]:
    if isinstance(fault, RemoteFault):
        return list(fault.frames)
    return [(f.filename, f.lineno or 0) for f in traceback.extract_tb(fault.__traceback__)]


def described(fault: BaseException) -> str:
    """Type and text of an exception; one of another process brings both in its text, as `Escaped` does."""
    return str(fault) if isinstance(fault, RemoteFault | Escaped) else f"{type(fault).__name__}: {fault}"


def trace(fault: BaseException) -> str:
    own = fault.trace if isinstance(fault, RemoteFault) else ""
    return own or "".join(traceback.format_exception(fault)).rstrip()


def kind(error: str) -> str:
    """The error without its numbers: "prompt of 231 tokens" and "prompt of 240 tokens" are the same kind."""
    return _NUMBER.sub("#", error)


def tally(errors: Iterable[str | None]) -> str:
    """Such as "7 x step: KeyError: 'a' (game.py:12); 2 x ...": the three most frequent kinds, each with an
    example."""
    counts: Counter[str] = Counter()
    example: dict[str, str] = {}
    for error in errors:
        text = error or "no reason was given"
        counts[kind(text)] += 1
        example.setdefault(kind(text), text)
    parts = [f"{count} x {example[name]}" for name, count in counts.most_common(3)]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(3))
    return "; ".join([*parts, *([f"{rest} x other errors"] if rest else [])])


@types.coroutine
def watched(
    function: Callable[..., Awaitable[T]], *arguments: Any, tell: Callable[[float], None]
) -> Generator[Any, Any, T]:
    """`await function(*arguments)`; `tell` is called each time it blocks the event loop for `BLOCKING`
    seconds.

    Between two suspensions a coroutine runs alone; only that time is measured, not the time it waits.
    """

    async def call() -> T:
        return await function(*arguments)

    steps = call()
    advance: Callable[[Any], Any] = steps.send
    value: Any = None
    while True:
        began = CLOCK.monotonic()
        try:
            waiting = advance(value)
        except StopIteration as end:
            return end.value
        finally:
            tell_if_long(began, tell)
        try:
            advance, value = steps.send, (yield waiting)
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            advance, value = steps.throw, error


def tell_if_long(began: float, tell: Callable[[float], None]) -> None:
    """`began`: a time of `CLOCK.monotonic`; the caller has not been suspended since."""
    if (seconds := CLOCK.monotonic() - began) >= BLOCKING:
        tell(seconds)


def _is_own(filename: str) -> bool:
    return not filename.startswith((_SILVA, *_LIBRARIES, "<frozen"))


def _home(environment: object) -> list[str]:
    """The class of the environment, if it is not Silva's own."""
    cls = type(environment)
    try:
        file = inspect.getsourcefile(cls) or ""
        line = inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):  # made in a shell, or built in
        return []
    return [f"{cls.__name__} of {_shown(file, line)}"] if _is_own(file) else []


def _shown(filename: str, line: int) -> str:
    path, here = Path(filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"

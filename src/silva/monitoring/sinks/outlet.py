"""A sink: where the numbers of a run go besides its own folder; and what keeps it from stopping the run.

    Monitor ──calls──> Outlet ──a bounded queue──> its thread ──> Sink (W&B, MLflow, trackio, ...)

The run never waits for a sink: what does not fit into the queue is left out. Whatever a sink raises turns it
off for the rest of the run, with one warning. The end of a run waits for `patience` seconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from silva.storage.layout import Layout
from silva.storage.rollouts import RolloutRow

MOST_WAITING = 256  # calls; a step is one or two
Complain = Callable[[str], None]


@dataclass(frozen=True)
class Tracked:
    """A run as trackers know it.

    Args:
        id: the same whenever the run is resumed, and no other run's.
        config: the whole configuration as plain values.
        after: the last step that is not done again; None: the run is new.
    """

    folder: Layout
    name: str
    id: str
    config: Mapping[str, Any]
    after: int | None
    say: Callable[[str], None]


class Sink(Protocol):
    """All calls come from one thread, in order. It may raise and it may be slow."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step, all finite; a step may come twice (its evaluation), or again after a resume."""

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Some rollouts of a step."""

    def message(self, level: str, text: str) -> None:
        """What people are told; alerts are warnings."""

    def close(self, finished: bool) -> None:
        """`finished`: whether the run came to its end."""


class Outlet:
    """One sink in a thread of its own, in which `build` is called too."""

    def __init__(self, title: str, build: Callable[[], Sink], complain: Complain, extra: str = "") -> None:
        """`extra`: the extra of Silva that installs what the sink imports."""
        self.title, self._complain, self._extra = title, complain, extra
        self._calls = deque[Callable[[Sink], None]]()
        self._changed = threading.Condition()
        self._open, self._works, self._finished, self._left_out = True, True, False, 0
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"silva-{title}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Sink], None]) -> None:
        """Have the sink called, soon. Never waits, never raises."""
        with self._changed:
            if not (self._open and self._works):
                return
            full = len(self._calls) >= MOST_WAITING
            self._left_out += full
            if not full:
                self._calls.append(call)
                self._changed.notify()
        if full and self._left_out == 1:
            self._complain(
                f"{self.title} does not keep up: {MOST_WAITING} messages wait for it, and what comes now is "
                "not sent. The run's own files hold everything"
            )

    def end(self, finished: bool) -> None:
        """Nothing more is put; `join` waits for what was."""
        with self._changed:
            self._open, self._finished = False, finished
            self._changed.notify()

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive() and self._works:
            with self._changed:
                self._works, waiting = False, len(self._calls)
            self._complain(
                f"{self.title} did not answer in time: {waiting} messages were not sent. The run's own files "
                "hold everything"
            )

    def _run(self, build: Callable[[], Sink]) -> None:
        try:
            sink = build()
        except ImportError as error:
            how = f": pip install 'silva[{self._extra}]'" if self._extra else ""
            self._off(f"{self.title} is not installed ({error}){how}")
            return
        except BaseException as error:
            self._off(f"{self.title} could not be opened: {_words(error)}")
            return
        try:
            while call := self._next():
                call(sink)
            sink.close(self._finished)
        except BaseException as error:  # also SystemExit: somebody else's code ends its own thread only
            self._off(f"{self.title} is off from here on: {_words(error)}")

    def _next(self) -> Callable[[Sink], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or not self._open)
            return self._calls.popleft() if self._calls and self._works else None

    def _off(self, text: str) -> None:
        with self._changed:
            was, self._works = self._works, False
            self._calls.clear()
        if was:
            self._complain(f"{text}. The run goes on, and its own files hold everything")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

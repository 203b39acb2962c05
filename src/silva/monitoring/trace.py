"""Where the time of a run goes: when each part has something to do.

    Phases         phase(name) ────┐          ┌──> trace.json, if it is asked for: spans and counters
    TracedTrainer  call(part, ..) ─┼─> Trace ─┤
    TracedEngine   request() ──────┤          └──> idle(): the share of a step in which a part had
    episodes       turn(..) ───────┘               nothing to do, evaluations left out

Seen from the loop's process: a part is busy from a request to its answer, so the way there and back counts
as work. What a part does in that time is not here.

`trace.json` has the array form of Chrome's trace event format, which https://ui.perfetto.dev opens. Every
event is one write, so a killed run leaves whole events and an array without its closing bracket, which the
format allows. A run that goes on adds to the file it left; the gap stays visible.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from silva.ports import CLOCK

Part = Literal["trainer", "engine"]
PARTS: tuple[Part, ...] = ("trainer", "engine")
TRACKS = {"loop": 1, "trainer": 2, "engine": 3}
LEFT_OUT = "eval"  # the phase in which the trainer has nothing to do on purpose


class Trace:
    """Use it as a context manager; all of its methods belong to the thread of the event loop.

    Args:
        path: of the file; None: no file.
        complain: told if the file cannot be written. It is given up then, and the run goes on.
    """

    def __init__(self, path: Path | None, complain: Callable[[str], None] = lambda text: None) -> None:
        self._file = TraceFile(path, complain) if path else None
        self._running: Counter[str] = Counter()  # calls by part, and evaluations
        self._busy, self._elapsed = dict.fromkeys(PARTS, 0.0), 0.0  # seconds, since `idle` was asked
        self._seen = CLOCK.monotonic()
        self._requests = 0
        self._waiting: dict[str, str] = {}  # by episode
        self._episodes: Counter[str] = Counter()  # by whom they wait for

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The loop is in this phase."""
        return self._span(name, "loop", name)

    def call(self, part: Part, name: str) -> AbstractContextManager[None]:
        """The part answers a call, which is shown as a span."""
        return self._span(part, part, name)

    @contextmanager
    def _span(self, at_work: str, track: str, name: str) -> Iterator[None]:
        with self._at_work(at_work):
            began = CLOCK.monotonic()
            try:
                yield
            finally:
                if self._file:
                    self._file.span(track, name, began, CLOCK.monotonic())

    @contextmanager
    def request(self) -> Iterator[None]:
        """The engine answers a request, one of many at once, which are shown as a counter."""
        with self._at_work("engine"):
            self._count_requests(+1)
            try:
                yield
            finally:
                self._count_requests(-1)

    def turn(self, episode: str, waiting_for: str | None) -> None:
        """As `on_turn` of a strategy: the episode waits for this now; None: it has ended."""
        if self._file is None:
            return
        if before := self._waiting.pop(episode, None):
            self._episodes[before] -= 1
        if waiting_for is not None:
            self._waiting[episode] = waiting_for
            self._episodes[waiting_for] += 1
        self._file.counter("episodes that wait for", self._episodes)

    def idle(self) -> dict[str, float]:
        """`perf/idle/trainer` and `perf/idle/engine`: shares of the time since they were last asked for."""
        self._pass()
        busy, elapsed = self._busy, self._elapsed
        self._busy, self._elapsed = dict.fromkeys(PARTS, 0.0), 0.0
        return {f"perf/idle/{part}": 1 - busy[part] / elapsed for part in PARTS} if elapsed else {}

    @contextmanager
    def _at_work(self, name: str) -> Iterator[None]:
        self._pass()
        self._running[name] += 1
        try:
            yield
        finally:
            self._pass()
            self._running[name] -= 1

    def _pass(self) -> None:
        """Give the time since something changed last to those that were at work in it."""
        now = CLOCK.monotonic()
        passed, self._seen = now - self._seen, now
        if self._running[LEFT_OUT]:
            return
        self._elapsed += passed
        for part in PARTS:
            if self._running[part]:
                self._busy[part] += passed

    def _count_requests(self, more: int) -> None:
        self._requests += more
        if self._file:
            self._file.counter("requests", {"in flight": self._requests})


class TraceFile:
    """Appends events to `path`; times are microseconds since 1970."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._complain = complain
        self._zero = CLOCK.time() - CLOCK.monotonic()
        self._file: FileIO | None = None
        self._begun = False
        try:
            end = _end_of_events(path)
            self._file = path.open("r+b" if end else "wb", buffering=0)
            if end:
                self._file.truncate(end)
                self._file.seek(end)
            self._begun = end > 0
        except OSError as error:
            self._give_up(error)
        self._event("M", name="process_name", args={"name": path.absolute().parent.name})
        for name, track in TRACKS.items():
            self._event("M", tid=track, name="thread_name", args={"name": name})
            self._event("M", tid=track, name="thread_sort_index", args={"sort_index": track})

    def span(self, track: str, name: str, began: float, ended: float) -> None:
        first, last = self._microseconds(began), self._microseconds(ended)
        self._event("X", tid=TRACKS[track], name=name, ts=first, dur=last - first)

    def counter(self, name: str, values: Mapping[str, int]) -> None:
        self._event("C", name=name, ts=self._microseconds(CLOCK.monotonic()), args=values)

    def close(self) -> None:
        """What comes after it is ignored: tasks that are cancelled at the end of a run end later."""
        self._write(b"\n]\n")
        self._drop_file()

    def _event(self, kind: str, **fields: Any) -> None:
        event = json.dumps({"ph": kind, "pid": 1, **fields}).encode()
        self._write((b",\n" if self._begun else b"[\n") + event)
        self._begun = True

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up(error)

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _give_up(self, error: OSError) -> None:
        self._drop_file()
        self._complain(f"the trace ends here, its file cannot be written: {error}")

    def _microseconds(self, monotonic: float) -> int:
        return round((self._zero + monotonic) * 1e6)


def _end_of_events(path: Path) -> int:
    """Bytes of an earlier file up to the end of its last whole event; 0 if there is none."""
    if not path.is_file():
        return 0
    data = path.read_bytes().removesuffix(b"\n]\n")
    before, _, last = data.rpartition(b",\n")
    try:
        json.loads(last)
    except ValueError:  # cut off
        return len(before)
    return len(data)

"""A run's schedule in virtual time: recorded work, played again at another level.

    scripts ──issue──> in flight ──take──> train ──> publish ──> the next step
                │  ^                         │
                v  │ pause of environments   │ slows the engine, and is slowed by it (Rates)
              engine, shared by all requests in flight

Admission is that of orchestrator/work.py: while a step is collected, `level` batches are in flight behind it.
Not here: what the work is, which recorded.py sees, and how rates are found (rates.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice


@dataclass(frozen=True)
class Ask:
    """A request of a piece of work, `pause` seconds after another of its requests has ended.

    `after`: its number; -1: after the piece's beginning. `work`: seconds that it takes alone.
    """

    after: int
    pause: float
    work: float
    tokens: int


@dataclass(frozen=True)
class WorkScript:
    """A piece of work. `closing`: seconds from the end of the last request to its own."""

    asks: Sequence[Ask]
    closing: float


@dataclass(frozen=True)
class Rates:
    """How parts slow each other down.

    Attributes:
        crowd: each of n requests in flight has 1 / (1 + crowd * n) of its own speed.
        engine: share of its speed that the engine keeps while the trainer is at work.
        trainer: share that the trainer keeps while requests are in flight.
    """

    crowd: float
    engine: float = 1.0
    trainer: float = 1.0


@dataclass(frozen=True)
class StepScript:
    """What a step does. `takes`: pieces of work, those of each refill apart; `train`: seconds."""

    takes: Sequence[int]
    train: float


@dataclass(eq=False)
class _Flight:
    left: int  # requests
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # progress at both ends, and tokens
    done: bool = False


class Schedule:
    """One run.

    Args:
        scripts, stages: are repeated as long as it needs more.
        publish, rest: seconds of a step.
    """

    def __init__(
        self, scripts: Sequence[WorkScript], stages: Sequence[StepScript], rates: Rates, *,
        batch: int, level: int, publish: float, rest: float,
    ) -> None:  # fmt: skip
        self._scripts, self._stages, self._rates = cycle(scripts), cycle(stages), rates
        self._batch, self._level, self._publish, self._rest = batch, level, publish, rest
        self._now = self._progress = self._sampling = 0.0  # `progress`: seconds of work that each request got
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: list[tuple[float, int, Callable[[], None]]] = []  # by the progress at which they end
        self._numbers = count()
        self._flights = deque[_Flight]()
        self._versions = [0.0]  # the progress at which each began
        self._training, self._publishing = 0.0, False

    def play(self, steps: int) -> list[dict[str, float]]:
        """The metrics of so many steps, as a run has them."""
        rows, loop = list[dict[str, float]](), self._loop()
        for row in loop:
            if row is None:
                self._advance()
                continue
            rows.append(row)
            if len(rows) == steps:
                break
        return rows

    def _loop(self) -> Iterator[dict[str, float] | None]:
        """Each step; None: it waits."""
        for stage in self._stages:
            began, sampling = self._now, self._sampling
            taken = list[_Flight]()
            for pieces in stage.takes:
                for script in islice(self._scripts, pieces + self._level * self._batch - len(self._flights)):
                    self._flights.append(self._begun(script))
                taken += (waited := [self._flights.popleft() for _ in range(pieces)])
                while not all(flight.done for flight in waited):
                    yield None
            rollout = self._now - began
            self._training = stage.train
            while self._training:
                yield None
            train = self._now - began - rollout
            self._publishing = True
            yield from self._pause(self._publish)
            self._publishing = False
            ages = self._ages(taken)
            self._versions.append(self._progress)
            yield from self._pause(self._rest)
            passed = self._now - began
            yield {
                "perf/seconds/rollout": rollout,
                "perf/seconds/train": train,
                "perf/seconds/publish": self._publish,
                "perf/idle/trainer": max(0.0, 1 - (train + self._publish) / passed),  # rounding
                "perf/idle/engine": max(0.0, 1 - (self._sampling - sampling) / passed),
                **{f"train/share/age{age}": share for age, share in ages.items()},
            }

    def _pause(self, seconds: float) -> Iterator[None]:
        waits = [True]
        self._at(seconds, waits.clear)
        while waits:
            yield None

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._numbers), call))

    def _advance(self) -> None:
        """To the next thing that happens."""
        rates, asked, at_work = self._rates, len(self._asked), self._training > 0 or self._publishing
        speed = (rates.engine if at_work else 1.0) / (1 + rates.crowd * asked)
        pace = rates.trainer if asked else 1.0
        ahead = [self._timers[0][0] - self._now] if self._timers else []
        ahead += [(self._asked[0][0] - self._progress) / speed] if asked else []
        ahead += [self._training / pace] if self._training else []
        passed = max(0.0, min(ahead))
        self._now += passed
        self._sampling += passed if asked or self._publishing else 0.0
        self._progress += passed * speed if asked else 0.0
        if self._training:
            left = self._training - passed * pace
            self._training = left if left > 1e-9 else 0.0
        while self._timers and self._timers[0][0] <= self._now + 1e-9:
            heapq.heappop(self._timers)[2]()
        while self._asked and self._asked[0][0] <= self._progress + 1e-9:
            heapq.heappop(self._asked)[2]()

    def _begun(self, script: WorkScript) -> _Flight:
        flight, followers = _Flight(len(script.asks)), defaultdict[int, list[int]](list)
        for number, ask in enumerate(script.asks):
            followers[ask.after].append(number)

        def closed() -> None:
            flight.done = True

        def follow(number: int) -> None:
            for later in followers[number]:
                self._at(script.asks[later].pause, partial(asked, later))

        def asked(number: int) -> None:
            ask, began = script.asks[number], self._progress

            def answered() -> None:
                flight.spans.append((began, self._progress, ask.tokens))
                flight.left -= 1
                follow(number)
                if not flight.left:
                    self._at(script.closing, closed)

            heapq.heappush(self._asked, (began + ask.work, next(self._numbers), answered))

        follow(-1)
        if not script.asks:
            self._at(script.closing, closed)
        return flight

    def _ages(self, taken: Sequence[_Flight]) -> dict[int, float]:
        """Shares of the tokens by how many versions they are older than the newest one."""
        newest, found = len(self._versions) - 1, dict[int, float]()
        for began, ended, tokens in (span for flight in taken for span in flight.spans):
            for age in range(min(self._level, newest) + 1):
                first = self._versions[newest - age] if age < newest else 0.0
                last = self._versions[newest - age + 1] if age else float("inf")
                inside = max(0.0, min(ended, last) - max(began, first))
                found[age] = found.get(age, 0.0) + tokens * inside / max(ended - began, 1e-12)
        total = sum(found.values())
        return {age: tokens / total for age, tokens in found.items()} if total else {}

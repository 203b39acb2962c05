"""A run's schedule in virtual time: recorded work, played again at another level.

    works ──issue──> in flight ──take──> train ──> publish ──> the next step
               │  ^                         │
               v  │ pause of environments   │ slows the engine, and is slowed by it (Rates)
             engine, shared by all requests in flight

Engine and trainer have clocks of their own, which lose time while one slows the other down. Admission is that
of orchestrator/work.py: while a step is collected, `level` batches are in flight behind it. Not here: what
the work is, which recorded.py sees, and how rates are found (rates.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice

from silva.commands.foretelling.rates import Rates
from silva.commands.foretelling.recorded import TimedRequest, TimedWork

TIME, ENGINE, TRAINER = "time", "engine", "trainer"
ROUNDING = 1e-9
Process = Iterator[tuple[str, float]]  # waits for so many seconds of a clock


@dataclass(eq=False)
class _Flight:
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # by the engine's clock, and tokens
    done: bool = False


class Schedule:
    """One run.

    Args:
        works: have ended; they are repeated as long as the run needs more, and so are updates.
        refills: pieces of work that each step needs besides its batch.
        publish, rest: seconds of a step.
    """

    def __init__(
        self, works: Sequence[TimedWork], rates: Rates, refills: Sequence[int], *,
        batch: int, level: int, publish: float, rest: float,
    ) -> None:  # fmt: skip
        self._works, self._updates, self._refills = cycle(works), cycle(rates.updates), cycle(refills)
        self._rates, self._batch, self._behind = rates, batch, level * batch
        self._publish, self._rest = publish, rest
        self._now = {TIME: 0.0, ENGINE: 0.0, TRAINER: 0.0}
        self._waiting: dict[str, list[tuple[float, int, Process]]] = {clock: [] for clock in self._now}
        self._numbers = count()
        self._flights = deque[_Flight]()
        self._published = list[float]()  # when, by the engine's clock
        self._idle, self._trains = 0.0, False

    def step(self) -> dict[str, float]:
        """The next step in the numbers of `config.sections.Foretold`."""
        began, idle, taken = self._now[TIME], self._idle, list[_Flight]()
        for pieces in (self._batch, next(self._refills)):
            missing = max(0, pieces + self._behind - len(self._flights))
            self._flights += map(self._begun, islice(self._works, missing))
            taken += [self._flights.popleft() for _ in range(pieces)]
            while not all(flight.done for flight in taken):
                self._advance()
        sampling = self._now[TIME] - began
        self._trains = True
        self._pass(TRAINER, next(self._updates))
        seconds, before = self._now[TIME] - began + self._publish, self._idle
        self._pass(TIME, self._publish)
        self._trains, self._idle = False, before  # the engine loads
        age = self._age(taken)
        self._published.append(self._now[ENGINE])
        self._pass(TIME, self._rest)
        passed = self._now[TIME] - began
        return {
            "seconds": seconds,
            "sampling": sampling,
            "training": seconds - sampling - self._publish,
            "publishing": self._publish,
            "engine_idle": (self._idle - idle) / passed,
            "trainer_idle": (sampling + self._rest) / passed,
            "age": age,
        }

    def _begun(self, work: TimedWork) -> _Flight:
        flight, followers = _Flight(), defaultdict[TimedRequest | None, list[TimedRequest]](list)
        for request in work.requests:
            followers[request.after].append(request)

        def played(request: TimedRequest | None) -> Process:
            """A request, and then those that wait for it; None: the beginning."""
            if request:
                yield TIME, request.began - (request.after.ended if request.after else work.began)
                began = self._now[ENGINE]
                yield ENGINE, self._rates.requests[request]
                flight.spans.append((began, self._now[ENGINE], request.tokens))
            for later in followers[request]:
                self._go_on(played(later))
            if len(flight.spans) == len(work.requests):
                yield TIME, work.closing
                flight.done = True

        self._go_on(played(None))
        return flight

    def _go_on(self, process: Process) -> None:
        for clock, seconds in islice(process, 1):
            heapq.heappush(self._waiting[clock], (self._now[clock] + seconds, next(self._numbers), process))

    def _pass(self, clock: str, seconds: float) -> None:
        end = self._now[clock] + seconds
        self._go_on(iter([(clock, seconds)]))
        while self._now[clock] < end - ROUNDING:
            self._advance()

    def _advance(self) -> None:
        """To the next thing that happens."""
        now, asked = self._now, len(self._waiting[ENGINE])
        engine = (self._rates.engine if self._trains else 1.0) / (1 + self._rates.crowd * asked)
        speeds = {TIME: 1.0, ENGINE: engine, TRAINER: self._rates.trainer if asked else 1.0}
        passed = min(
            (queue[0][0] - now[clock]) / speeds[clock] for clock, queue in self._waiting.items() if queue
        )
        self._idle += 0.0 if asked else passed
        for clock, speed in speeds.items():
            now[clock] += passed * speed
        for clock, queue in self._waiting.items():
            while queue and queue[0][0] <= now[clock] + ROUNDING:
                self._go_on(heapq.heappop(queue)[2])

    def _age(self, taken: Sequence[_Flight]) -> float:
        """How many versions have been published since a token was sampled, the mean."""
        spans = [span for flight in taken for span in flight.spans]
        published = sum(
            tokens * min(1.0, max(0.0, (when - began) / max(ended - began, ROUNDING)))
            for began, ended, tokens in spans
            for when in self._published
        )
        return published / max(1, sum(tokens for _, _, tokens in spans))

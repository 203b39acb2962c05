"""What a probe sees of a run: its steps, its work, and when each request to the engine began and ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine
from silva.ports import CLOCK
from silva.protocols import Engine, Rollout, Work
from silva.types import Completion, Group, SamplingParams


@dataclass(frozen=True, eq=False)
class TimedRequest:
    """`after`: the request of its session that ended last before it began. `tokens`: 0 if it failed."""

    after: TimedRequest | None
    began: float
    ended: float
    tokens: int


@dataclass(eq=False)
class TimedWork:
    """The episodes of a task. `ended`: None while they are played."""

    began: float
    ended: float | None = None
    requests: list[TimedRequest] = field(default_factory=list)

    @property
    def closing(self) -> float:
        """Seconds after its last request; only where it has ended."""
        assert self.ended is not None
        return max(0.0, self.ended - max((each.ended for each in self.requests), default=self.began))


@dataclass(frozen=True)
class TimedStep:
    """Its phases in seconds, in the order in which they pass. `rows`: tokens in them. `issued`: works."""

    level: int
    began: float
    rollout: float
    train: float
    publish: float
    ended: float
    rows: int
    issued: int

    @property
    def rest(self) -> float:
        """Seconds after the last phase."""
        return max(0.0, self.ended - self.began - self.rollout - self.train - self.publish)


class RecordedEngine(TracedEngine):
    """Implements `protocols.Engine` over another one, and notes the requests of `works`, by their ids."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, Trace(None))
        self.works = dict[str, TimedWork]()
        self._last = dict[str, TimedRequest]()  # of each session

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        after, began, count = self._last.get(session), CLOCK.monotonic(), 0
        try:
            found = await super().sample(tokens, params, session=session)
            count = len(found.tokens)
            return found
        finally:
            if work := self.works.get(session.partition("/")[0]):  # none of an evaluation
                request = TimedRequest(after, began, CLOCK.monotonic(), count)
                self._last[session] = request
                work.requests.append(request)


class RecordedRollout:
    """Implements `protocols.Rollout` over another one, and notes pieces of work in `works`."""

    def __init__(self, inner: Rollout, works: dict[str, TimedWork]) -> None:
        self._inner, self._works = inner, works

    async def run(self, work: Work) -> AsyncIterator[Group]:
        self._works[work.id] = timed = TimedWork(CLOCK.monotonic())
        async for group in self._inner.run(work):
            yield group
        timed.ended = CLOCK.monotonic()

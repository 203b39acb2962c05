"""What a probe sees of a run: its steps, and when each request to the engine began and ended."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine
from silva.ports import CLOCK
from silva.protocols import Engine, Rollout, Work
from silva.types import Completion, Group, SamplingParams


@dataclass(eq=False)
class TimedRequest:
    """`session`: the id of an episode, which begins with that of its work. `ended`: NaN while it is in
    flight. `failed`: it raised or was cancelled."""

    session: str
    began: float
    ended: float = math.nan
    tokens: int = 0
    failed: bool = False


@dataclass(eq=False)
class TimedWork:
    """The episodes of a task."""

    id: str
    began: float
    ended: float = math.nan


@dataclass(frozen=True)
class TimedStep:
    """Its seconds, in the order in which they pass; `rest` is what follows the last phase."""

    level: int
    began: float
    rollout: float
    train: float
    publish: float
    rest: float
    row_tokens: int
    issued: int  # pieces of work

    @property
    def training(self) -> tuple[float, float]:
        """When the trainer was at work: begin and end."""
        begin = self.began + self.rollout
        return begin, begin + self.train + self.publish


class RecordedEngine(TracedEngine):
    """Implements `protocols.Engine` over another one, and notes requests."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, Trace(None))
        self.requests = list[TimedRequest]()

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        self.requests.append(request := TimedRequest(session, CLOCK.monotonic()))
        try:
            found = await super().sample(tokens, params, session=session)
            request.tokens = len(found.tokens)
            return found
        except BaseException:
            request.failed = True
            raise
        finally:
            request.ended = CLOCK.monotonic()


class RecordedRollout:
    """Implements `protocols.Rollout` over another one, and notes pieces of work."""

    def __init__(self, inner: Rollout) -> None:
        self._inner, self.works = inner, list[TimedWork]()

    async def run(self, work: Work) -> AsyncIterator[Group]:
        self.works.append(timed := TimedWork(work.id, CLOCK.monotonic()))
        async for group in self._inner.run(work):
            yield group
        timed.ended = CLOCK.monotonic()

"""What a probe sees of a run: its steps, and when each request to the engine began and ended."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine
from silva.ports import CLOCK
from silva.protocols import Engine, Rollout, Work
from silva.types import Completion, Group, SamplingParams


@dataclass(eq=False)
class TimedRequest:
    """`ended`: NaN if it never did."""

    session: str
    began: float
    ended: float = math.nan
    tokens: int = 0


@dataclass(eq=False)
class TimedPiece:
    """One piece of work: the episodes of a task."""

    began: float
    ended: float = math.nan
    requests: list[TimedRequest] = field(default_factory=list)


@dataclass(frozen=True)
class TimedStep:
    """Its times in seconds, in the order in which they pass; `rest` is what follows the last phase."""

    level: int
    began: float
    rollout: float
    train: float
    publish: float
    rest: float
    row_tokens: int
    pieces: int  # issued in it

    @property
    def training(self) -> tuple[float, float]:
        """When trainer and loop were at work: begin and end."""
        begin = self.began + self.rollout
        return begin, begin + self.train + self.publish


_piece: ContextVar[TimedPiece | None] = ContextVar("piece", default=None)


class RecordedEngine(TracedEngine):
    """Implements `protocols.Engine` over another one, and notes requests of the piece that asks."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, Trace(None))

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        request = TimedRequest(session, CLOCK.monotonic())
        if piece := _piece.get():
            piece.requests.append(request)
        found = await super().sample(tokens, params, session=session)
        request.ended, request.tokens = CLOCK.monotonic(), len(found.tokens)
        return found


class RecordedRollout:
    """Implements `protocols.Rollout` over another one. `note` gets each piece as it begins."""

    def __init__(self, inner: Rollout, note: Callable[[TimedPiece], None]) -> None:
        self._inner, self._note = inner, note

    async def run(self, work: Work) -> AsyncIterator[Group]:
        piece = TimedPiece(CLOCK.monotonic())
        self._note(piece)
        _piece.set(piece)  # of this piece's task alone
        async for group in self._inner.run(work):
            yield group
        piece.ended = CLOCK.monotonic()

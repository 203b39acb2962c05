"""A trainer and an engine that hand everything on, and tell a trace when they have something to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silva.monitoring.trace import Trace
from silva.protocols import Engine, EngineCapabilities, Trainer, TrainerCapabilities
from silva.types import Completion, SamplingParams, Snapshot, TokenScores
from silva.wire import rpc


class TracedEngine:
    """Implements `protocols.Engine` over another one."""

    def __init__(self, inner: Engine, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        with self._trace.request():
            return await self._inner.sample(tokens, params, session=session)

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        with self._trace.request():
            return await self._inner.score(tokens, start)

    async def load(self, snapshot: Snapshot) -> None:
        with self._trace.call("engine", f"load version {snapshot.version}"):
            await self._inner.load(snapshot)

    async def sleep(self) -> None:
        await self._inner.sleep()

    def memory(self, sequences: int, length: int) -> float:
        return self._inner.memory(sequences, length)

    def counts(self) -> Mapping[str, float]:
        return self._inner.counts()

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._inner.capabilities

    @property
    def machine(self) -> Mapping[str, Any]:
        return self._inner.machine

    @property
    def notes(self) -> Sequence[str]:
        return self._inner.notes


class TracedTrainer(rpc.proxy(Trainer)):  # type: ignore[misc]
    """Implements `protocols.Trainer` over another one; each call is a span."""

    def __init__(self, inner: Trainer, trace: Trace) -> None:
        self._inner, self._trace = inner, trace
        self.capabilities: TrainerCapabilities = inner.capabilities

    @property
    def version(self) -> int:
        return self._inner.version

    async def close(self) -> None:
        await self._inner.close()

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        with self._trace.call("trainer", method):
            return await getattr(self._inner, method)(*arguments)

"""A trainer and an engine that hand everything on, and tell a trace when they have something to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.monitoring.trace import Trace
from silva.protocols import Engine, EngineCapabilities, Trainer, TrainerCapabilities
from silva.types import (
    Completion,
    LossSpec,
    OptimParams,
    Sample,
    SamplingParams,
    Signals,
    Snapshot,
    TokenScores,
)


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

    @property
    def version(self) -> int:
        return self._inner.version

    @version.setter
    def version(self, version: int) -> None:
        self._inner.version = version

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._inner.capabilities

    @capabilities.setter
    def capabilities(self, capabilities: EngineCapabilities) -> None:
        self._inner.capabilities = capabilities

    @property
    def machine(self) -> Mapping[str, Any]:
        return self._inner.machine

    @property
    def notes(self) -> Sequence[str]:
        return self._inner.notes


class TracedTrainer:
    """Implements `protocols.Trainer` over another one."""

    def __init__(self, inner: Trainer, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        with self._trace.call("trainer", "score"):
            return await self._inner.score(samples, needs)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        with self._trace.call("trainer", "forward_backward"):
            return await self._inner.forward_backward(samples, loss)

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        with self._trace.call("trainer", "optim_step"):
            return await self._inner.optim_step(policy, critic)

    async def publish(self) -> Snapshot:
        with self._trace.call("trainer", "publish"):
            return await self._inner.publish()

    async def snapshot(self) -> Snapshot:
        with self._trace.call("trainer", "snapshot"):
            return await self._inner.snapshot()

    async def refresh_reference(self) -> None:
        with self._trace.call("trainer", "refresh_reference"):
            await self._inner.refresh_reference()

    async def restart(self) -> None:
        with self._trace.call("trainer", "restart"):
            await self._inner.restart()

    async def save(self, path: Path) -> None:
        with self._trace.call("trainer", "save"):
            await self._inner.save(path)

    async def load(self, path: Path) -> None:
        with self._trace.call("trainer", "load"):
            await self._inner.load(path)

    async def export(self, path: Path) -> None:
        with self._trace.call("trainer", "export"):
            await self._inner.export(path)

    async def close(self) -> None:
        await self._inner.close()

    @property
    def version(self) -> int:
        return self._inner.version

    @version.setter
    def version(self, version: int) -> None:
        self._inner.version = version

    @property
    def capabilities(self) -> TrainerCapabilities:
        return self._inner.capabilities

    @capabilities.setter
    def capabilities(self, capabilities: TrainerCapabilities) -> None:
        self._inner.capabilities = capabilities

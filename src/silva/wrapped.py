"""A trainer that hands everything on to another one: what changes some of its methods begins here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from silva.protocols import Trainer, TrainerCapabilities
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot


class WrappedTrainer:
    """Implements `protocols.Trainer` over `inner`."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.capabilities: TrainerCapabilities = inner.capabilities

    def around(self, method: str) -> AbstractContextManager[None]:
        """Entered while a method of the inner trainer runs."""
        return nullcontext()

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        with self.around("score"):
            return await self.inner.score(samples, needs)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        with self.around("forward_backward"):
            return await self.inner.forward_backward(samples, loss)

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        with self.around("optim_step"):
            return await self.inner.optim_step(policy, critic)

    async def publish(self) -> Snapshot:
        with self.around("publish"):
            return await self.inner.publish()

    async def snapshot(self) -> Snapshot:
        with self.around("snapshot"):
            return await self.inner.snapshot()

    async def refresh_reference(self) -> None:
        with self.around("refresh_reference"):
            await self.inner.refresh_reference()

    async def restart(self) -> None:
        with self.around("restart"):
            await self.inner.restart()

    async def save(self, path: Path) -> None:
        with self.around("save"):
            await self.inner.save(path)

    async def load(self, path: Path) -> None:
        with self.around("load"):
            await self.inner.load(path)

    async def export(self, path: Path) -> None:
        with self.around("export"):
            await self.inner.export(path)

    async def close(self) -> None:
        await self.inner.close()

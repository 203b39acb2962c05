"""The trainer that lives in this process: a learner on its compute thread, and how its weights travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from silva.protocols import TrainerCapabilities
from silva.trainer.joined import Gradients
from silva.trainer.learner import Learner
from silva.trainer.transfer import SharedWeights, WeightTransfer
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot

P = ParamSpec("P")
T = TypeVar("T")


class LocalTrainer:
    """Implements `protocols.Trainer`; what its methods do is said in learner.py.

    Args:
        learner: does the work, which blocks its thread.
        transfer: how published weights reach the engine.
        compute: where the work runs, while the event loop stays free: the single compute thread shared with
            an engine here. None: inline.

    Attributes:
        gradients: computes what `forward_backward` does, together with others; None: the learner alone.
    """

    def __init__(
        self, learner: Learner, transfer: WeightTransfer | None = None, *, compute: Executor | None = None
    ) -> None:
        self.learner, self._transfer, self._compute = learner, transfer or SharedWeights(), compute
        self._last: Snapshot | None = None
        self.gradients: Gradients | None = None
        self.capabilities = TrainerCapabilities(
            needs=learner.needs, publishes=self._transfer.kind, exact=learner.loaded.exact is not None
        )

    @property
    def version(self) -> int:
        return self.learner.version

    @version.setter
    def version(self, version: int) -> None:
        self.learner.version, self._last = version, None

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        return await self._run(self.learner.score, samples, needs)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        if self.gradients is not None:
            return await self.gradients(samples, loss)
        return await self._run(self.learner.forward_backward, samples, loss)

    async def clipped(self) -> tuple[np.ndarray, ...]:
        return self.learner.clipped

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        return await self._run(self.learner.optim_step, policy, critic)

    async def publish(self) -> Snapshot:
        """Declare the current weights the next policy version, and bring them to where the engine reads."""
        self.learner.version += 1
        self._last = await self._run(self._transfer.publish, self.learner)
        return self._last

    async def snapshot(self) -> Snapshot:
        if self._last is None:
            self._last = await self._run(self._transfer.publish, self.learner)
        return self._last

    async def refresh_reference(self) -> None:
        await self._run(self.learner.refresh_reference)

    async def restart(self) -> None:
        self._last = None  # a warm start changes weights and no version
        await self._run(self.learner.restart)

    async def save(self, path: Path) -> None:
        await self._run(self.learner.save, path)

    async def load(self, path: Path) -> None:
        self._last = None
        await self._run(self.learner.load, path)

    async def export(self, path: Path) -> None:
        await self._run(self.learner.export, path)

    async def close(self) -> None:
        """What it has published is gone."""
        self._transfer.close()

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._compute is None:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._compute.submit(work, *args, **kwargs))

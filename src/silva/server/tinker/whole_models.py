"""Samples from whole models that are folders, with one engine: one folder at a time.

    requests for a, a ──> engine with a
    b               ──> waits until these are answered, then the engine loads b
    a               ──> waits for b, and so on

Requests come in their order, so nobody waits for ever, and an answer has one folder's weights from its first
token to its last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from silva.errors import CheckpointError
from silva.models.snapshots import weight_folder
from silva.protocols import ReadLogits
from silva.types import Completion, SamplingParams, Snapshot, TokenScores

T = TypeVar("T")


class WholeEngine(Protocol):
    """An engine whose weights are replaced by those of a folder."""

    async def load(self, snapshot: Snapshot) -> None: ...
    async def sample(self, tokens: Any, params: SamplingParams) -> Completion: ...
    async def score(
        self, tokens: Any, start: int, *, top: int = 0, read: ReadLogits | None = None
    ) -> TokenScores: ...


class WholeModels:
    """`make`: the engine, over a model of its own; it blocks, and is called for the first folder."""

    def __init__(self, make: Callable[[], WholeEngine]) -> None:
        self._make, self._loads = make, 0
        self._engine: WholeEngine | None = None
        self._name = ""  # of the folder that the engine has
        self._turn, self._idle, self._running = asyncio.Lock(), asyncio.Event(), 0
        self._idle.set()

    async def ask(self, folder: Path, ask: Callable[[WholeEngine], Awaitable[T]]) -> T:
        """What `ask` gets from the engine with the weights of `folder`."""
        async with self._turn:
            if folder.name != self._name:
                await self._idle.wait()
                self._name = ""
                engine = await self._loaded(folder)
                self._name = folder.name
            else:
                assert self._engine is not None
                engine = self._engine
            self._running += 1
            self._idle.clear()
        try:
            return await ask(engine)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _loaded(self, folder: Path) -> WholeEngine:
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._make)
        self._loads += 1
        if not folder.exists():
            raise CheckpointError(f"the weights of this sampling session are gone ({folder.name})")
        weights = await asyncio.to_thread(weight_folder, folder)
        await self._engine.load(Snapshot(self._loads, weights))
        return self._engine

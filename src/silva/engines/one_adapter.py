"""An engine that samples with one adapter of an engine that several share: what one of several runs sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from silva.models.loading import LoadedModel
from silva.models.lora_runs import adapters_in, named
from silva.protocols import Engine, EngineCapabilities, OnTokens, ReadLogits
from silva.types import Completion, SamplingParams, Snapshot, TokenScores


class ManyAdapters(Engine, Protocol):
    """An engine whose requests name an adapter each."""

    @property
    def adapters(self) -> Mapping[str, int]: ...
    async def load_adapter(
        self, name: str, parameters: Mapping[str, Any], *, scale: float, version: int = 0
    ) -> None: ...
    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str = "", adapter: str | None = None
    ) -> Completion: ...
    async def stream(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        adapter: str | None = None,
    ) -> Completion: ...
    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        top: int = 0,
        read: ReadLogits | None = None,
    ) -> TokenScores: ...


class OneAdapter:
    """Implements `protocols.Engine` and `Streaming`. Requests of all runs are one batch of the engine.

    Args:
        name: of the adapter.
        loaded: the run's own model, over the base that the engine samples from; its trainer changes the
            adapters there, and `load` takes them as they are.
    """

    def __init__(self, engine: ManyAdapters, name: str, loaded: LoadedModel) -> None:
        self._engine, self._name, self.version = engine, name, 0
        self._adapters = adapters_in(loaded.model)
        self.capabilities: EngineCapabilities = engine.capabilities

    @property
    def machine(self) -> Mapping[str, Any]:
        return self._engine.machine

    @property
    def notes(self) -> Sequence[str]:
        return self._engine.notes

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        return await self._engine.sample(tokens, params, session=session, adapter=self._name)

    async def stream(self, tokens: Sequence[int], params: SamplingParams, on_tokens: OnTokens) -> Completion:
        return await self._engine.stream(tokens, params, on_tokens, adapter=self._name)

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        return await self._engine.score(tokens, start, adapter=self._name)

    async def load(self, snapshot: Snapshot) -> None:
        """Requests from now on have the run's adapters as they are; those under way keep theirs."""
        (scale,) = {adapter.scale for adapter in self._adapters.values()}
        await self._engine.load_adapter(
            self._name, named(self._adapters), scale=scale, version=snapshot.version
        )
        self.version = snapshot.version

    async def sleep(self) -> None:
        """Others may be sampling."""

    def memory(self, sequences: int, length: int) -> float:
        return self._engine.memory(sequences, length)

    def counts(self) -> Mapping[str, float]:
        """Of all runs together."""
        return self._engine.counts()

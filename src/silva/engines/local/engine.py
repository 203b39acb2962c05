"""In-process engine: samples from the trainer's own parameters with continuous batching (batch.py).

    sample() ──> Batch.waiting ──step, step, ...──> finished ──> futures of sample()

`sample()` runs in the event loop; steps run one at a time on the compute thread, which the trainer shares,
so weights never change under a forward pass.

What a request gets depends on its tokens, parameters, seed and adapter alone, never on what else is running.
Not here: truncating prompts, retries, tokenising messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch

import silva
from silva.engines.local.adapted import AdaptedLinears, StepAdapter
from silva.engines.local.batch import RunningBatch
from silva.engines.local.check import check_steps
from silva.engines.local.decode_graph import DecodeGraphs
from silva.engines.local.drafts import Drafts
from silva.engines.local.kv_cache import KvCache
from silva.engines.local.request import EngineRequest, EngineStats, explained, ids
from silva.engines.local.routed import RoutedDecoder
from silva.errors import ConfigError, EngineError
from silva.models.loading import LoadedModel
from silva.models.machine import describe
from silva.models.memory import give_freed_memory_back
from silva.models.prepacked import JoinedLinear, Layouts
from silva.models.routing import Routing
from silva.models.same_bits import RowRules
from silva.models.snapshots import read_weights, take_weights
from silva.models.steady import SteadyModel, threads_of
from silva.protocols import EngineCapabilities, OnTokens, ReadLogits
from silva.types import Completion, SamplingParams, Snapshot, TokenScores

if TYPE_CHECKING:
    from silva.engines.settings import LocalEngineSettings


PACK_FROM = 1000
"""Tokens that repay packing the weights they are computed with; the last version says how many to expect."""


class LocalEngine:
    """Engine over a `LoadedModel`; all of its torch work runs on `compute` (one thread).

    It samples from the model's own weights, through modules of its own: what makes them fast or gives them
    equal bits changes nothing for others who use the model.

    Args:
        routes: completions say which experts their tokens went to.

    Raises:
        ConfigError: more context than the model has.
        ModelError: the model's steps would not give what transformers does; or it has no routes to record.
    """

    def __init__(
        self, loaded: LoadedModel, settings: LocalEngineSettings, compute: Executor, *, routes: bool = False
    ) -> None:
        if settings.context > loaded.context:
            raise ConfigError(
                f"engine.context: got {settings.context}, expected at most the {loaded.context} of model "
                f"{loaded.name}"
            )
        check_steps(loaded)
        steady = SteadyModel.of(loaded, prepack=settings.prepack_weights)
        loaded = steady.loaded
        self.stats = EngineStats()
        self._loaded, self._settings, self._compute = loaded, settings, compute
        context = settings.context or loaded.context
        self.capabilities = EngineCapabilities(context=context, routes=routes)
        routing = Routing(loaded.model) if routes else None
        self.cache = KvCache(
            loaded.model.config,
            rows=settings.max_concurrent + settings.cached_sequences,
            context=context,
            dtype=loaded.dtype,
            device=loaded.device,
            routed=None if routing is None else (len(routing.layers) * routing.k, routing.stored),
        )
        if steady.rules is not None:
            self.cache.rules = steady.rules
        decoder = steady.decoder if routing is None else RoutedDecoder(steady.decoder, routing)
        self._packed = steady.packed
        self.machine = describe(loaded.device, self.rules)
        self._pack = self._packed is not None  # before the next step
        graphs = loaded.flex and decoder.recordable
        drafts = settings.drafts == "forest" and loaded.device.type == "cpu" and self.rules.hold
        self.batch = RunningBatch(
            loaded,
            settings,
            context=context,
            cache=self.cache,
            decoder=decoder,
            adapted=AdaptedLinears(loaded.model, decoder.linears, loaded.device),
            drafts=Drafts(context, self.rules.linear, self.stats) if drafts else None,
            graphs=DecodeGraphs(decoder, self.cache) if graphs else None,
            stats=self.stats,
            routing=routing,
        )
        self._adapters: dict[str, StepAdapter] = {}  # those used last come last
        self._loading = asyncio.Lock()  # one after the other, in their order
        self._known = 0  # tokens computed before the weights changed last
        self._loop_task: asyncio.Task[None] | None = None

    async def sample(
        self, tokens: Sequence[int], params: SamplingParams, *, session: str = "", adapter: str | None = None
    ) -> Completion:
        """Sample a continuation of `tokens`. Cancelling the call frees its place at the next step.

        Args:
            adapter: the name of one that is loaded; the request keeps the version that it begins with.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            EngineError: the forward pass failed; with it fail all requests of the moment. Or there is no such
                adapter, or its logits are not finite: with that no other request fails.
            OutOfMemory: with what to lower.
        """
        return await self.stream(tokens, params, adapter=adapter)

    async def stream(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        adapter: str | None = None,
    ) -> Completion:
        """As `sample`; `on_tokens` hears of tokens after the step that gave them, in the event loop."""
        self.capabilities.check_prompt(tokens)
        request = EngineRequest(ids(tokens), params, on_tokens=on_tokens, adapter=self._adapter(adapter))
        return cast(Completion, await self._answered(request))

    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        top: int = 0,
        read: ReadLogits | None = None,
    ) -> TokenScores:
        """Log-probabilities (temperature 1) of tokens[start:], start at least 1.

        What the cache knows of them is not computed again.

        Args:
            adapter: as of `sample`.
            top: how many of the likeliest tokens are told for each place.
            read: is called with the logits of all places, some at a time, on the compute thread.

        Raises:
            ContextOverflow: more tokens than the context holds.
            EngineError, OutOfMemory: as in `sample`.
        """
        self.capabilities.check_score(tokens, start)
        found = self._adapter(adapter)
        if start == len(tokens):
            return TokenScores((), (), (), self.version if found is None else found.version)
        request = EngineRequest(
            ids(tokens), SamplingParams(1), score_from=start, top=top, read=read, adapter=found
        )
        return cast(TokenScores, await self._answered(request))

    def _adapter(self, name: str | None) -> StepAdapter | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise EngineError(f"adapter: got {name}, expected one that is loaded: {known}")
        found = self._adapters[name] = self._adapters.pop(name)
        return found

    @property
    def adapters(self) -> Mapping[str, int]:
        """The versions of those that are loaded, by name."""
        return {name: adapter.version for name, adapter in self._adapters.items()}

    async def load_adapter(
        self, name: str, parameters: Mapping[str, torch.Tensor], *, scale: float, version: int = 0
    ) -> None:
        """Copy an adapter: requests of this name have it from now on, and those under way the one before.

        Of more than `max_adapters` the one that was used longest ago is dropped.

        Args:
            parameters: see `AdaptedLinears.laid_out`.
            scale: alpha / rank.

        Raises:
            EngineError: it does not fit the model.
        """

        def load() -> StepAdapter:
            with threads_of(self.rules):
                return self.batch.adapted.laid_out(name, version, parameters, scale)

        made = await asyncio.get_running_loop().run_in_executor(self._compute, load)
        before = self._adapters.pop(name, None)
        self._adapters[name] = made
        dropped = [] if before is None else [before]
        while len(self._adapters) > self._settings.max_adapters:
            dropped.append(self._adapters.pop(next(iter(self._adapters))))
        await self._forget(dropped)

    async def _forget(self, adapters: Sequence[StepAdapter]) -> None:
        def forget() -> None:
            for adapter in adapters:
                self.cache.forget(adapter.number)

        await asyncio.get_running_loop().run_in_executor(self._compute, forget)

    async def _answered(self, request: EngineRequest) -> Completion | TokenScores:
        self.batch.waiting.append(request)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._run())
        try:
            result: Completion | TokenScores = await request.future
            return result
        except asyncio.CancelledError:
            request.cancelled = True
            with suppress(ValueError):  # it runs, or a step is just looking at it
                self.batch.waiting.remove(request)
            raise

    async def load(self, snapshot: Snapshot) -> None:
        """Sample from these weights and drop all keys and values; running requests are computed again.

        Raises:
            ModelError: a folder's weights are not those of its digest, or not of this model. The engine
                keeps what it had.
        """

        def change() -> None:
            take_weights(self._loaded, weights)
            for linear, packed in copies:
                linear.take(packed)
            self.batch.keep_routes()
            self.cache.clear()
            give_freed_memory_back()  # the trainer's: keys and values take memory of their own
            self.batch.version = snapshot.version
            self._pack = self._packing_repays()
            self._known = self._computed

        weights, copies = dict[str, torch.Tensor](), list[tuple[JoinedLinear, torch.Tensor]]()
        run = asyncio.get_running_loop().run_in_executor
        async with self._loading:
            if snapshot.folder is not None:  # in a thread of its own: sampling goes on meanwhile
                weights = await asyncio.to_thread(read_weights, self._loaded, snapshot.folder)
            # Between steps of sampling, as two threads that compute disturb each other (compute.py).
            for linear, laid_out in self._layouts(weights):
                copies.append((linear, await run(self._compute, laid_out)))
            await run(self._compute, change)

    def _layouts(self, weights: Mapping[str, torch.Tensor]) -> Layouts:
        if self._packed is None or not (self._packed.always or self._packing_repays()):
            return []
        return self._packed.layouts(self._loaded.model, weights)

    async def sleep(self) -> None:
        """Give back the memory of keys, values and packed weights; the next request takes it again."""

        def sleep() -> None:
            self.cache.clear()
            self._pack = self._packing_repays()
            if self._packed is not None:
                self._packed.drop()
            if self.batch.graphs is not None:
                self.batch.graphs.forget()

        await asyncio.get_running_loop().run_in_executor(self._compute, sleep)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.batch.version

    @property
    def rules(self) -> RowRules:
        """How steps are filled up for equal bits."""
        return self.cache.rules

    @property
    def _computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.stats.prefill_tokens + self.stats.decode_tokens - self.stats.shared_tokens

    def _packing_repays(self) -> bool:
        return self._pack or self._computed - self._known >= PACK_FROM

    @property
    def notes(self) -> list[str]:
        found = []
        if self._loaded.device.type == "cpu" and (why := self._unequal()):
            found.append(
                f"this run repeats within rounding, not bit for bit: {why}. `silva doctor` says more"
            )
        if self._adapters and self.batch.graphs is not None:
            found.append("steps with adapters are no CUDA graphs: every layer waits for Python to launch it")
        return found

    def _unequal(self) -> str:
        """Why bits depend on the company; nothing where they do not."""
        if silva.TORCH_CAME_FIRST:
            return "torch was imported before silva (import silva first)"
        if self.rules.hold and all(adapter.steady for adapter in self._adapters.values()):
            return ""
        return "here the last bits of a matrix product depend on how many rows it has"

    def memory(self, sequences: int, length: int) -> float:
        """Bytes of the keys and values of so many sequences, or of as many as the engine keeps."""
        cache, size = self.cache, self._loaded.dtype.itemsize
        each = size * (2 * cache.layers * cache.kv_heads * cache.head_dim + cache.width)
        each += sum(routes.shape[-1] * routes.itemsize for routes in cache.outputs[1:])
        return float(each * min(len(cache.rows), sequences) * cache.rules.positions(length))

    def counts(self) -> Mapping[str, float]:
        return dataclasses.asdict(self.stats)

    @property
    def running(self) -> int:
        """Requests that hold a row of the cache."""
        return len(self.batch.running)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.batch.waiting or self.batch.running:
            try:
                finished = await loop.run_in_executor(self._compute, self._step)
            except Exception as error:
                self._fail(error)
                return
            for request in (*self.batch.running, *finished):
                request.tell()
            for request in finished:
                if request.future.done():
                    continue
                if request.failure is not None:
                    request.future.set_exception(request.failure)
                else:
                    request.future.set_result(request.result())

    def _fail(self, error: Exception) -> None:
        """Every request of the moment fails with the forward pass; later ones find an empty engine."""
        for request in self.batch.abandon():
            if not request.future.done():
                wrapped = explained(error, self._settings)
                wrapped.__cause__ = error
                request.future.set_exception(wrapped)

    def _step(self) -> list[EngineRequest]:
        """On the compute thread: the batch's, once the weights are laid out for it."""
        try:
            with threads_of(self.rules):
                if self._pack:
                    self._lay_out()
                return self.batch.step()
        except Exception:
            self.batch.forget()
            raise

    @torch.inference_mode()
    def _lay_out(self) -> None:
        began = time.perf_counter()
        if self._packed is not None:
            self._packed.refresh()
        self._pack = False
        self.stats.seconds += time.perf_counter() - began

"""In-process engine: samples from the trainer's own parameters with continuous batching.

    sample() ──> waiting ──admit──> running ──step──> finished ──> futures of sample()
                            │          one packed forward a step: a token for every decoding
                            │          request, then prompt tokens up to a budget
                            └─ a row of the KV cache, its longest known prefix reused

`sample()` runs in the event loop; steps run one at a time on the compute thread, which the trainer shares,
so weights never change under a forward pass. A request waits for a row, or for the prompt of a sibling
that is just being computed; it is admitted at the next step boundary after either is there.

What a request gets depends on its tokens, parameters and seed alone, never on what else is running.
Not here: truncating prompts, retries, tokenising messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

import silva
from silva.engines.local.check import check_steps
from silva.engines.local.decode_graph import DecodeGraphs
from silva.engines.local.decoder import decoder_of
from silva.engines.local.drafts import Drafts
from silva.engines.local.kv_cache import KvCache
from silva.engines.local.machine import describe
from silva.engines.local.prepacked import PrepackedLinears
from silva.engines.local.ragged_step import RaggedStep, Span
from silva.engines.local.request import EngineStats, Request, future, ids, row_of
from silva.engines.local.same_bits import RowRules, fill_up, probe
from silva.engines.local.sampling import Drawn, draw
from silva.errors import ContextOverflow, EngineError, OutOfMemory, SilvaError
from silva.models.head import logits_of
from silva.models.loading import LoadedModel, copied
from silva.models.memory import give_freed_memory_back, is_out_of_memory
from silva.models.snapshots import load_weights
from silva.ports import uniform
from silva.protocols import EngineCapabilities
from silva.types import Completion, CompletionStop, SamplingParams, Snapshot, TokenScores

if TYPE_CHECKING:
    from silva.engines.settings import LocalEngineSettings


SCORED = 128  # places whose logits are computed at once
PACK_FROM = 1000
"""Tokens that repay packing the weights they are computed with; the last version says how many to expect."""


class LocalEngine:
    """Engine over a `LoadedModel`; all of its torch work runs on `compute` (one thread).

    It samples from the model's own weights, through modules of its own: what makes them fast or gives them
    equal bits changes nothing for others who use the model.

    Raises:
        ModelError: the model's steps would not give what transformers does.
    """

    def __init__(self, loaded: LoadedModel, settings: LocalEngineSettings, compute: Executor):
        loaded = copied(loaded, [*loaded.model.parameters(), *loaded.model.buffers()])
        check_steps(loaded)
        self.version = 0
        self.stats = EngineStats()
        self._loaded, self._settings, self._compute = loaded, settings, compute
        context = min(settings.context or loaded.context, loaded.context)
        self.capabilities = EngineCapabilities(context=context)
        self.cache = KvCache(
            loaded.model.config,
            rows=settings.max_concurrent + settings.cached_sequences,
            context=context,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        if loaded.device.type == "cpu":
            self.cache.rules = probe(loaded.model, head_dim=self.cache.head_dim, dtype=loaded.dtype)
            fill_up(loaded.model, self.cache.rules.alone)
        self._decoder = decoder_of(loaded.model)
        self._packed: PrepackedLinears | None = None
        if settings.prepack_weights:
            with self._threads():
                self._packed = PrepackedLinears(loaded.model, self._decoder.linears, self.rules.linear)
            if self._packed.kernel is not None and not self._packed.kernel.exact:
                self.cache.rules = dataclasses.replace(self.rules, packed=self._packed.kernel.name)
        self.machine = describe(loaded.device, self.rules)
        self._pack = self._packed is not None  # before the next step
        graphs = loaded.device.type == "cuda" and self._decoder.recordable and loaded.dtype != torch.float64
        self._graphs = DecodeGraphs(self._decoder, self.cache) if graphs else None
        drafts = settings.drafts == "forest" and loaded.device.type == "cpu" and self.rules.hold
        self._drafts = Drafts(context, self.rules.linear, self.stats) if drafts else None
        self._known = 0  # tokens computed before the weights changed last
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loop_task: asyncio.Task[None] | None = None

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        """Sample a continuation of `tokens`. Cancelling the call frees its place at the next step.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            EngineError: the forward pass failed; with it fail all requests of the moment.
            OutOfMemory: with what to lower.
        """
        if len(tokens) == 0:
            raise EngineError("sample: got an empty prompt, expected at least one token")
        if len(tokens) >= self.capabilities.context:
            raise ContextOverflow(
                f"prompt of {len(tokens)} tokens leaves no room in a context of {self.capabilities.context}"
            )
        return cast(Completion, await self._answered(Request(ids(tokens), params, future())))

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        """Log-probabilities (temperature 1) of tokens[start:], start at least 1.

        What the cache knows of them is not computed again.

        Raises:
            ContextOverflow: more tokens than the context holds.
            EngineError, OutOfMemory: as in `sample`.
        """
        if not 1 <= start <= len(tokens):
            raise EngineError(f"score: start {start} out of range, expected 1 to {len(tokens)}")
        if len(tokens) > self.capabilities.context:
            raise ContextOverflow(
                f"score: got {len(tokens)} tokens, expected at most {self.capabilities.context}"
            )
        if start == len(tokens):
            return TokenScores((), (), (), self.version)
        request = Request(ids(tokens), SamplingParams(1), future(), score_from=start)
        return cast(TokenScores, await self._answered(request))

    async def _answered(self, request: Request) -> Completion | TokenScores:
        self._waiting.append(request)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._run())
        try:
            result: Completion | TokenScores = await request.future
            return result
        except asyncio.CancelledError:
            request.cancelled = True
            raise

    async def load(self, snapshot: Snapshot) -> None:
        """Sample from these weights and drop all keys and values; running requests are computed again.

        Raises:
            ModelError: a folder's weights are not those of its digest, or not of this model. The engine
                keeps what it had.
        """

        def load() -> None:
            if snapshot.folder is not None:
                load_weights(self._loaded, snapshot.folder)
            self.cache.clear()
            give_freed_memory_back()  # the trainer's: keys and values take memory of their own
            self.version = snapshot.version
            self._pack = self._packing_repays()
            self._known = self._computed

        await asyncio.get_running_loop().run_in_executor(self._compute, load)

    async def sleep(self) -> None:
        """Give back the memory of keys, values and packed weights; the next request takes it again."""

        def sleep() -> None:
            self.cache.clear()
            self._pack = self._packing_repays()
            if self._packed is not None:
                self._packed.drop()
            if self._graphs is not None:
                self._graphs.forget()

        await asyncio.get_running_loop().run_in_executor(self._compute, sleep)

    @property
    def rules(self) -> RowRules:
        """How steps are filled up for equal bits."""
        return self.cache.rules

    @property
    def _computed(self) -> int:
        """Tokens that have gone through the model."""
        return self.stats.prefill_tokens + self.stats.decode_tokens

    def _packing_repays(self) -> bool:
        return self._pack or self._computed - self._known >= PACK_FROM

    @property
    def notes(self) -> list[str]:
        if self._loaded.device.type != "cpu" or (self.rules.hold and not silva.TORCH_CAME_FIRST):
            return []
        why = (
            "torch was imported before silva (import silva first)"
            if silva.TORCH_CAME_FIRST
            else "here the last bits of a matrix product depend on how many rows it has"
        )
        return [f"this run repeats within rounding, not bit for bit: {why}. `silva doctor` says more"]

    def memory(self, sequences: int, length: int) -> float:
        """Bytes of the keys and values of so many sequences, or of as many as the engine keeps."""
        cache, size = self.cache, self._loaded.dtype.itemsize
        each = 2 * cache.layers * cache.kv_heads * cache.head_dim + cache.width
        return float(size * each * min(len(cache.rows), sequences) * cache.rules.positions(length))

    def counts(self) -> Mapping[str, float]:
        return dataclasses.asdict(self.stats)

    @property
    def running(self) -> int:
        """Requests that hold a row of the cache."""
        return len(self._running)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._running:
            try:
                finished = await loop.run_in_executor(self._compute, self._step)
            except Exception as error:
                self._fail(error)
                return
            for request in finished:
                if not request.future.done():
                    request.future.set_result(request.result())

    def _fail(self, error: Exception) -> None:
        """Every request of the moment fails with the forward pass; later ones find an empty engine."""
        requests = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for request in requests:
            if not request.future.done():
                wrapped = self._explained("sampling", error)
                wrapped.__cause__ = error
                request.future.set_exception(wrapped)

    def _explained(self, doing: str, error: Exception) -> SilvaError:
        first = str(error).splitlines()[0] if str(error) else ""
        if is_out_of_memory(error):
            return OutOfMemory(
                f"memory ran out while {doing}: lower engine.max_concurrent "
                f"(now {self._settings.max_concurrent}), engine.cached_sequences "
                f"(now {self._settings.cached_sequences}) or rollout.limits.max_episode_tokens. "
                f"({first or type(error).__name__})"
            )
        return EngineError(f"{doing} failed: {type(error).__name__}: {error}")

    # Everything below runs on the compute thread.

    def _step(self) -> list[Request]:
        """Admit, run one packed forward, sample; returns the requests that are done."""
        try:
            with self._threads():
                return self._advance()
        except Exception:
            for row in self.cache.rows:  # nobody knows what the cache holds now
                row.busy = False
            self.cache.clear()
            raise

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Those that the rules allow."""
        before = torch.get_num_threads()
        if self.rules.one_thread:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if self.rules.one_thread:
                torch.set_num_threads(before)

    @torch.inference_mode()
    def _advance(self) -> list[Request]:
        began = time.perf_counter()
        if self._pack and self._packed is not None:
            self._packed.refresh()
            self._pack = False
        self._drop_cancelled()
        self._admit()
        decode, prefill = self._schedule()
        prompt = sum(span.stop - span.start for _, span in prefill)
        whole = [r for r, span in prefill if span.stop == row_of(r).length and not r.score_from]
        if self._drafts is not None:
            self._drafts.plan([*decode, *whole], prompt)
        if decode or prefill:
            self._forward(decode, prefill)
        ready = [r for r in self._running if row_of(r).computed == row_of(r).length]
        for request in ready:
            if request.score_from:
                self._score(request)
        sampled = [r for r in ready if not r.score_from]
        drafted = sum(len(r.draft) for r in sampled)
        accepted = self._sample(sampled) if sampled else 0
        finished = [r for r in self._running if r.done]
        self._running = [r for r in self._running if not r.done]
        for request in finished:
            self.cache.release(row_of(request))
        seconds = time.perf_counter() - began
        self.stats.steps += 1
        self.stats.seconds += seconds
        self.stats.prefill_tokens += prompt
        self.stats.drafted_tokens += drafted
        self.stats.accepted_tokens += accepted
        if self._drafts is not None:
            self._drafts.learn(
                sampled,
                computed=len(decode) + len(whole),
                drafted=drafted,
                accepted=accepted,
                prompt=prompt,
                seconds=seconds,
            )
        return finished

    def _drop_cancelled(self) -> None:
        for request in self._running:
            if request.cancelled:
                self.cache.release(row_of(request))
        self._running = [r for r in self._running if not r.cancelled]

    def _admit(self) -> None:
        blocked: list[Request] = []
        while self._waiting and len(self._running) < self._settings.max_concurrent:
            request = self._waiting.popleft()
            if not request.cancelled and not self._place(request):
                blocked.append(request)
        self._waiting.extendleft(reversed(blocked))

    def _place(self, request: Request) -> bool:
        if request.blocked is not None:
            sibling, length = request.blocked
            if sibling.busy and sibling.computed < min(length, sibling.length):
                return False
        source, shared = self.cache.longest_prefix(request.prompt)
        if source is not None and shared > source.computed:
            request.blocked = source, shared  # a sibling is computing this prefix right now
            return False
        got = self.cache.acquire(source, shared, request.prompt)
        if got is None:
            return False
        request.row, request.cached = got
        self.stats.cached_tokens += request.cached
        self._running.append(request)
        if self._drafts is not None and not request.score_from:
            self._drafts.begin(request)
        return True

    def _schedule(self) -> tuple[list[Request], list[tuple[Request, Span]]]:
        """Who decodes one token, and which prompts advance by how much, the one with least left first.

        So a short prompt never waits for a long one that came before it.
        """
        left = {r: row_of(r).length - row_of(r).computed for r in self._running}
        decode = [r for r in self._running if r.tokens and left[r] == 1]
        decode.sort(key=lambda r: row_of(r).index)  # as they lie in the cache
        prompts = [r for r in self._running if left[r] and not (r.tokens and left[r] == 1)]
        prefill, budget = [], self._settings.prefill_tokens
        for request in sorted(prompts, key=left.__getitem__):
            row, count = row_of(request), min(left[request], budget)
            if count:
                prefill.append((request, Span(row.index, row.computed, row.computed + count)))
            budget -= count
        return decode, prefill

    def _forward(self, decode: list[Request], prefill: list[tuple[Request, Span]]) -> None:
        """Compute the last token of each that decodes, these spans of prompts, and the drafts of all of them
        into the cache, in one step."""
        given = [(r, Span(row_of(r).index, row_of(r).computed, row_of(r).length)) for r in decode] + prefill
        requests = [r for r, _ in given]
        spans = [Span(span.row, span.start, span.stop + len(r.draft)) for r, span in given]
        if self._graphs is not None and not prefill:
            self._graphs([row_of(r) for r in decode])
        else:
            parts = []
            for request, span in zip(requests, spans, strict=True):
                self.cache.reserve(row_of(request), span.stop)
                parts.append(row_of(request).tokens[span.start : span.stop])
                if request.draft:
                    parts.append(ids(request.draft))
            RaggedStep(self.cache, spans).compute(self._decoder, np.concatenate(parts))
        for request, span in zip(requests, spans, strict=True):
            row_of(request).computed = min(span.stop, row_of(request).length)
        self.stats.decode_tokens += len(decode)

    def _sample(self, ready: list[Request]) -> int:
        """A token for each of these requests, whose tokens are all computed, and one more for each token of
        its draft that was drawn; returns how many of these there are."""
        places = [(r, ahead) for r in ready for ahead in range(len(r.draft) + 1)]
        at = [row_of(r).length - 1 + ahead for r, ahead in places]
        logits = self._logits([row_of(r).index for r, _ in places], at)
        numbers = uniform([r.params.seed for r, _ in places], [len(r.tokens) + ahead for r, ahead in places])
        uniforms = torch.from_numpy(numbers).to(logits.device)
        drawn = draw(logits, [r.params for r, _ in places], uniforms)
        first = accepted = 0
        for request in ready:
            draft, request.draft = request.draft, []
            self._take(request, drawn, first)
            for place, token in enumerate(draft, first):
                if request.done or drawn.tokens[place] != token:
                    break
                row_of(request).computed += 1
                self._take(request, drawn, place + 1)
                accepted += 1
            first += len(draft) + 1
        self.stats.decode_tokens += accepted
        return accepted

    def _take(self, request: Request, drawn: Drawn, place: int) -> None:
        self._check_finite(drawn.raw_logprobs[place : place + 1])
        request.tokens.append(drawn.tokens[place])
        request.logprobs.append(drawn.logprobs[place])
        request.raw_logprobs.append(drawn.raw_logprobs[place])
        request.entropies.append(drawn.entropies[place])
        request.versions.append(self.version)
        request.stop_reason = self._stopped(request)
        if request.stop_reason is None:
            self.cache.append(row_of(request), drawn.tokens[place])

    def _check_finite(self, logprobs: Sequence[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                f"the model's logits are not finite (version {self.version}): its weights hold NaN or "
                f"infinity, or {self._loaded.dtype} is too narrow for it"
            )

    def _stopped(self, request: Request) -> CompletionStop | None:
        params, tokens = request.params, request.tokens
        if tokens[-1] in params.stop_token_ids:
            return "stop_token"
        if params.stop:
            # A token can be less than a character (bytes), so look back far enough for the longest string.
            tail = self._loaded.tokenizer.decode(tokens[-4 * max(map(len, params.stop)) - 4 :])
            if any(s in tail for s in params.stop):
                return "stop_string"
        if len(tokens) >= params.max_tokens:
            return "length"
        if len(request.prompt) + len(tokens) >= self.capabilities.context:
            return "context_overflow"
        return None

    def _score(self, request: Request) -> None:
        """From the hidden states that the cache holds of every token."""
        row, targets = row_of(request), torch.from_numpy(request.prompt[request.score_from :])
        places = range(request.score_from - 1, row.length - 1)
        parts = []
        for cut in range(0, len(places), SCORED):
            part = places[cut : cut + SCORED]
            logprobs = self._logits([row.index] * len(part), part).log_softmax(-1)
            chosen = targets[cut : cut + SCORED].to(logprobs.device)
            best = logprobs.max(-1)
            parts.append((logprobs.gather(1, chosen[:, None])[:, 0], best.indices, best.values))
        found, likeliest, theirs = (torch.cat(part).tolist() for part in zip(*parts, strict=True))
        self._check_finite(found)
        request.scores = TokenScores(tuple(found), tuple(likeliest), tuple(theirs), self.version)

    def _logits(self, rows: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """[N, V] of the token after each place, filled up for equal bits."""
        filled = [0] * (self.rules.linear.padded(len(rows)) - len(rows))
        states = self.cache.outputs[0][[*rows, *filled], 0, [*places, *filled]]
        return logits_of(self._loaded.model, states)[: len(rows)]

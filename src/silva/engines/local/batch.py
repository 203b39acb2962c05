"""Continuous batching: who waits, who runs, and one packed forward pass a step for all that run.

    waiting ──admit──> running ──step──> finished
               │          a token for every decoding request, then prompt tokens up to a budget
               └─ a row of the KV cache, its longest known prefix reused

A request waits for a row, or for the prompt of a sibling that is just being computed; it is admitted at the
next step boundary after either is there. What several have said alike is computed once (following.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from silva.engines.local.adapted import AdaptedLinears, StepAdapter, adapter_spans
from silva.engines.local.decode_graph import DecodeGraphs
from silva.engines.local.drafts import Drafts, StepWork
from silva.engines.local.following import follow, hand_on, look_ahead
from silva.engines.local.kv_cache import NOBODY, KvCache
from silva.engines.local.ragged_step import RaggedStep, Span
from silva.engines.local.request import EngineRequest, EngineStats, ids, is_ready, row_of, source_of
from silva.engines.local.sampling import Drawn, draw
from silva.errors import EngineError
from silva.models.decoder import Decoder
from silva.models.head import log_normaliser, logits_of
from silva.models.loading import LoadedModel
from silva.models.routing import Routing
from silva.ports import uniform
from silva.routes import dtype_of
from silva.types import CompletionStop, TokenScores

if TYPE_CHECKING:
    from silva.engines.settings import LocalEngineSettings

LATE = 8  # characters at the end of a stop string that are looked for first
SCORED = 128  # places whose logits are computed at once


class RunningBatch:
    """The requests of an engine. They come by `waiting` and go by `step`, which runs on the compute thread.

    Args:
        context: of the engine, which may be shorter than the model's.

    Attributes:
        version: of the weights.
        drafts, graphs: None without them.
        adapted: the layers that adapters add to.
        routing: the routers of the model if completions say which experts their tokens went to.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: LocalEngineSettings,
        *,
        context: int,
        cache: KvCache,
        decoder: Decoder,
        adapted: AdaptedLinears,
        drafts: Drafts | None,
        graphs: DecodeGraphs | None,
        stats: EngineStats,
        routing: Routing | None = None,
    ) -> None:
        self.cache, self.decoder, self.drafts, self.graphs, self.stats = cache, decoder, drafts, graphs, stats
        self.adapted, self.routing, self.version = adapted, routing, 0
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self._loaded, self._settings, self._context = loaded, settings, context

    def abandon(self) -> list[EngineRequest]:
        """Give up all requests between two steps, and return them."""
        requests = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        return requests

    def forget(self) -> None:
        """After an error: nobody knows what the cache holds."""
        for row in self.cache.rows:
            row.busy = False
        self.cache.clear()

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Admit, run one packed forward, sample; returns the requests that are done."""
        began = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        self._follow(self.running)
        decode, prefill = self._schedule()
        prompt = sum(span.stop - span.start for _, span in prefill)
        whole = [r for r, span in prefill if span.stop == row_of(r).length and not r.score_from]
        followers = [r for r in self.running if r.source is not None]
        if self.drafts is not None:
            look_ahead(followers)
            self.drafts.plan([*decode, *whole], followers, prompt)
            hand_on(decode, followers)
        work = StepWork(len(decode) + len(whole), sum(len(r.draft) for r in [*decode, *whole]), prompt)
        if decode or prefill:
            self._forward(decode, prefill)
        if whole:  # those who waited for these prompts draw with them
            before = len(self.running)
            self._admit(spared={source_of(r).index for r in followers})
            self._follow(self.running[before:])
        ready = [r for r in self.running if is_ready(r)]
        for request in ready:
            if request.score_from:
                self._score(request)
        sampled = [r for r in ready if not r.score_from]
        self._sample(sampled, work)
        finished = [r for r in self.running if r.done]
        self.running = [r for r in self.running if not r.done]
        self.keep_routes(finished)
        for request in finished:
            self.cache.release(row_of(request), request.source)
            if request.failure is not None:
                row_of(request).adapter = NOBODY
        seconds = time.perf_counter() - began
        self.stats.steps += 1
        self.stats.seconds += seconds
        self.stats.prefill_tokens += prompt
        if self.drafts is not None:
            self.drafts.learn(sampled, work, seconds)
        return finished

    def keep_routes(self, requests: Sequence[EngineRequest] | None = None) -> None:
        """Copy routes of the tokens so far out of the cache, which may forget them. None: of all that run.

        What was kept before stays: after a load the cache computes tokens again that were drawn before it.
        """
        if self.routing is None:
            return
        for request in self.running if requests is None else requests:
            if request.score_from:
                continue
            row = row_of(request)
            known = row if row.computed >= row.length else source_of(request)
            store, shape = self.cache.outputs[1], (-1, len(self.routing.layers), self.routing.k)
            kept = 0 if request.routes is None else len(request.routes)
            new = store[known.index, 0, kept : min(known.computed, row.length)]
            routes = new.cpu().numpy().reshape(shape).astype(dtype_of(self.routing.experts))
            request.routes = routes if request.routes is None else np.concatenate([request.routes, routes])

    def _drop_cancelled(self) -> None:
        for request in self.running:
            if request.cancelled:
                self.cache.release(row_of(request), request.source)
        self.running = [r for r in self.running if not r.cancelled]

    def _admit(self, spared: Collection[int] = ()) -> None:
        """Requests come in as long as there are rows, the spared ones left out."""
        blocked: list[EngineRequest] = []
        while self.waiting and len(self.running) < self._settings.max_concurrent:
            request = self.waiting.popleft()
            if not request.cancelled and not self._place(request, spared):
                blocked.append(request)
        self.waiting.extendleft(reversed(blocked))

    def _place(self, request: EngineRequest, spared: Collection[int]) -> bool:
        if request.blocked is not None:
            sibling, length = request.blocked
            if sibling.busy and sibling.computed < min(length, sibling.length):
                return False
        source, shared = self.cache.longest_prefix(request.prompt, request.number)
        if source is not None and shared > source.computed:
            request.blocked = source, shared  # a sibling is computing this prefix right now
            return False
        got = self.cache.acquire(source, shared, request.prompt, spared, request.number)
        if got is None:
            return False
        request.row, request.cached = got
        self.stats.cached_tokens += request.cached
        self.running.append(request)
        if self.drafts is not None and not request.score_from:
            self.drafts.begin(request)
        return True

    def _follow(self, requests: Sequence[EngineRequest]) -> None:
        follow(self.cache, [r for r in requests if not r.score_from and (r.tokens or is_ready(r))])

    def _schedule(self) -> tuple[list[EngineRequest], list[tuple[EngineRequest, Span]]]:
        """Who decodes one token, and which prompts advance by how much, the one with least left first.

        So a short prompt never waits for a long one that came before it.
        """
        left = {r: row_of(r).length - row_of(r).computed for r in self.running if r.source is None}
        decode = [r for r in left if r.tokens and left[r] == 1]
        decode.sort(key=lambda r: row_of(r).index)  # as they lie in the cache
        prompts = [r for r in left if left[r] and not (r.tokens and left[r] == 1)]
        prefill, budget = [], self._settings.prefill_tokens
        for request in sorted(prompts, key=left.__getitem__):
            row, count = row_of(request), min(left[request], budget)
            if count:
                prefill.append((request, Span(row.index, row.computed, row.computed + count)))
            budget -= count
        return decode, prefill

    def _forward(self, decode: list[EngineRequest], prefill: list[tuple[EngineRequest, Span]]) -> None:
        """Compute the last token of each that decodes, these spans of prompts, and the drafts of all of them
        into the cache, in one step."""
        given = [(r, Span(row_of(r).index, row_of(r).computed, row_of(r).length)) for r in decode] + prefill
        given.sort(key=lambda each: each[0].number)
        requests = [r for r, _ in given]
        spans = [Span(span.row, span.start, span.stop + len(r.draft)) for r, span in given]
        sizes = (span.stop - span.start for span in spans)
        adapted = adapter_spans(zip((r.adapter for r in requests), sizes, strict=True))
        if self.graphs is not None and not prefill and not adapted:
            self.graphs([row_of(r) for r in decode])
        else:
            parts = []
            for request, span in zip(requests, spans, strict=True):
                self.cache.reserve(row_of(request), span.stop)
                parts.append(row_of(request).tokens[span.start : span.stop])
                if request.draft:
                    parts.append(ids(request.draft))
            step = RaggedStep(self.cache, spans, self.adapted.least(adapted))
            with self.adapted.rows(adapted, step.size):
                step.compute(self.decoder, np.concatenate(parts))
        for request, span in zip(requests, spans, strict=True):
            row_of(request).computed = min(span.stop, row_of(request).length)

    def _sample(self, ready: Sequence[EngineRequest], work: StepWork) -> None:
        """A token for each of these requests, and one more for each token of its draft that was drawn."""
        states: dict[Any, list[tuple[EngineRequest, int]]] = {}  # what to draw from, and for whom
        for request in sorted(ready, key=lambda r: r.number):
            row, last, params = source_of(request).index, row_of(request).length - 1, request.params
            law = params.temperature, params.top_k, params.top_p, params.min_p  # probabilities from logits
            for ahead in range(len(request.draft) + 1):
                states.setdefault((row, last + ahead, law), []).append((request, ahead))
        if not states:
            return
        draws = [each for drawing in states.values() for each in drawing]
        adapters = [drawing[0][0].adapter for drawing in states.values()]
        logits = self._logits([row for row, _, _ in states], [place for _, place, _ in states], adapters)
        numbers = uniform([r.params.seed for r, _ in draws], [len(r.tokens) + ahead for r, ahead in draws])
        uniforms = torch.from_numpy(numbers).to(logits.device)
        firsts = [drawing[0][0].params for drawing in states.values()]
        drawn = draw(logits, firsts, uniforms, [len(drawing) for drawing in states.values()])
        work.draws = len(draws)
        places = {each: number for number, each in enumerate(draws)}
        known = {r for r in ready if r.source is not None and not r.source.busy}
        for request in ready:
            begun, drafted = bool(request.tokens), len(request.draft)
            kept = self._take_all(request, drawn, [places[request, n] for n in range(drafted + 1)])
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += kept
            self.stats.decode_tokens += kept + begun
            if request.source is not None:
                self.stats.shared_tokens += kept + begun
            if request in known:
                work.known += kept
            else:
                work.accepted += kept

    def _take_all(self, request: EngineRequest, drawn: Drawn, places: Sequence[int]) -> int:
        """Take what was drawn at these places for as long as the draft says the same; returns how many of
        its tokens that were."""
        draft, request.draft = request.draft, []
        row, source, kept = row_of(request), request.source, 0
        stop = row.length
        self._take(request, drawn, places[0])
        while kept < len(draft) and not request.done and request.tokens[-1] == draft[kept]:
            kept += 1
            self._take(request, drawn, places[kept])
        if source is None:
            row.computed += kept
        elif source.computed < stop + kept:  # it has drawn something else before
            self.cache.copy(source, row, stop + kept)
        return kept

    def _take(self, request: EngineRequest, drawn: Drawn, place: int) -> None:
        self._check_finite(request, drawn.raw_logprobs[place : place + 1])
        if request.failure is not None:
            return
        request.tokens.append(drawn.tokens[place])
        request.logprobs.append(drawn.logprobs[place])
        request.raw_logprobs.append(drawn.raw_logprobs[place])
        request.entropies.append(drawn.entropies[place])
        request.versions.append(self._version(request))
        request.stop_reason = self._stopped(request)
        if request.stop_reason is None:
            self.cache.append(row_of(request), drawn.tokens[place])

    def _version(self, request: EngineRequest) -> int:
        return self.version if request.adapter is None else request.adapter.version

    def _check_finite(self, request: EngineRequest, logprobs: Sequence[float]) -> None:
        """A request for which they are not fails, and no other with it."""
        if all(map(math.isfinite, logprobs)):
            return
        adapter, version = request.adapter, self._version(request)
        whose = "the model's" if adapter is None else f"with the adapter {adapter.name} the model's"
        request.failure = EngineError(
            f"{whose} logits are not finite (version {version}): its weights hold NaN or "
            f"infinity, or {self._loaded.dtype} is too narrow for it"
        )

    def _stopped(self, request: EngineRequest) -> CompletionStop | None:
        params, tokens = request.params, request.tokens
        if tokens[-1] in params.stop_token_ids:
            return "stop_token"
        if params.stop:
            late = self._ending(tokens, params.stop, LATE)  # a long tail is decoded if a string may just end
            if late and self._ending(tokens, late, max(map(len, late))):
                return "stop_string"
        if len(tokens) >= params.max_tokens:
            return "length"
        if len(request.prompt) + len(tokens) >= self._context:
            return "context_overflow"
        return None

    def _ending(self, tokens: Sequence[int], stop: Sequence[str], most: int) -> list[str]:
        """Those strings of which the last `most` characters are among the last ones of the tokens."""
        # A token can be less than a character (bytes), so look back far enough for the longest string.
        length = min(most, max(map(len, stop)))
        tail = self._loaded.tokenizer.decode(tokens[-4 * length - 4 :])
        return [each for each in stop if each[-length:] in tail]

    def _score(self, request: EngineRequest) -> None:
        """From the hidden states that the cache holds of every token."""
        row, targets = row_of(request), torch.from_numpy(request.prompt[request.score_from :])
        places = range(request.score_from - 1, row.length - 1)
        parts: list[Sequence[torch.Tensor]] = []
        for cut in range(0, len(places), SCORED):
            part = places[cut : cut + SCORED]
            adapters = [request.adapter] * len(part)
            logits = self._logits([row.index] * len(part), part, adapters)
            if request.read is not None:
                request.read(logits, request.score_from + cut)
            logprobs = logits - log_normaliser(logits)[0][:, None]
            chosen = targets[cut : cut + SCORED].to(logprobs.device)
            best = logprobs.max(-1)
            first = logprobs.topk(min(request.top, logprobs.shape[1]))
            own = logprobs.gather(1, chosen[:, None])[:, 0]
            parts.append((own, best.indices, best.values, first.indices, first.values))
        found, likeliest, theirs, *top = (torch.cat(part).tolist() for part in zip(*parts, strict=True))
        self._check_finite(request, found)
        if request.failure is None:
            tops = tuple(tuple(zip(*each, strict=True)) for each in zip(*top, strict=True))
            scores = tuple(found), tuple(likeliest), tuple(theirs)
            request.scores = TokenScores(*scores, self._version(request), tops if request.top else ())

    def _logits(
        self, rows: Sequence[int], places: Sequence[int], adapters: Sequence[StepAdapter | None]
    ) -> torch.Tensor:
        """[N, V] of the tokens after places, filled up for equal bits; those of an adapter lie together."""
        adapted = adapter_spans((adapter, 1) for adapter in adapters)
        size = self.cache.rules.linear.padded(max(len(rows), self.adapted.least(adapted)))
        filled = [0] * (size - len(rows))
        states = self.cache.outputs[0][[*rows, *filled], 0, [*places, *filled]]
        with self.adapted.rows(adapted, size):
            return logits_of(self._loaded.model, states)[: len(rows)]

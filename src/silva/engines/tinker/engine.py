"""An engine whose tokens come from the Tinker service: one sampling client for each version of the weights.

    trainer.publish ──> Snapshot.sent, the handle of a sampler ──> load ──> sample, score

Its log-probabilities are those at temperature 1 of the whole vocabulary: those of another distribution are
unknown (NaN), and entropies always are. The service ends an answer by tokens or by strings, not by both: if a
request has both, it gets the tokens, and the answer is cut here at the end of the first string.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from silva.engines.tinker.settings import TinkerEngineSettings
from silva.errors import CapabilityError, ConfigError, EngineError, NoReply, PartLost
from silva.protocols import EngineCapabilities
from silva.types import Completion, CompletionStop, SamplingParams, Snapshot, TokenScores
from silva.wire.requests import Limits, Requests, Usage
from silva.wire.tinker import Gone, faults, service
from silva.wire.transport import Refused

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient

SEEDS = 1 << 31  # of the service's seeds: a 32-bit number


class TinkerEngine:
    """Implements `protocols.Engine`. `connect` comes before everything else.

    Args:
        model: its name at the service.
        decode: tokens to text, to find stop strings.
    """

    def __init__(
        self, settings: TinkerEngineSettings, model: str, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._settings, self._model, self._decode = settings, model, decode
        self._service: ServiceClient | None = None
        self._sampler: SamplingClient | None = None
        self._known: EngineCapabilities | None = None
        self.requests = Requests(Limits(retries=0, max_wait=0.0), settings.prices)
        self.version = 0
        self.machine: Mapping[str, Any] = {"service": settings.url or "tinker", "model": model}
        self.notes: Sequence[str] = ()

    async def connect(self) -> None:
        """Ask the service for the model.

        Raises:
            ConfigError: it does not have it, or the key may not use it.
        """
        if self._known is not None:
            return
        import tinker

        self._service = await asyncio.to_thread(service, self._settings.url, self._settings.key)
        with faults("say which models it has", own=False):
            rest = tinker.RestClient(base_url=self._settings.url or None, api_key=self._settings.key)
            found = await rest.get_server_capabilities()
        models = {each.model_name: each for each in found.supported_models}
        if self._model not in models:
            raise ConfigError(
                f"model.name: got {self._model!r}, expected a model of this service: "
                f"{', '.join(sorted(filter(None, models)))}"
            )
        most = models[self._model].max_context_length or 0
        context = self._settings.context or most
        if not context or (most and context > most):
            raise ConfigError(
                f"engine.context: got {context}, expected 1 to {most or 'what the model has'} for "
                f"{self._model}"
            )
        self._known = EngineCapabilities(context=context, entropies=False, loads=frozenset({"sampler"}))

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._known is None:
            raise EngineError("capabilities: got a question before `connect`, expected it after")
        return self._known

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        """Continue `tokens`.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            CapabilityError: a parameter that the service has not.
            NoReply: the service refused this request, or could not answer it.
            PartLost: the sampler is not there any more.
            ConfigError: there are no weights of that name.
        """
        self.capabilities.check_prompt(tokens)
        asked = self._params(params, self.capabilities.context - len(tokens))
        version, found = self.version, await self._asked(tokens, asked, "sample", params.seed)
        (sequence,) = found.sequences
        given, logprobs = tuple(sequence.tokens), tuple(map(float, sequence.logprobs or ()))
        end = self._first_stop(given, params.stop) if params.stop_token_ids else None
        ids = given[:end]
        unknown = (math.nan,) * len(ids)
        raw = logprobs[: len(ids)] if len(logprobs) == len(given) else unknown
        whole = params.temperature == 1 and params.top_p == 1 and not params.top_k
        reason = _stop(sequence.stop_reason, ids, params) if end is None else "stop_string"
        return Completion(
            ids,
            raw if whole else unknown,
            raw,
            unknown,
            (version,) * len(ids),
            reason,
            found.prompt_cache_hit_tokens,
        )

    async def score(self, tokens: Sequence[int], start: int) -> TokenScores:
        """Raises as `sample`."""
        import tinker

        self.capabilities.check_score(tokens, start)
        version, one = self.version, tinker.SamplingParams(max_tokens=1, temperature=0.0)
        found = await self._asked(
            tokens, one, "score", 0, include_prompt_logprobs=True, topk_prompt_logprobs=1
        )
        logprobs = np.asarray(found.prompt_logprobs_np, float)[start:]
        best = [row[0] for row in (found.topk_prompt_logprobs or ())[start:] if row]
        if len(logprobs) != len(tokens) - start or len(best) != len(logprobs):
            raise NoReply(f"Tinker: got {len(best)} scores of {len(tokens) - start} tokens, expected as many")
        likeliest, theirs = zip(*best, strict=True) if best else ((), ())
        return TokenScores(tuple(map(float, logprobs)), likeliest, tuple(map(float, theirs)), version)

    async def load(self, snapshot: Snapshot) -> None:
        """Sample from the sampler that a trainer has published."""
        import tinker

        if not snapshot.sent:
            raise CapabilityError('load: got no sampler, expected a snapshot of trainer.type = "tinker"')
        key = self._settings.key
        with faults(f"load version {snapshot.version}"):
            self._sampler = await asyncio.to_thread(
                tinker.SamplingClient.from_sampler_handle, snapshot.sent, api_key=key
            )
        self.version = snapshot.version

    async def sleep(self) -> None:
        """The service decides on its memory."""

    def memory(self, sequences: int, length: int) -> float:
        return 0.0

    def counts(self) -> Mapping[str, float]:
        """Of the trainer at the service too."""
        counts, prices = self.requests.counts, self.requests.prices
        cost = {"cost": counts.cost + counts.unknown_cost} if prices.paid else {}
        return {
            "prompt_tokens": float(counts.input),
            "cached_tokens": float(counts.cached),
            "sampled_tokens": float(counts.output),
            **cost,
        }

    def _params(self, params: SamplingParams, room: int) -> Any:
        import tinker

        if params.min_p:
            raise CapabilityError(
                f"rollout.sampling.min_p = {params.min_p}: the service has none; expected 0"
            )
        stop: Sequence[Any] = params.stop_token_ids or params.stop
        return tinker.SamplingParams(
            max_tokens=min(room, params.max_tokens),
            seed=params.seed % SEEDS,
            stop=[*stop] or None,
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )

    def _first_stop(self, ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """How many tokens complete the first string of `stop`; None if they hold none."""

        def complete(count: int) -> bool:
            text = self._decode(ids[:count])
            return any(string in text for string in stop)

        return bisect_left(range(len(ids)), True, key=complete) if complete(len(ids)) else None

    async def _asked(self, tokens: Sequence[int], params: Any, doing: str, seed: int, **more: Any) -> Any:
        import tinker

        prompt = tinker.ModelInput.from_ints([int(token) for token in tokens])

        async def send() -> Any:
            with faults(doing):
                sampler = await self._current()
                return await sampler.sample(prompt, 1, params, **more)

        def used(found: Any) -> Usage:
            sampled = sum(len(sequence.tokens) for sequence in found.sequences)
            return Usage(len(tokens), sampled, found.prompt_cache_hit_tokens)

        try:
            most = Usage(len(tokens), params.max_tokens)
            return await self.requests.call(send, seed=seed, most=most, usage=used)
        except Gone:
            raise
        except (Refused, PartLost) as error:  # the next request may get its answer
            raise NoReply(str(error)) from error

    async def _current(self) -> SamplingClient:
        """The sampler of the version that was loaded last; of what the settings name before."""
        if self._sampler is None:
            assert self._service is not None  # after `connect`
            weights = self._settings.weights or None
            try:
                with faults(f"sample from {weights or self._model}", own=False):
                    self._sampler = await self._service.create_sampling_client(
                        weights, base_model=None if weights else self._model
                    )
            except Refused as error:
                raise ConfigError(f"engine.{'weights' if weights else 'model'}: {error}") from error
        return self._sampler


def _stop(reason: str, tokens: Sequence[int], params: SamplingParams) -> CompletionStop:
    if reason == "length":
        return "length"
    return "stop_token" if tokens and tokens[-1] in params.stop_token_ids else "stop_string"

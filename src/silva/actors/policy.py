"""The policy: answers through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from silva.config.sections import Sampling
from silva.protocols import Engine, Reply, Request, Streaming
from silva.rendering.renderer import Renderer
from silva.rendering.sampling import Sample, sample_reply
from silva.types import Completion, SamplingParams, Segment


@dataclass(frozen=True, slots=True)
class Policy:
    """Samples from an engine."""

    reads_tokens: ClassVar[bool] = True
    engine: Engine
    renderer: Renderer
    sampling: Sampling

    async def reply(self, request: Request) -> Reply:
        prompt, tools, stop = request.tokens, request.tools, (*self.sampling.stop, *request.stop)
        params = self._params((*stop, *self.renderer.stop_strings(tools)), request.max_tokens, request.seed)
        sample: Sample = partial(self.engine.sample, session=request.session)
        if request.on_tokens is not None and isinstance(self.engine, Streaming):
            sample = partial(self.engine.stream, on_tokens=request.on_tokens)
        sampled = await sample_reply(sample, self.renderer, prompt, params, stop, tools)
        segment = policy_segment(sampled, len(sampled.tokens), self.sampling.temperature)
        message = self.renderer.parse(
            sampled.tokens, prompt=prompt, prefill=request.prefill, stop=stop, tools=tools
        )
        return Reply((segment,), message, sampled.stop_reason, prompt_routes=sampled.prompt_routes)

    async def sample(
        self, tokens: Sequence[int], stop: tuple[str, ...], max_tokens: int, *, seed: int, session: str
    ) -> Completion:
        """What the engine adds to `tokens`, until a turn ends or one of the strings `stop` is complete."""
        return await self.engine.sample(tokens, self._params(stop, max_tokens, seed), session=session)

    def _params(self, stop: tuple[str, ...], max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            stop=stop,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=seed,
        )


def policy_segment(sampled: Completion, count: int, temperature: float) -> Segment:
    """The first `count` tokens that were sampled."""
    return Segment(
        "policy",
        sampled.tokens[:count],
        sampled.logprobs[:count],
        sampled.raw_logprobs[:count],
        sampled.entropies[:count],
        sampled.versions[:count],
        temperature,
        routes=None if sampled.routes is None else sampled.routes[:count].copy(),  # of a longer context
    )

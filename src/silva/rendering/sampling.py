"""Replies that stop at the plain tag of a tool inside a thought, which is no call: they go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from silva.ports import derive
from silva.rendering.renderer import Renderer
from silva.routes import joined
from silva.types import Completion, SamplingParams, ToolSpec

Sample = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]


async def sample_reply(
    sample: Sample,
    renderer: Renderer,
    prompt: Sequence[int],
    params: SamplingParams,
    stop: Sequence[str],
    tools: Sequence[ToolSpec],
) -> Completion:
    """One completion of `prompt`, whatever number of times the engine was asked.

    Args:
        params: their stop strings are `stop` and the renderer's for `tools`.
        stop: strings that end a reply wherever they stand.
    """
    sampled = await sample(prompt, params)
    while sampled.stop_reason == "stop_string" and renderer.thinks_on(prompt, sampled.tokens, stop, tools):
        count = len(sampled.tokens)
        if count >= params.max_tokens:
            return replace(sampled, stop_reason="length")
        seed = derive(params.seed, "thinks on", count)
        rest = replace(params, max_tokens=params.max_tokens - count, seed=seed)
        sampled = _joined(sampled, await sample([*prompt, *sampled.tokens], rest))
    return sampled


def _joined(first: Completion, more: Completion) -> Completion:
    return Completion(
        (*first.tokens, *more.tokens),
        (*first.logprobs, *more.logprobs),
        (*first.raw_logprobs, *more.raw_logprobs),
        (*first.entropies, *more.entropies),
        (*first.versions, *more.versions),
        more.stop_reason,
        first.cached_tokens,
        joined([(len(first.tokens), first.routes), (len(more.tokens), more.routes)]),
        first.prompt_routes,
    )

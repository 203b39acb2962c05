"""Replies as a chat API gives them: sampled to their end, and as the message that its clients read.

A reply that stops at the plain tag of a tool inside a thought, which is no call, goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from silva.ports import derive
from silva.rendering.renderer import Renderer
from silva.routes import joined
from silva.thoughts import split_reasoning
from silva.types import Completion, Message, SamplingParams, ToolSpec

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


def said_reply(
    renderer: Renderer,
    sampled: Completion,
    prompt: Sequence[int],
    stop: Sequence[str],
    tools: Sequence[ToolSpec],
) -> Message:
    """What a client reads: without the string of `stop` that stopped it. Malformed calls are text, and so are
    calls where no tools are on offer."""
    said = renderer.parse(renderer.words(sampled.tokens), prompt=prompt, stop=stop, tools=tools)
    if said.errors or not tools:
        reasoning, text = split_reasoning(said.raw or "", opened=renderer.opens_thought(prompt))
        said = replace(said, reasoning=reasoning, content=text, tool_calls=())
    if sampled.stop_reason != "stop_string":
        return said
    reasoning = None if said.reasoning is None else _without_stop(said.reasoning, stop)
    return replace(said, content=_without_stop(said.content, stop), reasoning=reasoning)


def _without_stop(text: str, stop: Sequence[str]) -> str:
    """OpenAI's API leaves out the string that stopped the reply; the renderer keeps it."""
    ends = [each for each in stop if text.endswith(each)]
    return text.removesuffix(max(ends, key=len)) if ends else text


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

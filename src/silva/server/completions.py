"""`/v1/completions` in the form of OpenAI and vLLM, token ids in and out.

With `return_token_ids` each choice also has "silva", which holds what OpenAI's form has no place for: a
client can rebuild the `Completion` exactly. `echo` scores the prompt, at temperature 1 over the whole
vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive

from silva.ports import CLOCK, derive
from silva.rendering.renderer import Renderer
from silva.server.bodies import CompletionBody, SamplingBody
from silva.server.guard import HttpError
from silva.server.service import Service, apart
from silva.types import Completion, CompletionStop, SamplingParams, TokenScores

COPIED = 1 << 20  # tokens of prompts in one answer
SCORED = 1 << 18  # the same where each has its log-probabilities and texts
FINISH: Mapping[CompletionStop, str] = {
    "stop_token": "stop", "stop_string": "stop", "length": "length", "context_overflow": "length"
}  # fmt: skip


async def complete(service: Service, body: CompletionBody, receive: Receive, size: int) -> dict[str, Any]:
    """The answer to a request of `size` bytes.

    Raises:
        HttpError: what is wrong with the request; or the client went away.
        ContextOverflow: a prompt leaves no room.
        SilvaError: of the engine.
    """
    if body.best_of not in (None, body.n):
        raise HttpError(400, f"best_of: got {body.best_of}, expected n ({body.n}) or to leave it out")
    if body.max_tokens == 0 and not body.echo:
        raise HttpError(400, "max_tokens: got 0, expected 1 or more (0 only with echo)")
    texts = size if isinstance(body.prompt[0], str) else 0
    prompts = await apart(8 * texts, lambda: [service.tokens_of(prompt) for prompt in body.prompt])
    tokens = body.n * sum(map(len, prompts))
    service.check_size(body.n * len(prompts), tokens)
    _check_copies(body, tokens)
    scores: list[TokenScores | None] = [None] * len(prompts)
    if body.echo and body.logprobs is not None:
        scores = [*await service.score(receive, prompts, 1)]
    found = [_nothing()] * (len(prompts) * body.n)
    if body.max_tokens:
        repeated = [prompt for prompt in prompts for _ in range(body.n)]
        found = await service.sample(receive, repeated, _params(service.renderer, body, len(prompts)))
    work = sum(len(each.tokens) for each in found) + tokens
    return await apart(8 * work, _answer, service.renderer, body, prompts, scores, found)


def _check_copies(body: CompletionBody, tokens: int) -> None:
    """Every choice repeats its prompt: refuse an answer that would take too much memory."""
    scored = body.echo and body.logprobs is not None
    most = SCORED if scored else COPIED
    if (body.echo or body.return_token_ids) and tokens > most:
        raise HttpError(
            400, f"{'echo' if body.echo else 'return_token_ids'}: n times the tokens of the prompts are "
            f"{tokens}, expected at most {most}"
        )  # fmt: skip


def _params(renderer: Renderer, body: CompletionBody, prompts: int) -> list[SamplingParams]:
    """Of all completions, prompt by prompt."""
    ends = end_tokens(renderer, body)
    return [
        body.params(body.max_tokens, stop=body.stop, ends=ends, seed=seed)
        for _ in range(prompts)
        for seed in seeds(body)
    ]


def seeds(body: SamplingBody) -> list[int]:
    """Of the n completions of a prompt; new ones each time if the request has none."""
    first = secrets.randbits(63) if body.seed is None else body.seed
    return [first if i == 0 else derive(first, "sample", i) for i in range(body.n)]


def end_tokens(renderer: Renderer, body: SamplingBody) -> Sequence[int]:
    """Exactly those of the request if it names any (or none, as []), else those that end a turn."""
    if body.stop_token_ids is not None:
        return body.stop_token_ids
    return () if body.ignore_eos else renderer.stop_token_ids


def _answer(
    renderer: Renderer,
    body: CompletionBody,
    prompts: Sequence[Sequence[int]],
    scores: Sequence[TokenScores | None],
    found: Sequence[Completion],
) -> dict[str, Any]:
    choices = []
    for number, completion in enumerate(found):
        place = number // body.n
        given, prompt, score = body.prompt[place], prompts[place], scores[place]
        text, reason = said(renderer, body, completion)
        if body.echo:
            text = (given if isinstance(given, str) else renderer.decode(prompt)) + text
        logprobs = None
        if body.logprobs is not None:
            logprobs = _logprobs(renderer, body, prompt, score, completion)
        choice = {"index": number, "text": text, "finish_reason": FINISH[completion.stop_reason],
                  "stop_reason": reason, "logprobs": logprobs}  # fmt: skip
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(prompt), **exact(completion)}
        choices.append(choice)
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(CLOCK.time()),
        "choices": choices,
        "usage": usage(prompts, found, body.n),
    }


def said(renderer: Renderer, body: SamplingBody, completion: Completion) -> tuple[str, str | int | None]:
    """The text of a completion, without what stopped it, and what that was (None: the end of a turn)."""
    tokens = completion.tokens
    if completion.stop_reason == "stop_token":
        named = tokens[-1] in (body.stop_token_ids or ())
        return renderer.decode(tokens[:-1]), tokens[-1] if named else None
    text = renderer.decode(tokens)
    if completion.stop_reason != "stop_string":
        return text, None
    # Of several, the one that was complete first: there sampling stopped.
    places = [(text.index(stop) + len(stop), stop) for stop in body.stop if stop in text]
    if not places:
        return text, None
    end, stop = min(places)
    return text[: end - len(stop)], stop


def exact(completion: Completion) -> dict[str, Any]:
    """All that a client needs to rebuild the completion, beside its log-probabilities."""
    return {
        "token_ids": list(completion.tokens),
        "silva": {
            "raw_logprobs": list(completion.raw_logprobs),
            "entropies": list(completion.entropies),
            "versions": list(completion.versions),
            "stop_reason": completion.stop_reason,
            "cached_tokens": completion.cached_tokens,
        },
    }


def usage(prompts: Sequence[Sequence[int]], found: Sequence[Completion], n: int) -> dict[str, Any]:
    """Each prompt counts once, and its first completion says how much of it was cached."""
    prompt, sampled = sum(map(len, prompts)), sum(len(each.tokens) for each in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in found[::n])},
    }


def _logprobs(
    renderer: Renderer,
    body: CompletionBody,
    prompt: Sequence[int],
    scores: TokenScores | None,
    completion: Completion,
) -> dict[str, Any]:
    """One entry a token, with `echo` also for the prompt, whose first token has no log-probability."""
    tokens = [renderer.decode([token]) for token in completion.tokens]
    logprobs: list[float | None] = [*completion.logprobs]
    top: list[dict[str, float] | None] = [{t: x} for t, x in zip(tokens, completion.logprobs, strict=True)]
    if body.echo and scores is not None:
        given = [renderer.decode([token]) for token in prompt]
        likeliest = [renderer.decode([token]) for token in scores.likeliest]
        # The likeliest comes last: tokens of broken UTF-8 share a text, and it must not be lost.
        best = [
            {token: logprob, other: highest}
            for token, logprob, other, highest in zip(
                given[1:], scores.logprobs, likeliest, scores.likeliest_logprobs, strict=True
            )
        ]
        tokens, logprobs, top = [*given, *tokens], [None, *scores.logprobs, *logprobs], [None, *best, *top]
    offsets, place = [], 0
    for token in tokens:
        offsets.append(place)
        place += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top if body.logprobs else None,
        "text_offset": offsets,
    }


def _nothing() -> Completion:
    return Completion((), (), (), (), (), "length")


def chunks(answer: dict[str, Any], body: SamplingBody) -> list[dict[str, Any]]:
    """The answer as a stream: all of it in one piece, and the usage if it is asked for."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    found = [{**head, "choices": [choice]} for choice in answer["choices"]]
    return [*found, *last_chunk(head, answer, body)]


def last_chunk(head: dict[str, Any], answer: dict[str, Any], body: SamplingBody) -> list[dict[str, Any]]:
    wanted = body.stream_options is not None and body.stream_options.include_usage
    return [{**head, "choices": [], "usage": answer["usage"]}] if wanted else []

"""`/v1/completions` in the form of OpenAI and vLLM, token ids in and out.

With `return_token_ids` each choice also has "silva", which holds what OpenAI's form has no place for: a
client can rebuild the `Completion` exactly. `echo` scores the prompt, at temperature 1 over the whole
vocabulary.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from silva.ports import CLOCK, derive
from silva.rendering.growing import before
from silva.rendering.renderer import Renderer
from silva.routes import to_text
from silva.server.bodies import CompletionBody, SamplingBody
from silva.server.engine import Service, apart
from silva.server.streams import Choice, Stream, Tell
from silva.types import Completion, CompletionStop, SamplingParams, TokenScores
from silva.wire.guard import HttpError

COPIED = 1 << 20  # tokens of prompts in one answer
SCORED = 1 << 18  # the same where each has its log-probabilities and texts
FINISH: Mapping[CompletionStop, str] = {
    "stop_token": "stop", "stop_string": "stop", "length": "length", "context_overflow": "length"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks of the engine. `scores`: of the prompts, where the answer holds them."""

    body: CompletionBody
    renderer: Renderer
    prompts: Sequence[list[int]]
    scores: Sequence[TokenScores | None]

    @property
    def tokens(self) -> int:
        """Of all prompts of all choices."""
        return self.body.n * sum(map(len, self.prompts))


async def complete(service: Service, body: CompletionBody, receive: Receive, size: int) -> dict[str, Any]:
    """The answer to a request of `size` bytes.

    Raises:
        HttpError: what is wrong with the request; or the client went away.
        ContextOverflow: a prompt leaves no room.
        SilvaError: of the engine.
    """
    asked = await _asked(service, body, receive, size)
    found = await _sample(service, asked, receive)
    work = sum(len(each.tokens) for each in found) + asked.tokens
    choices = await apart(8 * work, lambda: [_choice(asked, *each) for each in enumerate(found)])
    answer = {**head("cmpl", "text_completion"), "choices": choices}
    return {**answer, "usage": usage(asked.prompts, found, body.n)}


async def stream(service: Service, body: CompletionBody, receive: Receive, size: int, tell: Tell) -> None:
    """The same answer in chunks; raises the same errors."""
    asked = await _asked(service, body, receive, size)
    live = _CompletionStream(asked, tell)
    found = await _sample(service, asked, receive, live)
    live.finish(usage(asked.prompts, found, body.n))


async def _asked(service: Service, body: CompletionBody, receive: Receive, size: int) -> _Asked:
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
    return _Asked(body, service.renderer, prompts, scores)


async def _sample(
    service: Service, asked: _Asked, receive: Receive, live: _CompletionStream | None = None
) -> Sequence[Completion]:
    body, prompts = asked.body, asked.prompts
    if body.max_tokens:
        repeated = [prompt for prompt in prompts for _ in range(body.n)]
        return await service.sample(receive, repeated, _params(asked.renderer, body, len(prompts)), live)
    found = [Completion((), (), (), (), (), "length")] * (len(prompts) * body.n)
    if live is not None:
        for each in enumerate(found):
            live.end(*each)
    return found


def head(prefix: str, kind: str) -> dict[str, Any]:
    """What every answer begins with, and every chunk of a stream."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(CLOCK.time())}


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


def _choice(asked: _Asked, number: int, completion: Completion) -> dict[str, Any]:
    body = asked.body
    text, reason = said(asked.renderer, body, completion)
    written = _Logprobs(asked, number)
    choice = {"index": number, "text": _echoed(asked, number) + text,
              "finish_reason": FINISH[completion.stop_reason], "stop_reason": reason,
              "logprobs": written.of(completion.tokens, completion.logprobs)}  # fmt: skip
    if body.return_token_ids:
        choice |= {"prompt_token_ids": asked.prompts[number // body.n], **exact(completion)}
    return choice


def _echoed(asked: _Asked, number: int) -> str:
    """The prompt as the beginning of a choice."""
    place = number // asked.body.n
    given = asked.body.prompt[place]
    if not asked.body.echo:
        return ""
    return given if isinstance(given, str) else asked.renderer.decode(asked.prompts[place])


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
    routes = {"routes": completion.routes, "prompt_routes": completion.prompt_routes}
    return {
        "token_ids": list(completion.tokens),
        "silva": {
            "raw_logprobs": list(completion.raw_logprobs),
            "entropies": list(completion.entropies),
            "versions": list(completion.versions),
            "stop_reason": completion.stop_reason,
            "cached_tokens": completion.cached_tokens,
            **{name: to_text(array) for name, array in routes.items() if array is not None},
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


class _Logprobs:
    """One entry a token of a choice, part by part; with `echo` the first part begins with the prompt."""

    def __init__(self, asked: _Asked, number: int) -> None:
        self._asked, self._place = asked, number // asked.body.n
        self._echo = asked.body.echo
        self._last: list[int] = []
        self._offset = 0  # characters that have ended
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        body, decode = self._asked.body, self._asked.renderer.decode
        if body.logprobs is None:
            return None
        texts: list[str] = [decode([token]) for token in tokens]
        found: list[float | None] = [*logprobs]
        top: list[dict[str, float] | None] = [{t: x} for t, x in zip(texts, logprobs, strict=True)]
        scores = self._asked.scores[self._place]
        if self._echo and scores is not None:
            self._echo = False
            prompt = self._asked.prompts[self._place]
            given, likeliest = ([decode([t]) for t in ids] for ids in (prompt, scores.likeliest))
            # The likeliest comes last: tokens of broken UTF-8 share a text, and it must not be lost.
            best = [
                {token: logprob, other: highest}
                for token, logprob, other, highest in zip(
                    given[1:], scores.logprobs, likeliest, scores.likeliest_logprobs, strict=True
                )
            ]
            tokens = [*prompt, *tokens]
            texts, found, top = [*given, *texts], [None, *scores.logprobs, *found], [None, *best, *top]
        return {
            "tokens": texts,
            "token_logprobs": found,
            "top_logprobs": top if body.logprobs else None,
            "text_offset": [self._place_of(token) for token in tokens],
        }

    def _place_of(self, token: int) -> int:
        """In the text: where the character begins that the token begins or is a part of."""
        place, own = self._offset, self._asked.renderer.bytes_of(token, self._last)
        self._offset += len(self._characters.decode(own))
        self._last = [token]
        return place


class _CompletionStream(Stream):
    """For each choice its text as it grows, and why it ended."""

    def __init__(self, asked: _Asked, tell: Tell) -> None:
        super().__init__(head("cmpl", "text_completion"), asked.body, tell)
        renderer, count = asked.renderer, asked.body.n * len(asked.prompts)
        ends = end_tokens(renderer, asked.body)
        self._asked = asked
        self._choices = [Choice(renderer, ends, control=True) for _ in range(count)]
        self._had: list[str | None] = [None] * count  # the text that has been sent, without the prompt's
        self._logprobs = [_Logprobs(asked, number) for number in range(count)]

    def tokens(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        choice = self._choices[number]
        choice.add(tokens, logprobs)
        text = before(choice.text, self._asked.body.stop)
        if text != (self._had[number] or ""):
            self._chunk(number, {"text": text, "finish_reason": None, "stop_reason": None})

    def end(self, number: int, completion: Completion) -> None:
        choice = self._choices[number]
        choice.tokens, choice.logprobs = list(completion.tokens), list(completion.logprobs)
        text, reason = said(self._asked.renderer, self._asked.body, completion)
        ended = {"finish_reason": FINISH[completion.stop_reason], "stop_reason": reason}
        own = {"silva": exact(completion)["silva"]} if self._asked.body.return_token_ids else {}
        self._chunk(number, {"text": text, **ended, **own})

    def _chunk(self, number: int, chunk: dict[str, Any]) -> None:
        """With what is new of its text, and all tokens since the last one."""
        asked, choice, had = self._asked, self._choices[number], self._had[number]
        first, choice.sent, self._had[number] = choice.sent, len(choice.tokens), chunk["text"]
        new = choice.tokens[first:]
        text = _echoed(asked, number) + chunk["text"] if had is None else chunk["text"][len(had) :]
        logprobs = self._logprobs[number].of(new, choice.logprobs[first:])
        chunk |= {"index": number, "text": text, "logprobs": logprobs}
        if asked.body.return_token_ids:
            chunk |= {"token_ids": new}
            chunk |= {"prompt_token_ids": asked.prompts[number // asked.body.n]} if had is None else {}
        self.send(chunk)

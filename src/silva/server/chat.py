"""`/v1/chat/completions` in OpenAI's form: messages to tokens, and the reply back to a message.

The renderer does both, as it does for rollouts. A reply with malformed calls is sent as text, and so are
calls where the request offers no tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive

from silva.errors import ContextOverflow
from silva.rendering.growing import before, before_partial
from silva.rendering.openai import reply_entry
from silva.rendering.renderer import Renderer
from silva.rendering.sampling import said_reply
from silva.server.bodies import ChatBody, MessageBody
from silva.server.completions import FINISH, exact, head, seeds, usage
from silva.server.dialogue import dialogue, tool_specs
from silva.server.engine import CHARACTERS, Listener, apart
from silva.server.streams import Choice, Stream, Tell
from silva.thoughts import TAGS, split_reasoning
from silva.types import Completion, Message, SamplingParams, ToolSpec
from silva.wire.guard import HttpError


class Answering(Protocol):
    """Who answers a request: the engine of a server, or the policy in an episode that a program plays."""

    renderer: Renderer

    @property
    def context(self) -> int: ...  # tokens of a prompt and its answer together
    def shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]: ...
    async def sample(
        self,
        receive: Receive,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        live: Listener | None = None,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[Completion]: ...  # of each prompt, in order


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks of the engine. `stop`, `ends`: strings and tokens where a reply stops."""

    body: ChatBody
    renderer: Renderer
    tools: Sequence[ToolSpec]
    prompt: list[int]
    stop: Sequence[str]
    ends: Sequence[int]
    params: Sequence[SamplingParams]


async def complete(service: Answering, body: ChatBody, receive: Receive, size: int) -> dict[str, Any]:
    """The answer to a request of `size` bytes.

    Raises:
        HttpError: what is wrong with the request; or the client went away.
        ContextOverflow: the prompt leaves no room.
        RenderingError: the chat template refuses the dialogue.
        SilvaError: of the engine.
    """
    asked = await _asked(service, body, size)
    found = await _sample(service, asked, receive)
    work = sum(len(each.tokens) for each in found)
    choices = await apart(8 * work, lambda: [_choice(asked, *each) for each in enumerate(found)])
    answer = {
        **head("chatcmpl", "chat.completion"),
        "choices": choices,
        "usage": usage([asked.prompt], found, body.n),
    }
    return answer | ({"prompt_token_ids": asked.prompt} if body.return_token_ids else {})


async def stream(service: Answering, body: ChatBody, receive: Receive, size: int, tell: Tell) -> None:
    """The same answer in chunks; raises the same errors."""
    asked = await _asked(service, body, size)
    live = _ChatStream(asked, tell)
    found = await _sample(service, asked, receive, live)
    live.finish(usage([asked.prompt], found, body.n))


async def _sample(
    service: Answering, asked: _Asked, receive: Receive, live: _ChatStream | None = None
) -> list[Completion]:
    prompts, stop = [asked.prompt] * asked.body.n, asked.body.stop
    return await service.sample(receive, prompts, asked.params, live, stop=stop, tools=asked.tools)


async def _asked(service: Answering, body: ChatBody, size: int) -> _Asked:
    tools = tool_specs(body)
    prompt = await apart(8 * size, prompt_of, service, body)
    most = _max_tokens(body, service.context - len(prompt))
    stop = (*body.stop, *service.renderer.stop_strings(tools))
    ends = tuple(dict.fromkeys((*(body.stop_token_ids or ()), *service.renderer.stop_token_ids)))
    params = [body.params(most, stop=stop, ends=ends, seed=seed) for seed in seeds(body)]
    return _Asked(body, service.renderer, tools, prompt, stop, ends, params)


def prompt_of(service: Answering, body: ChatBody) -> list[int]:
    """The tokens of a request."""
    characters, context = sum(_characters(message) for message in body.messages), service.context
    if characters > CHARACTERS * context:
        raise ContextOverflow(
            f"messages of {characters} characters leave no room in a context of {context} tokens"
        )
    return service.shown(dialogue(body.messages), tool_specs(body))


def _characters(message: MessageBody) -> int:
    texts = (message.content, message.reasoning_content, message.reasoning)
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return calls + sum(len(text) for text in texts if text)


def _max_tokens(body: ChatBody, room: int) -> int:
    given = {each for each in (body.max_tokens, body.max_completion_tokens) if each is not None}
    if len(given) > 1:
        raise HttpError(400, "got max_tokens and max_completion_tokens that differ, expected one of them")
    return given.pop() if given else room


def _choice(asked: _Asked, number: int, completion: Completion) -> dict[str, Any]:
    message = _reply(asked, completion)
    choice = {
        "index": number,
        "message": message,
        "finish_reason": _finish(message, completion),
        "logprobs": _logprobs(asked, completion.tokens, completion.logprobs),
    }
    return choice | (exact(completion) if asked.body.return_token_ids else {})


def _reply(asked: _Asked, completion: Completion) -> dict[str, Any]:
    """The message that a completion says, as OpenAI's API writes it."""
    said = said_reply(asked.renderer, completion, asked.prompt, asked.body.stop, asked.tools)
    ids = [call.id or f"call_{secrets.token_hex(12)}" for call in said.tool_calls]
    return reply_entry(said, ids, "reasoning_content")


def _finish(message: Mapping[str, Any], completion: Completion) -> str:
    ended = FINISH[completion.stop_reason]
    return "tool_calls" if "tool_calls" in message and ended == "stop" else ended


def _logprobs(
    asked: _Asked, tokens: Sequence[int], logprobs: Sequence[float], first: int = 0
) -> dict[str, Any] | None:
    """One entry a token, from place `first` on. The engine tells of the sampled token alone, so no more than
    that one is on top."""
    if not asked.body.logprobs:
        return None
    entries = []
    for place in range(first, len(tokens)):
        token, renderer = tokens[place], asked.renderer
        own = list(renderer.bytes_of(token, tokens[max(place - 1, 0) : place]))
        entry = {"token": renderer.decode([token]), "logprob": logprobs[place], "bytes": own}
        entries.append({**entry, "top_logprobs": [entry] if asked.body.top_logprobs else []})
    return {"content": entries, "refusal": None}


class _ChatStream(Stream):
    """For each choice its role, thoughts and content as they grow, calls at the end, why it ended.

    A call is sent once the reply has ended: one that is malformed makes text of all of them.
    """

    def __init__(self, asked: _Asked, tell: Tell) -> None:
        super().__init__(head("chatcmpl", "chat.completion.chunk"), asked.body, tell)
        renderer = asked.renderer
        self._asked = asked
        self._choices = [Choice(renderer, asked.ends, control=False) for _ in range(asked.body.n)]
        self._had: list[dict[str, str]] = [{} for _ in self._choices]  # what has been sent of each message
        self._marks = renderer.call_marks(asked.tools) if asked.tools else ()
        self._opened = renderer.opens_thought(asked.prompt)
        self._prompt = {"prompt_token_ids": asked.prompt} if asked.body.return_token_ids else {}

    def tokens(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        choice = self._choices[number]
        choice.add(tokens, logprobs)
        self._grow(number, self._settled(choice.text))

    def end(self, number: int, completion: Completion) -> None:
        choice, message = self._choices[number], _reply(self._asked, completion)
        choice.tokens, choice.logprobs = list(completion.tokens), list(completion.logprobs)
        self._grow(number, message)
        for place, call in enumerate(message.get("tool_calls", ())):
            function = {**call["function"], "arguments": ""}
            self._chunk(number, {"tool_calls": [{"index": place, **call, "function": function}]})
            rest = {"arguments": call["function"]["arguments"]}
            self._chunk(number, {"tool_calls": [{"index": place, "function": rest}]})
        own = exact(completion)["silva"] if self._asked.body.return_token_ids else None
        self._chunk(number, {}, _finish(message, completion), own)

    def _settled(self, text: str) -> dict[str, Any]:
        """What begins the message whatever comes next."""
        if self._asked.tools and self._asked.renderer.may_be_call(text):
            return {}
        text = before(before(text, self._asked.stop), self._marks)
        reasoning, content = split_reasoning(before_partial(text, TAGS), opened=self._opened)
        if self._asked.tools and self._asked.renderer.may_be_call(content):
            content = ""
        grown = {"reasoning_content": reasoning or "", "content": content}
        return {name: words for name, text in grown.items() if (words := text.rstrip())}

    def _grow(self, number: int, message: Mapping[str, Any]) -> None:
        had, delta = self._had[number], {}
        if "role" not in had:
            had["role"] = "assistant"
            self._chunk(number, {"role": "assistant"})
        for name in ("reasoning_content", "content"):
            text = message.get(name)
            if text is not None and text != had.get(name):
                delta[name] = text[len(had.get(name, "")) :]
                had[name] = text
        if delta:
            self._chunk(number, delta)

    def _chunk(self, number: int, delta: dict[str, Any], finish: str | None = None, own: Any = None) -> None:
        """With all tokens since the last chunk, unless it is the one of the role."""
        asked, choice = self._asked, self._choices[number]
        first = len(choice.tokens) if "role" in delta else choice.sent
        chunk = {"index": number, "delta": delta, "finish_reason": finish,
                 "logprobs": _logprobs(asked, choice.tokens, choice.logprobs, first)
                             if first < len(choice.tokens) else None}  # fmt: skip
        if asked.body.return_token_ids:
            chunk |= {"token_ids": choice.tokens[first:]} | ({} if own is None else {"silva": own})
        if "role" not in delta:
            choice.sent = len(choice.tokens)
        self.send(chunk, **self._prompt)
        self._prompt = {}  # once

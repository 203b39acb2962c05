"""`/v1/chat/completions` in OpenAI's form: messages to tokens, and the reply back to a message.

The renderer does both, as it does for rollouts. A reply with malformed calls is sent as text, and so are
calls where the request offers no tools.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Receive

from silva.errors import ContextOverflow
from silva.ports import CLOCK
from silva.rendering.reasoning import split_reasoning
from silva.rendering.renderer import Renderer
from silva.server.bodies import ChatBody, MessageBody
from silva.server.completions import FINISH, exact, last_chunk, seeds, usage
from silva.server.dialogue import dialogue, tool_specs
from silva.server.guard import HttpError
from silva.server.service import CHARACTERS, Service, apart
from silva.types import Completion, Message, ToolSpec


async def chat(service: Service, body: ChatBody, receive: Receive, size: int) -> dict[str, Any]:
    """The answer to a request of `size` bytes.

    Raises:
        HttpError: what is wrong with the request; or the client went away.
        ContextOverflow: the prompt leaves no room.
        RenderingError: the chat template refuses the dialogue.
        SilvaError: of the engine.
    """
    tools = tool_specs(body)
    prompt = await apart(8 * size, _prompt, service, body, tools)
    most = _max_tokens(body, service.engine.capabilities.context - len(prompt))
    stop = (*body.stop, *service.renderer.stop_strings(tools))
    ends = tuple(dict.fromkeys((*(body.stop_token_ids or ()), *service.renderer.stop_token_ids)))
    params = [body.params(most, stop=stop, ends=ends, seed=seed) for seed in seeds(body)]
    found = await service.sample(receive, [prompt] * body.n, params)
    work = sum(len(each.tokens) for each in found)
    choices = await apart(8 * work, _choices, service.renderer, body, found, prompt, tools)
    answer = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(CLOCK.time()),
        "choices": choices,
        "usage": usage([prompt], found, body.n),
    }
    return answer | ({"prompt_token_ids": prompt} if body.return_token_ids else {})


def _prompt(service: Service, body: ChatBody, tools: Sequence[ToolSpec]) -> list[int]:
    characters = sum(_characters(message) for message in body.messages)
    context = service.engine.capabilities.context
    if characters > CHARACTERS * context:
        raise ContextOverflow(
            f"messages of {characters} characters leave no room in a context of {context} tokens"
        )
    return service.tokens_of(service.renderer.context(dialogue(body.messages), tools))


def _characters(message: MessageBody) -> int:
    texts = (message.content, message.reasoning_content, message.reasoning)
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return calls + sum(len(text) for text in texts if text)


def _max_tokens(body: ChatBody, room: int) -> int:
    given = {each for each in (body.max_tokens, body.max_completion_tokens) if each is not None}
    if len(given) > 1:
        raise HttpError(400, "got max_tokens and max_completion_tokens that differ, expected one of them")
    return given.pop() if given else room


def _choices(
    renderer: Renderer,
    body: ChatBody,
    found: Sequence[Completion],
    prompt: Sequence[int],
    tools: Sequence[ToolSpec],
) -> list[dict[str, Any]]:
    choices = []
    for number, completion in enumerate(found):
        said = renderer.parse(completion.tokens, prompt=prompt, stop=body.stop, tools=tools)
        if said.errors or (said.tool_calls and not tools):  # then they are text
            text = split_reasoning(said.raw or "", opened=renderer.opens_thought(prompt))[1]
            said = replace(said, content=text, tool_calls=())
        message = _message(said, body.stop if completion.stop_reason == "stop_string" else ())
        ended = FINISH[completion.stop_reason]
        choice: dict[str, Any] = {
            "index": number,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message and ended == "stop" else ended,
            "logprobs": {"content": _logprobs(renderer, body, completion), "refusal": None}
            if body.logprobs
            else None,
        }
        choices.append(choice | (exact(completion) if body.return_token_ids else {}))
    return choices


def _message(said: Message, stop: Sequence[str]) -> dict[str, Any]:
    """As OpenAI's API writes it. `stop`: the strings one of which stopped it."""
    content, calls = _without_stop(said.content, stop), said.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if said.reasoning is not None:
        message["reasoning_content"] = _without_stop(said.reasoning, stop)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return message


def _without_stop(text: str, stop: Sequence[str]) -> str:
    """OpenAI's API leaves out the string that stopped the reply; the renderer keeps it."""
    ends = [each for each in stop if text.endswith(each)]
    return text.removesuffix(max(ends, key=len)) if ends else text


def _logprobs(renderer: Renderer, body: ChatBody, completion: Completion) -> list[dict[str, Any]]:
    """One entry a token. The engine tells of the sampled token alone, so no more than that one is on top."""
    entries = []
    for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
        text = renderer.decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        entries.append({**entry, "top_logprobs": [entry] if body.top_logprobs else []})
    return entries


def chunks(answer: dict[str, Any], body: ChatBody) -> list[dict[str, Any]]:
    """The answer as a stream: for each choice its message in one piece, then why it ended."""
    kept = ("choices", "usage", "prompt_token_ids")
    head = {name: value for name, value in answer.items() if name not in kept}
    head["object"] = "chat.completion.chunk"
    found = []
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
        found.append({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        end = {"index": choice["index"], "delta": {}, "logprobs": None}
        found.append({**head, "choices": [{**end, "finish_reason": choice["finish_reason"]}]})
    if "prompt_token_ids" in answer:  # once
        found[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    return [*found, *last_chunk(head, answer, body)]

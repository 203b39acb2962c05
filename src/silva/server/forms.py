"""APIs as forms of OpenAI's chat completions: requests to it, its answers and chunks back.

    request ──asked──> chat completion ──answer──> response
                         chunks        ──events──> server-sent events

Not here: chat completions themselves (chat.py), and the forms (anthropic.py, responses.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from silva.server.bodies import CallBody, CalledBody, FunctionBody, MessageBody
from silva.server.parsing import shown
from silva.wire.guard import HttpError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
             "repetition_penalty", "logit_bias", "reasoning_effort", "reasoning", "thinking", "verbosity",
             "speed")  # fmt: skip
_ANSWER = ("text", "response_format", "prediction", "modalities", "audio", "include", "output_config")
_SERVER = ("parallel_tool_calls", "max_tool_calls", "truncation", "background", "conversation", "betas",
           "context_management", "container", "mcp_servers", "inference_geo", "cache_control",
           "prompt_cache_retention", "web_search_options")  # fmt: skip
DECIDED = frozenset((*_SAMPLING, *_ANSWER, *_SERVER))
"""Keys of requests that have no effect: the run decides how its model is sampled, and a model is not asked
for what it cannot do."""


class FormEvents(Protocol):
    """Makes the events of one answer from the chunks of a chat completion."""

    def of(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...


class ApiForm(NamedTuple):
    """Of an API.

    Attributes:
        asked: a request as one of chat completions.
        answer: to the request, from the answer of chat completions.
        events: of the answer to the request; None: the chunks are the events.
    """

    asked: Callable[[Mapping[str, Any]], dict[str, Any]]
    answer: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    events: Callable[[Mapping[str, Any]], FormEvents] | None = None


def chat_asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion as clients send it, without what has no effect and what they send back of answers."""
    asked = {key: value for key, value in body.items() if key not in DECIDED}
    asked["messages"] = [_message(each) for each in listed(body, "messages")]
    if body.get("tools"):
        asked["tools"] = [_tool(each) for each in listed(body, "tools")]
    if asked.get("tool_choice") not in (None, "none"):
        asked["tool_choice"] = "auto"  # nothing forces a call
    return asked


CHAT = ApiForm(chat_asked, lambda asked, answer: dict(answer))


def _message(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    message = {key: value for key, value in given.items() if key in MessageBody.model_fields}
    message.pop("annotations", None)
    message.pop("audio", None)
    message.pop("function_call", None)
    if isinstance(message.get("content"), list):
        message["content"] = [_part(each) for each in message["content"]]
    calls = message.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [_known(each, CallBody, function=CalledBody) for each in calls]
    return message


def _part(part: Any) -> Any:
    """A part of a content; keys beside its text, such as cache_control, have no effect."""
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


def _tool(given: Any) -> Any:
    tool = _known(given, None, function=FunctionBody)
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        tool["function"].pop("strict", None)
    return tool


def _known(given: Any, kind: Any, **inner: Any) -> Any:
    """An object without the keys that a body lacks."""
    if not isinstance(given, dict):
        return given
    known = {key: value for key, value in given.items() if kind is None or key in kind.model_fields}
    known.pop("cache_control", None)
    return {key: _known(value, inner[key]) if key in inner else value for key, value in known.items()}


# --- what other forms are made of


def listed(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise HttpError(400, f"{name}: got {shown(value)}, expected an array")
    return value


def text_in(
    content: Any, where: str, kinds: Sequence[str] = ("text", "input_text", "output_text"), between: str = ""
) -> str:
    """Of a content: a text, or parts of these types, with `between` them.

    Raises:
        HttpError: it holds something else, such as an image.
    """
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise HttpError(400, f"{where}: got a part of type {shown(kind)}, expected text")
    return between.join(part["text"] for part in parts)


def call_of(id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def own_tools(body: Mapping[str, Any], kind: str, parameters: str, usual: str = "") -> list[dict[str, Any]]:
    """The client's tools, as chat completions have them.

    Args:
        kind: what their type must be; `usual`: what it is where it is left out.
        parameters: the key of a tool's schema.

    Raises:
        HttpError: one of them is run by the provider's own servers, or is no tool.
    """
    for i, tool in enumerate(tools := listed(body, "tools")):
        given = tool.get("type", usual) if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or given != kind:
            raise HttpError(
                400,
                f"tools.{i}: got a tool of type {shown(given)}, expected {kind}: others run at the provider",
            )
    return [function_of(tool.get("name"), tool.get("description"), tool.get(parameters)) for tool in tools]


def function_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def arguments_of(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise HttpError(400, f"{where}: got {shown(value)}, expected an object")
    return json.dumps(value)

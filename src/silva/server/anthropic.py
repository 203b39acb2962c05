"""Anthropic's `/v1/messages` as a form of chat completions, with streams, tools and thoughts.

    system                          the first message
    tool_use, tool_result           calls of an assistant's message, messages of the role tool
    thinking                        reasoning_content
    stop_reason                     finish_reason, in other words

Thoughts have no signature: nobody checks one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from silva.server.forms import DECIDED, ApiForm, arguments_of, call_of, listed, own_tools, text_in
from silva.server.parsing import shown
from silva.wire.guard import HttpError

STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
CHOICES = {"auto": "auto", "any": "auto", "tool": "auto", "none": "none"}  # nothing forces a call
KNOWN = {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream",
         "metadata", "service_tier"}  # fmt: skip


def asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        HttpError: something in it has no counterpart.
    """
    if unknown := sorted(body.keys() - KNOWN - DECIDED):
        raise HttpError(400, f"{unknown[0]}: unknown field, expected one of {', '.join(sorted(KNOWN))}")
    system = text_in(body.get("system"), "system", between="\n")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(listed(body, "messages")):
        messages += _messages(message, f"messages.{number}")
    chat: dict[str, Any] = {"messages": messages, "stop": body.get("stop_sequences"),
                            "max_tokens": body.get("max_tokens"), "model": body.get("model"),
                            "stream": body.get("stream") or False}  # fmt: skip
    if body.get("tools"):
        chat["tools"] = own_tools(body, "custom", "input_schema", usual="custom")
    if choice := body.get("tool_choice"):
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if not isinstance(kind, str) or kind not in CHOICES:
            raise HttpError(400, f"tool_choice: got {shown(kind)}, expected one of {', '.join(CHOICES)}")
        chat["tool_choice"] = CHOICES[kind]
    if chat["stream"]:
        chat["stream_options"] = {"include_usage": True}
    return {key: value for key, value in chat.items() if value is not None}


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """A message: its results come before what else a user says."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise HttpError(400, f"{where}.role: got {shown(message)}, expected user or assistant")
    role, content = message["role"], message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    results, texts, thoughts, calls = [], [], [], []
    for number, block in enumerate(blocks):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.content.{number}"
        if kind == "text":
            texts.append(text_in([block], at))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = arguments_of(block.get("input"), f"{at}.input")
            calls.append(call_of(block.get("id"), block.get("name"), arguments))
        elif kind == "tool_result":
            text = text_in(block.get("content"), f"{at}.content", between="\n")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind != "redacted_thinking":
            raise HttpError(
                400, f"{at}: got a block of type {shown(kind)}, expected text, tool_use or tool_result"
            )
    text = ("" if role == "assistant" else "\n").join(texts)
    said: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant":
        said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return [said | ({"tool_calls": calls, "content": said["content"] or None} if calls else {})]
    return [*results, said] if texts or not results else results


def answer(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    (choice,) = chat["choices"]
    message, content = choice["message"], []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                        "input": json.loads(function["arguments"])})  # fmt: skip
    head = _head(request, chat)
    return {
        **head,
        "content": content,
        "stop_reason": STOPS[choice["finish_reason"]],
        "usage": _usage(chat["usage"]),
    }


def _head(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": chat["id"].replace("chatcmpl-", "msg_"), "type": "message", "role": "assistant",
            "model": request.get("model"), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0}}  # fmt: skip


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic counts input that was cached apart from the other."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}  # fmt: skip


class MessageEvents:
    """The events of a stream: blocks one after the other, each with its beginning, its parts and its end."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request, self._kind, self._index = request, "", -1
        self._stop, self._begun, self._open = "end_turn", False, False

    def of(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": _head(self._request, chunk)}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name, kind, part in (
                ("reasoning_content", "thinking", "thinking"),
                ("content", "text", "text"),
            ):
                if delta.get(name):
                    yield from self._block(kind, {part: ""})
                    yield self._delta({"type": f"{kind}_delta", part: delta[name]})
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if "id" in call:
                    self._kind = ""  # each has a block of its own
                    yield from self._block(
                        "tool_use", {"id": call["id"], "name": function["name"], "input": {}}
                    )
                if function["arguments"]:
                    yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
            if choice["finish_reason"] is not None:
                self._stop = STOPS[choice["finish_reason"]]
                yield from self._end()
        if chunk.get("usage"):
            delta = {"stop_reason": self._stop, "stop_sequence": None}
            yield {"type": "message_delta", "delta": delta, "usage": _usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def _block(self, kind: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self._end()
            self._kind, self._index = kind, self._index + 1
            block = {"type": kind, **content, **({"signature": ""} if kind == "thinking" else {})}
            yield {"type": "content_block_start", "index": self._index, "content_block": block}
            self._open = True

    def _end(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


MESSAGES = ApiForm(asked, answer, MessageEvents)

"""Messages to Anthropic's API and its answers, from and to OpenAI's form (chat_messages.py). Pure; sends
nothing.

    OpenAI                                   Anthropic
    system messages                          one text beside the dialogue
    a result, role "tool"                    a block of the next user message
    calls beside the content, JSON text      blocks of the content, objects
    finish_reason                            stop_reason, in other words
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from silva.actors.chat_messages import ChatAnswer, read_answer
from silva.types import ToolSpec

FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
"""The reasons for which a whole answer ends, in OpenAI's words; others (refusal, ...) keep their own."""


class _Block(BaseModel):
    type: str
    text: str = ""
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class _Answer(BaseModel):
    type: Literal["message"]
    content: list[_Block]
    stop_reason: str | None = None
    usage: Any = None


def anthropic_dialogue(entries: Iterable[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The system text ("" for none) and the messages, from entries of OpenAI's form.

    Roles alternate, and a text that is empty is left out, as the API demands.
    """
    system, messages = list[str](), list[dict[str, Any]]()
    for entry in entries:
        if entry["role"] == "system":
            system.append(entry["content"])
            continue
        role = "assistant" if entry["role"] == "assistant" else "user"
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"] += _blocks(entry)
    for message in messages:
        message["content"] = message["content"] or [{"type": "text", "text": "(empty)"}]
    return "\n\n".join(system), messages


def anthropic_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [{"name": t.name, "description": t.description, "input_schema": dict(t.parameters)} for t in tools]


def read_anthropic(text: str, tools: Sequence[ToolSpec] = ()) -> ChatAnswer:
    """The answer in the body of a response.

    Raises:
        ValueError: the body is not an answer of this API.
    """
    try:
        answer = _Answer.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in answer.content
        if block.type == "tool_use"
    ]
    said = {
        "content": "".join(block.text for block in answer.content if block.type == "text"),
        "reasoning_content": "".join(block.thinking for block in answer.content) or None,
        "tool_calls": calls or None,
    }
    finish = FINISH.get(answer.stop_reason or "", answer.stop_reason)
    whole = {"choices": [{"message": said, "finish_reason": finish}], "usage": _usage(answer.usage)}
    return read_answer(json.dumps(whole), tools)


def _blocks(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = entry["content"] or ""
    if entry["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": entry["tool_call_id"], "content": content}]
    calls = [
        {"type": "tool_use", "id": each["id"], "name": each["function"]["name"],
         "input": json.loads(each["function"]["arguments"])}
        for each in entry.get("tool_calls") or ()
    ]  # fmt: skip
    return [*([{"type": "text", "text": content}] if content.strip() else []), *calls]


def _usage(given: Any) -> dict[str, Any] | None:
    """Anthropic counts input that was cached, or is cached now, apart from the other."""
    if not isinstance(given, Mapping):
        return None
    asked, answered = given.get("input_tokens"), given.get("output_tokens")
    if not isinstance(asked, int) or not isinstance(answered, int):
        return None
    cached = given.get("cache_read_input_tokens") or 0
    return {
        "prompt_tokens": asked + cached + (given.get("cache_creation_input_tokens") or 0),
        "completion_tokens": answered,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

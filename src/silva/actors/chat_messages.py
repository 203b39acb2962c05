"""Messages to a chat API of OpenAI's form, and its answers back to messages. Pure; sends nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from silva.rendering.openai import THOUGHTS, as_function, call_ids, reply_entry
from silva.rendering.tool_calls import CLOSE, EXPECTED, OPEN, read_call
from silva.thoughts import join_reasoning, split_reasoning
from silva.types import Message, ToolCall, ToolSpec
from silva.wire.requests import Usage

NO_RESULT = "(no result)"


class _Function(BaseModel):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Part(BaseModel):
    text: str = ""


class _Said(BaseModel):
    content: str | list[_Part] | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else [_Part(text=self.content or "")]
        return "".join(part.text for part in parts) or self.refusal or ""

    @property
    def thoughts(self) -> tuple[str, str] | None:
        """Name and text of the field that holds them; forms that are not known are left out."""
        fields = ((name, getattr(self, name)) for name in THOUGHTS)
        return next(((name, value) for name, value in fields if value and isinstance(value, str)), None)


class _Choice(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: Any = None


class ChatAnswer(NamedTuple):
    """What a response holds.

    finish: why it ended, in the API's word.
    usage: None where the API gives none that can be read.
    thoughts_in: the field in which the server gave thoughts; "" where it gave none.
    """

    message: Message
    finish: str
    usage: Usage | None
    thoughts_in: str


def chat_messages(
    messages: Sequence[Message], system: str | None = None, thoughts_in: str = ""
) -> list[dict[str, Any]]:
    """The dialogue as the API wants it: each call has an id of its own and one result, right after it.

    An answer with malformed calls is sent as text, and so are results that belong to no call. For a call
    without a result, `NO_RESULT` is sent.

    Args:
        system: used where the messages hold no system message.
        thoughts_in: the field in which thoughts go back with their calls (DeepSeek refuses calls without
            them); "": thoughts are left out, as they are from answers without calls.
    """
    entries: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without a result
    loose: list[dict[str, Any]] = []  # results without a call

    def settle() -> None:
        entries.extend({"role": "tool", "tool_call_id": id, "content": NO_RESULT} for id in waiting)
        entries.extend(loose)
        waiting.clear()
        loose.clear()

    if system is not None and all(message.role != "system" for message in messages):
        entries.append({"role": "system", "content": system})
    messages = [_calls_as_text(message) if message.errors else message for message in messages]
    for message, ids in zip(messages, call_ids(messages), strict=True):
        if message.role == "tool" and ids:
            waiting.remove(ids[0])
            entries.append({"role": "tool", "tool_call_id": ids[0], "content": message.content})
        elif message.role == "tool":
            loose.append({"role": "user", "content": message.content})
        else:
            settle()
            waiting.extend(ids)
            thoughts = thoughts_in if ids and message.reasoning else ""
            entries.append({**reply_entry(message, ids, thoughts), "role": message.role})
    settle()
    return entries


def _calls_as_text(message: Message) -> Message:
    """A reply with malformed calls."""
    if message.raw is None:
        return message
    return replace(message, content=split_reasoning(message.raw)[1], tool_calls=())


def chat_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [as_function(tool) for tool in tools]


def most_tokens(body: Mapping[str, Any]) -> int:
    """More tokens than the input of a request can have: a token is at least one byte of it."""
    read = [body.get(key) for key in ("messages", "tools", *({"system"} & body.keys()))]
    return len(json.dumps(read, ensure_ascii=False).encode())


def read_answer(text: str, tools: Sequence[ToolSpec] = ()) -> ChatAnswer:
    """From the body of a response. What is not needed, such as the usage, may be missing or have any form.

    Calls that are malformed or lack their arguments become `errors` of the message, in the words for text.

    Raises:
        ValueError: the body is not an answer of a chat API.
    """
    try:
        answer = _Answer.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{where + ': ' if where else ''}{fault['msg']}") from None
    choice = answer.choices[0]
    thoughts_in, _ = choice.message.thoughts or ("", "")
    return ChatAnswer(
        _message(choice.message, tools), choice.finish_reason or "stop", _usage(answer.usage), thoughts_in
    )


def _usage(given: Any) -> Usage | None:
    used = given if isinstance(given, Mapping) else {}
    details = used.get("prompt_tokens_details")
    asked, answered = _count(used.get("prompt_tokens")), _count(used.get("completion_tokens"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0
    return None if asked is None or answered is None else Usage(asked, answered, min(cached or 0, asked))


def _count(given: object) -> int | None:
    return given if isinstance(given, int) and given >= 0 else None


def _message(said: _Said, tools: Sequence[ToolSpec]) -> Message:
    text = said.text
    reasoning, content = (said.thoughts[1], text) if said.thoughts else split_reasoning(text)
    calls, errors, written = [], [], []
    for number, each in enumerate(said.tool_calls or (), 1):
        name, arguments = each.function.name or "", _arguments(each.function, tools)
        written.append(f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}')
        call = (
            read_call(name, arguments, each.id or "")
            if arguments.strip()
            else f'"arguments" of {name} are missing; expected {EXPECTED}'
        )
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            errors.append(f"tool call {number}: {call}")
    shown = text if content != text else join_reasoning(reasoning, content)
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        raw="\n".join(part for part in (shown, *written) if part),
        errors=tuple(errors),
    )


def _arguments(function: _Function, tools: Sequence[ToolSpec]) -> str:
    """As JSON; "" if they are missing, unless the tool takes none."""
    if isinstance(function.arguments, dict):  # servers that do not write them as a text
        return json.dumps(function.arguments)
    if function.arguments and function.arguments.strip():
        return function.arguments
    takes = [tool.parameters.get("properties") for tool in tools if tool.name == function.name]
    return "{}" if takes and not takes[0] else ""

"""Whole dialogues in rows of data sets, with calls, thoughts and tools, to be learned or played again.

    {"messages": [..., {"role": "assistant", "tool_calls": [...]}, {"role": "tool", ...}], "tools": [...]}
    {"prompt": "..." or [...], "completion": "..." or [...]}                              TRL
    {"conversations": [{"from": "human", ...}, {"from": "function_call", ...}], "system": ..., "tools": ...}
    {"question": ..., "answer": ...} and all else of row_shapes.py: the answer is the reply
    {"state": [...], "action": {...}, "system_prompt": {...}}                             a step of Act-PRM

ARPO and Tool-Star write calls and results as tags into the text, <search>...</search> <result>...</result>
(Search-R1: <information>), in one turn, or the result in a user's turn of its own. Here they become calls
and messages of tools. A tag is a call if a result follows it and it names a tool of the row, or is one of
`TAGGED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from silva.data.row_shapes import Shape, asked, before, is_dialogue, messages_at, recognised, value_at, wrong
from silva.data.rows import Row
from silva.errors import ConfigError
from silva.rendering.dialogue import Dialogue
from silva.rendering.openai import Malformed, specs_of
from silva.rendering.tool_calls import parse_hermes, scan_tags
from silva.types import Message, ToolCall, ToolSpec

TAGGED = tuple(
    ToolSpec(name, "", {"properties": {key: {"type": "string"}}, "required": [key]})
    for name, key in (("search", "query"), ("python", "code"))
)
"""The tools of ARPO, with the parameters of Silva's own tools of these names."""
_RESULT = re.compile(r"\s*<(result|information)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_ONLY_RESULT = re.compile(r"\s*<(result|information)>.*</\1>\s*", re.DOTALL)
_WRAPPED = re.compile(r"\s*<(tool_response|result|information)>\s*((?:(?!</?\1>).)*?)\s*</\1>\s*", re.DOTALL)


def dialogue(row: Row, shape: Shape | None = None) -> Dialogue:
    """What was said in a row, its answer included.

    Args:
        shape: of the rows of its source; None: recognised from this row.

    Raises:
        ConfigError: the row has another shape, or no reply; it names file, line and key.
    """
    shape, row = shape or shape_of(row), _whole(row)
    shape = before(row, shape)
    said = [*asked(row, shape), *_answer(row, shape)]
    key, value = next(((key, v) for key, v in row.values.items() if key.casefold() == "tools"), ("", None))
    try:
        tools = specs_of(value)
    except Malformed as error:
        raise wrong(row, key + error.where, error.expected, error.got) from None
    offered = (*tools, *(spec for spec in TAGGED if spec.name not in {tool.name for tool in tools}))
    messages = tuple(_named(_apart(said, offered)))
    if messages[0].role == "assistant":
        raise ConfigError(f"{row.where}: {shape.prompt}: got a dialogue that begins with a reply")
    if all(message.role != "assistant" for message in messages):
        raise ConfigError(f"{row.where}: {shape.prompt}: got no reply, expected a dialogue with one")
    return Dialogue(messages, tools, row.where)


def shape_of(row: Row, prompt: str = "", answer: str = "") -> Shape:
    """The shape of rows such as this one: the reply is the whole answer. What is given by key is not guessed.

    Raises:
        ConfigError: no column looks like a prompt, or a given key is not there.
    """
    return replace(recognised(_whole(row), prompt, answer), after="")


def _answer(row: Row, shape: Shape) -> Sequence[Message]:
    """The replies that stand in a column of their own."""
    if shape.answer == shape.prompt or messages_at(row, shape.prompt)[-1].role == "assistant":
        return ()
    if not shape.answer:
        raise ConfigError(
            f"{row.where}: {shape.prompt}: got a prompt without a reply, expected a column with one"
        )
    value = value_at(row, shape.answer)
    if is_dialogue(value):
        return messages_at(row, shape.answer)
    if not isinstance(value, str) or not value.strip():
        raise wrong(row, shape.answer, "text or messages", value)
    return (Message("assistant", value),)


def _whole(row: Row) -> Row:
    """The dialogue that a step of an Act-PRM episode holds; any other row as it is."""
    if not {"state", "action"} <= row.values.keys():
        return row
    state, action, system = (row.values.get(key) for key in ("state", "action", "system_prompt"))
    if not isinstance(state, list) or not isinstance(action, Mapping):
        raise ConfigError(f"{row.where}: state, action: expected a list of messages and a message")
    begins = [system] if isinstance(system, Mapping) and system.get("content") else []
    return Row(row.where, {"messages": [*begins, *state, action]})


def _apart(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Calls and results that stand in the text as tags are messages of their own."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else message
        if last.role == "assistant" != message.role and _ONLY_RESULT.fullmatch(message.content):
            pieces = _split(replace(last, content=f"{last.content}{message.content.strip()}"), tools)
            if pieces[-1].role == "tool":
                found[-1:] = pieces
                continue
        found += _split(message, tools) if message.role == "assistant" else [message]
    return found


def _split(reply: Message, tools: Sequence[ToolSpec]) -> list[Message]:
    """A reply up to its first call with a result, the result, what follows it, and so on."""
    found, text = list[Message](), reply.content
    while not reply.tool_calls and ("<result>" in text or "<information>" in text):
        calls = [
            (begin, end, call) for begin, end, call in scan_tags(text, tools) if isinstance(call, ToolCall)
        ]
        asked_for = [(b, call, result) for b, e, call in calls if (result := _RESULT.match(text, e))]
        if not asked_for:
            break
        begin, call, result = asked_for[0]
        said = replace(reply, content=text[:begin].rstrip(), tool_calls=(call,))
        found += [said, Message("tool", result[2].strip(), name=call.name)]
        reply, text = Message("assistant", ""), text[result.end() :].lstrip()
    return [*found, replace(reply, content=text)] if text or not found else found


def _named(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, each result with the name of its tool: of the first waiting call, if the row names none.
    Tags around a result, as Hermes' rows have them, are left to the template."""
    waiting: list[str] = []
    for message in messages:
        if message.role == "assistant":
            calls = message.tool_calls or parse_hermes(message.content).calls
            waiting = [call.name for call in calls]
        elif message.role == "tool":
            name = message.name or next(iter(waiting), None)
            if name in waiting:
                waiting.remove(name)
            wrapped = _WRAPPED.fullmatch(message.content)
            message = replace(message, name=name, content=wrapped[2] if wrapped else message.content)
        yield message

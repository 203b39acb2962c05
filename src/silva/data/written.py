"""Dialogues and problems as rows of other tools: what dialogues.py and row_shapes.py read, the other way.

    messages   {"messages": [...], "tools": [...]}              OpenAI's form; TRL, Axolotl, verl's SFT
    trl        {"prompt": [...], "completion": [...], "tools"}  completion: what follows the last question
    sharegpt   {"conversations": [{"from", "value"}], "system", "tools"}            LLaMA-Factory
    arpo       the same, calls and results as tags in the text: <search>...</search> <result>...</result>
    verl       {"data_source", "prompt", "ability", "reward_model", "extra_info"}   problems with answers

Every row is read again when it is written, and what differs is named (`lost`): no shape holds everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from silva.data.dialogues import dialogue
from silva.data.row_shapes import Shape, problem, recognised
from silva.data.rows import Row
from silva.errors import ConfigError
from silva.rendering.dialogue import Dialogue, reply_text
from silva.rendering.openai import as_function, call_ids, reply_entry
from silva.rendering.tool_calls import write_tags
from silva.thoughts import join_reasoning
from silva.types import Message, ToolSpec

Values = dict[str, Any]

LOST: Mapping[str, str] = {
    "thoughts": "thoughts stand in the text",
    "calls": "calls stand in the text",
    "ids": "ids of calls are left out",
    "names": "results do not name their tool",
    "tools": "the schemas of tools are left out or changed",
    "texts": "texts have other whitespace at their ends, or words that read as markup",
    "turns": "turns are joined or cut otherwise",
    "held out": 'a held-out task was played (status "eval"), which is not to be trained on',
}
"""What a row may lose, in words, or should not be used for."""


class CannotHold(ValueError):
    """A shape has no row for a dialogue; the text says why."""


def as_messages(said: Dialogue) -> Values:
    return {"messages": _entries(said.messages), **_tools(said.tools)}


def as_trl(said: Dialogue) -> Values:
    last = max((i for i, message in enumerate(said.messages) if message.role == "user"), default=-1) + 1
    if not 0 < last < len(said.messages):
        raise CannotHold("no reply follows the last question")
    entries = _entries(said.messages)
    return {"prompt": entries[:last], "completion": entries[last:], **_tools(said.tools)}


def as_sharegpt(said: Dialogue) -> Values:
    system, messages = _system_apart(said.messages)
    turns = list[Values]()
    for message in messages:
        speaker, value = {"user": "human", "tool": "observation"}.get(message.role, "gpt"), message.content
        if message.role == "assistant":
            value = reply_text(message)
            if message.tool_calls and not message.content and message.reasoning is None:
                speaker = "function_call"
                calls = [
                    {"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls
                ]
                value = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
        turns.append({"from": speaker, "value": value})
    return {"conversations": turns, **system, **_tools(said.tools, as_text=True)}


def as_arpo(said: Dialogue) -> Values:
    system, messages = _system_apart(said.messages)
    turns = list[Values]()
    for message in messages:
        if message.role == "user":
            turns.append({"from": "human", "value": message.content})
            continue
        if message.role == "tool":
            text = f" <result>\n{message.content}\n</result>"
        else:
            arguments = [value for call in message.tool_calls for value in call.arguments.values()]
            if len(message.tool_calls) > 1:
                raise CannotHold("several calls stand in one reply")
            if message.tool_calls and not (len(arguments) == 1 and isinstance(arguments[0], str)):
                raise CannotHold("a call has other arguments than one text")
            parts = (message.content, write_tags(message.tool_calls))
            text = join_reasoning(message.reasoning, "\n".join(filter(None, parts)))
        if turns and turns[-1]["from"] == "gpt":
            between = "" if message.role == "tool" else "\n"
            turns[-1]["value"] += between + text
        else:
            turns.append({"from": "gpt", "value": text})
    return {"conversations": turns, **system, **_tools(said.tools, as_text=True)}


WRITERS: Mapping[str, Callable[[Dialogue], Values]] = {
    "messages": as_messages, "trl": as_trl, "sharegpt": as_sharegpt, "arpo": as_arpo,
}  # fmt: skip
"""The writers of dialogues; `as_verl` writes problems."""


def row_of(said: Dialogue, to: str, columns: Mapping[str, Any]) -> tuple[Values, set[str]]:
    """The row of a dialogue, with other columns beside it, and what it loses, of `LOST`.

    Raises:
        CannotHold: the shape has no place for it.
    """
    values = WRITERS[to](said)
    try:
        missing = lost(said, dialogue(Row(said.where, values)))
    except ConfigError as error:
        raise CannotHold(f"what was written would not be read ({error})") from error
    hidden = columns.keys() & values.keys()
    return {**columns, **values}, missing | {
        f"the column {key} gives way to what is written" for key in hidden
    }


def lost(before: Dialogue, after: Dialogue) -> set[str]:
    """What differs, of `LOST`; ids of results are those of calls."""
    found = set[str]()
    if before.tools != after.tools:
        found.add("tools")
    if [message.role for message in before.messages] != [message.role for message in after.messages]:
        return found | {"turns"}
    for one, other in zip(before.messages, after.messages, strict=True):
        calls = [[(call.name, call.arguments) for call in each.tool_calls] for each in (one, other)]
        ids = [[call.id for call in each.tool_calls] for each in (one, other)]
        in_text = calls[0] != calls[1] or (one.reasoning or None) != other.reasoning
        found |= {"calls"} if calls[0] != calls[1] else {"ids"} if ids[0] != ids[1] else set()
        found |= {"thoughts"} if (one.reasoning or None) != other.reasoning else set()
        found |= {"texts"} if one.content != other.content and not in_text else set()
        found |= {"names"} if one.name != other.name else set()
    return found


def beside(row: Row, shape: Shape) -> dict[str, Any]:
    """The columns of a row that are no part of its dialogue."""
    used = {shape.prompt, shape.answer, shape.more, shape.system, shape.history, "state", "action"}
    tops = {key.partition(".")[0] for key in used if key}
    return {key: value for key, value in row.values.items() if key not in tops and key.casefold() != "tools"}


def as_verl(row: Row, number: int, source: str, shape: Shape | None = None) -> tuple[Values, set[str]]:
    """A problem, as verl's trainers read it, and what it loses; other columns stay beside it.

    Raises:
        CannotHold: there is no answer, by which verl grades.
        ConfigError: the row asks nothing; it names file, line and key.
    """
    asked = problem(row, shape or recognised(row))
    if asked.answer is None:
        raise CannotHold("there is no answer to grade by")
    columns = dict(asked.columns)
    graded = columns.pop("reward_model", None)
    values = {
        "data_source": columns.pop("data_source", None) or source,
        "prompt": [{"role": message.role, "content": message.content} for message in asked.messages],
        "ability": columns.pop("ability", None) or "",
        "reward_model": {"style": "rule", **(graded or {}), "ground_truth": asked.answer},
        "extra_info": columns.pop("extra_info", None) or {"index": number},
    }
    written = {**columns, **values}
    again = problem(Row(row.where, written), recognised(Row(row.where, written)))
    return written, set() if (again.messages, again.answer) == (asked.messages, asked.answer) else {"texts"}


def _entries(messages: Sequence[Message]) -> list[Values]:
    own = {call.id for message in messages for call in message.tool_calls if call.id}
    return [_entry(message, ids, own) for message, ids in zip(messages, call_ids(messages), strict=True)]


def _entry(message: Message, ids: Sequence[str], own: set[str]) -> Values:
    if message.role == "assistant":
        ids = [call.id for call in message.tool_calls]
        entry = reply_entry(message, ids, "reasoning_content" if message.reasoning else "")
        for call in entry.get("tool_calls", ()):
            if not call["id"]:
                del call["id"]
        return entry
    entry = {"role": message.role, "content": message.content}
    if message.role == "tool":
        entry |= {"tool_call_id": ids[0]} if ids and ids[0] in own else {}
        entry |= {"name": message.name} if message.name else {}
    return entry


def _system_apart(messages: Sequence[Message]) -> tuple[Values, Sequence[Message]]:
    system, rest = {}, messages
    if messages[0].role == "system":
        system, rest = {"system": messages[0].content}, messages[1:]
    if any(message.role == "system" for message in rest):
        raise CannotHold("a system message stands inside the dialogue")
    return system, rest


def _tools(tools: Sequence[ToolSpec], *, as_text: bool = False) -> Values:
    found = [as_function(tool) for tool in tools]
    return {"tools": json.dumps(found, ensure_ascii=False) if as_text else found} if found else {}

"""Messages in the form of OpenAI's chat API and back, for all who use that API, serve it or read its rows.

    Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "c1"),))
        ── reply_entry ──>  {"role": "assistant", "content": None, "tool_calls": [
                                {"type": "function", "id": "c1",
        <── message_of ───       "function": {"name": "add", "arguments": '{"a": 1}'}}]}

Not here: which messages an API takes (actors/chat_messages.py), the limits of a server (server/bodies.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from silva.thoughts import answer_of, split_reasoning
from silva.types import Message, Role, ToolCall, ToolSpec

ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip
"""By the words of OpenAI's API, of ShareGPT and of data sets like it."""
THOUGHTS = ("reasoning_content", "reasoning")  # DeepSeek, vLLM; OpenRouter, newer vLLM


class Malformed(ValueError):
    """`where`: the path inside the message, with a dot before each part."""

    def __init__(self, where: str, expected: str, got: object) -> None:
        super().__init__(f"{where.lstrip('.') or 'a message'}: got {repr(got)[:80]}, expected {expected}")
        self.where, self.expected, self.got = where, expected, got


# --- to OpenAI's form


def reply_entry(message: Message, ids: Sequence[str], thoughts_in: str = "") -> dict[str, Any]:
    """A reply.

    Args:
        ids: of its calls.
        thoughts_in: the field for its thoughts; "" leaves them out.
    """
    entry: dict[str, Any] = {"role": "assistant", "content": message.content}
    if thoughts_in and message.reasoning is not None:
        entry[thoughts_in] = message.reasoning
    if message.tool_calls:
        calls = zip(message.tool_calls, ids, strict=True)
        entry |= {"content": message.content or None, "tool_calls": [call_entry(*each) for each in calls]}
    return entry


def call_entry(call: ToolCall, id: str, *, as_text: bool = True) -> dict[str, Any]:
    """Args:
    as_text: its arguments are JSON text, as the API has them. Many chat templates want an object.
    """
    arguments = arguments_text(call) if as_text else dict(call.arguments)
    return {"type": "function", "id": id, "function": {"name": call.name, "arguments": arguments}}


def arguments_text(call: ToolCall) -> str:
    """Its arguments as JSON; a lone surrogate, which cannot be sent, becomes a question mark."""
    return json.dumps(dict(call.arguments), ensure_ascii=False).encode("utf-8", "replace").decode()


def call_ids(messages: Sequence[Message]) -> list[tuple[str, ...]]:
    """For each message the ids of its calls, unique in the dialogue; for a result the id that it answers.

    A result answers the first call of its name that waits for one in the reply before it. A result without a
    name answers any call there, except after malformed calls: it tells of those.
    """
    found, used, waiting, malformed = list[tuple[str, ...]](), set[str](), list[tuple[str, str]](), False
    for number, message in enumerate(messages):
        if message.role == "tool":
            any_call = message.name is None and not malformed
            answered = (each for each in waiting if any_call or message.name == each[1])
            call = next(answered, None)
            if call is not None:
                waiting.remove(call)
            found.append(() if call is None else call[:1])
            continue
        ids = list[str]()
        for i, each in enumerate(message.tool_calls):  # servers repeat ids, in one reply or over a dialogue
            ids.append(each.id if each.id and each.id not in used else f"call_{number}_{i}")
            used.add(ids[-1])
        names = (each.name for each in message.tool_calls)
        waiting, malformed = list(zip(ids, names, strict=True)), bool(message.errors)
        found.append(tuple(ids))
    return found


def thoughts_apart(message: Message) -> tuple[str, str]:
    """Thoughts ("" if none) and answer of a reply, whose content may still hold the end of a thought."""
    answer = answer_of(message.content)
    thoughts, _ = split_reasoning(message.content.removesuffix(answer), opened=True)
    return message.reasoning or thoughts or "", answer


def as_function(tool: ToolSpec) -> dict[str, Any]:
    """The tool as the API and chat templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


# --- from OpenAI's form


def message_of(entry: object) -> Message:
    """A message of the API, of ShareGPT (`from`, `value`), or of older forms (`function_call`).

    Calls and their arguments may be objects or JSON text.

    Raises:
        Malformed: names the part.
    """
    if not isinstance(entry, Mapping):
        raise Malformed("", "a message", entry)
    speaker, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise Malformed(".role", f"one of {', '.join(ROLES)}", speaker)
    if speaker == "function_call":  # ShareGPT as LLaMA-Factory reads it: a call, or a list of calls
        entry, content = {"tool_calls": _listed(_from_json(".value", content))}, None
    calls = _calls(entry)
    if content is None and not calls:
        raise Malformed(".content", "text", content)
    found = (entry.get(name) for name in THOUGHTS)
    thoughts = next((text for text in found if text and isinstance(text, str)), None)
    name = entry.get("name") if ROLES[speaker] == "tool" else None
    name = name if isinstance(name, str) else None
    return Message(ROLES[speaker], text_of(content), thoughts, tool_calls=calls, name=name)


def text_of(content: object) -> str:
    """Of a content: a text, null, or parts that are texts.

    Raises:
        Malformed: it holds something else, such as an image.
    """
    if isinstance(content, str | None):
        return content or ""
    parts = content if isinstance(content, Sequence) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if None in texts:
        raise Malformed(".content", "text", content)
    return "".join(texts)  # type: ignore[arg-type]


def specs_of(tools: object) -> tuple[ToolSpec, ...]:
    """The tools in a list or its JSON text, in the API's form or as the functions in it alone.

    Raises:
        Malformed: names the part.
    """
    tools = _from_json("", tools or ()) or ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise Malformed("", "a list of tools", tools)
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    for i, function in enumerate(functions):
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Malformed(f".{i}", "a tool with the name of its function", tools[i])
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise Malformed(f".{i}.parameters", "a JSON schema", function["parameters"])
    return tuple(map(spec_of, functions))


def spec_of(function: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(function["name"], function.get("description") or "", function.get("parameters") or {})


def _calls(entry: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    if function := entry.get("function_call"):
        return (_call(".function_call", function),)
    where = ".tool_calls"
    calls = _from_json(where, entry.get("tool_calls")) or ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise Malformed(where, "a list of calls", calls)
    return tuple(_call(f"{where}.{i}", call) for i, call in enumerate(calls))


def _call(where: str, call: Any) -> ToolCall:
    call = _from_json(where, call)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Malformed(where, "a call with the name of its function", call)
    arguments = _from_json(f"{where}.arguments", function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise Malformed(f"{where}.arguments", "an object", arguments)
    id = call.get("id")
    return ToolCall(function["name"], arguments, id if isinstance(id, str) else "")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


def _from_json(where: str, value: Any) -> Any:
    """The value itself, or what its text says."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Malformed(where, "JSON", value) from None

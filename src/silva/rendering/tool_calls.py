"""Tool calls as text: descriptions of the tools on offer, and parsers of the calls a model writes.

Two forms. `hermes`: a JSON object {"name": ..., "arguments": {...}} between <tool_call> and
</tool_call> (Hermes, Qwen). `tags`: <search>text</search>, one plain tag per tool (Search-R1, ARPO).
A parser never raises on what a model wrote: what it cannot read becomes an error in words, which
`error_observation` hands back to the model. Whether a tool exists and likes its arguments is for the
environment to say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silva.types import Message, ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXPECTED = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply taken apart: text without the markup of calls, the calls, and what was wrong, in words."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


Parser = Callable[[str, Sequence[ToolSpec]], Parsed]


def parse_hermes(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    """JSON calls between <tool_call> tags; `tools` plays no part."""
    del tools
    before, *blocks = text.split(OPEN)
    content, calls, errors = [before], [], []
    for number, block in enumerate(blocks, 1):
        body, tag, after = block.partition(CLOSE)
        content.append(after)
        call = _read_call(body) if tag else f"{OPEN} is never closed; expected {OPEN}{EXPECTED}{CLOSE}"
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            errors.append(f"tool call {number}: {call}")
    strays = sum(part.count(CLOSE) for part in content)
    if strays:
        errors.append(f"{CLOSE} without {OPEN} before it; expected {OPEN}{EXPECTED}{CLOSE}")
        content = [part.replace(CLOSE, "") for part in content]
    return Parsed("".join(content).strip() if blocks or strays else text, tuple(calls), tuple(errors))


def parse_tags(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    """Calls such as <search>text</search>, for the tools on offer; other tags are plain text.

    The text becomes the tool's single required string parameter, or `input` where there is no such one.
    """
    parameters = {tool.name: _text_parameter(tool) for tool in tools}
    if not parameters:
        return Parsed(text)
    opening = re.compile(f"<({'|'.join(map(re.escape, parameters))})>")
    content, calls, errors, position = [], [], [], 0
    while match := opening.search(text, position):
        name, tag = match[1], f"</{match[1]}>"
        content.append(text[position : match.start()])
        end = text.find(tag, match.end())
        if end < 0:
            errors.append(f"{match[0]} is never closed; expected {match[0]}...{tag}")
            position = len(text)
        else:
            calls.append(ToolCall(name, {parameters[name]: text[match.end() : end].strip()}))
            position = end + len(tag)
    if not calls and not errors:
        return Parsed(text)
    content.append(text[position:])
    return Parsed("".join(content).strip(), tuple(calls), tuple(errors))


PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "tags": parse_tags}


def error_observation(message: Message) -> tuple[Message, ...] | None:
    """What tells the model that its calls were malformed and how to write them; None if none were."""
    if not message.errors:
        return None
    lines = "\n".join(f"- {error}" for error in message.errors)
    return (Message("tool", f"Error: malformed tool call, nothing was run.\n{lines}"),)


def write_calls(calls: Sequence[ToolCall], form: str) -> str:
    """The calls as a model would write them."""
    return "\n".join(_write_tag(call) if form == "tags" else _write_hermes(call) for call in calls)


def describe_tools(tools: Sequence[ToolSpec], form: str) -> str:
    """Text for the system message, where the chat template does not describe tools itself."""
    return _describe_tags(tools) if form == "tags" else _describe_hermes(tools)


def as_function(tool: ToolSpec) -> dict[str, Any]:
    """The tool as chat templates expect it (the form of OpenAI's API)."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def read_call(name: str, arguments: str, id: str = "") -> ToolCall | str:
    """A call whose parts a chat API gives apart, or what is wrong with it, in the words for calls in a text.

    Args:
        arguments: JSON, as the model wrote it.
    """
    try:
        found = _loads(arguments)
    except ValueError as error:
        return str(error)
    return _call(name, found, id)


def _read_call(body: str) -> ToolCall | str:
    """One call, or what is wrong with it."""
    try:
        call = _loads(body)
    except ValueError as error:
        return str(error)
    if not isinstance(call, dict):
        return f"got JSON of type {_json_type(call)}, expected an object {EXPECTED}"
    name, identity = call.get("name"), call.get("id")
    found = _call(name, call.get("arguments", {}), identity if isinstance(identity, str) else "")
    extra = sorted(call.keys() - {"name", "arguments", "id"})
    if extra and isinstance(found, ToolCall):
        return f"unexpected {', '.join(map(json.dumps, extra))} in the call of {name}; expected {EXPECTED}"
    return found


def _call(name: object, arguments: object, id: str) -> ToolCall | str:
    if not isinstance(name, str) or not name:
        return f'"name" is missing or not a text; expected {EXPECTED}'
    if not isinstance(arguments, dict):
        return f'"arguments" of {name}: got {_json_type(arguments)}, expected an object {EXPECTED}'
    return ToolCall(name, arguments, id)


def _loads(body: str) -> Any:
    """Raises ValueError, in words for the model; also for what JSON cannot hold: NaN, 1e999, surrogates."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # "\ud800" is valid JSON and no valid text
    except UnicodeEncodeError:
        raise ValueError("holds characters that are no valid Unicode (a lone surrogate)") from None
    except RecursionError:
        raise ValueError(f"JSON is nested too deeply; expected {EXPECTED}") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}); expected {EXPECTED}") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(numeral: str) -> float:
    value = float(numeral)
    if not math.isfinite(value):
        raise ValueError(f"{numeral[:20]} is too large for a number")
    return value


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _text_parameter(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties", {})
    required = [name for name in tool.parameters.get("required", ()) if _is_text(properties.get(name))]
    return required[0] if len(required) == 1 else "input"


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _write_hermes(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def _write_tag(call: ToolCall) -> str:
    text = "\n".join(v if isinstance(v, str) else json.dumps(v) for v in call.arguments.values())
    return f"<{call.name}>{text}</{call.name}>"


def _describe_hermes(tools: Sequence[ToolSpec]) -> str:
    schemas = "\n".join(json.dumps(as_function(tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, given by their JSON schemas:\n<tools>\n{schemas}\n</tools>\n\n"
        "To call one, write its name and its arguments as one JSON object:\n"
        f'{OPEN}\n{{"name": "name of the tool", "arguments": {{"argument": "value"}}}}\n{CLOSE}\n'
        "You may write several calls; their results come back to you."
    )


def _describe_tags(tools: Sequence[ToolSpec]) -> str:
    lines = "\n".join(
        f"- <{tool.name}>{_text_parameter(tool)}</{tool.name}>: {tool.description}" for tool in tools
    )
    return (
        f"You can call these tools by writing their tags around the input:\n{lines}\n"
        "Stop after the closing tag; the result comes back to you."
    )

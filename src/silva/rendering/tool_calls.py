"""Tool calls as text: the two forms that Silva writes itself, and what all forms share.

`hermes`: a JSON object {"name": ..., "arguments": {...}} between <tool_call> and </tool_call> (Hermes, Qwen).
`tags`: <search>text</search>, one plain tag per tool (Search-R1, ARPO). Other families: call_forms.py.
A parser never raises on what a model wrote: what it cannot read becomes an error in words. Whether a tool
exists and likes its arguments is for the environment to say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silva.rendering.openai import as_function
from silva.thoughts import trimmed
from silva.types import ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXPECTED = '{"name": "...", "arguments": {...}}'
HERMES = f'{OPEN}\n{{"name": "name of the tool", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
_SPACE, _DECODER = re.compile(r"\s*"), json.JSONDecoder()

Found = tuple[int, int, ToolCall | str | None]
"""Begin and end in a text, and what stands there: a call, an error in words, or only markup."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply taken apart: text without the markup of calls, the calls, and what was wrong, in words."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


def parsed(text: str, found: Sequence[Found]) -> Parsed:
    """`text` without what was found in it."""
    if not found:
        return Parsed(text)
    content, calls, errors, at = list[str](), list[ToolCall](), list[str](), 0
    for begin, end, each in found:
        content.append(text[at:begin])
        at = end
        if isinstance(each, ToolCall):
            calls.append(each)
        elif each is not None:
            errors.append(f"tool call {len(calls) + len(errors) + 1}: {each}")
    return Parsed(trimmed([*content, text[at:]]), tuple(calls), tuple(errors))


def parse_hermes(text: str) -> Parsed:
    """JSON calls between <tool_call> tags."""
    return parsed(text, scan_hermes(text))


def scan_hermes(text: str, tools: Sequence[ToolSpec] = ()) -> list[Found]:
    """Calls as they end by JSON's own rules: their texts may hold the tags."""
    del tools
    found, at, expected = list[Found](), 0, f"expected {OPEN}{EXPECTED}{CLOSE}"
    for tag in re.finditer(f"{OPEN}|{CLOSE}", text):
        if tag.start() < at:
            continue
        at = tag.end()
        if tag[0] == CLOSE:
            found.append((tag.start(), at, f"{CLOSE} without {OPEN} before it; {expected}"))
            continue
        end = json_end(text, at)
        close = -1 if end is None else skip_space(text, end)
        if not text.startswith(CLOSE, close if close >= 0 else len(text)):
            following = text.find(OPEN, at)
            close = text.find(CLOSE, at, following if following >= 0 else len(text))
            end = following if following >= 0 else len(text)
        if close < 0:
            assert end is not None
            found.append((tag.start(), end, f"{OPEN} is never closed; {expected}"))
            at = end
        else:
            found.append((tag.start(), close + len(CLOSE), _read_call(text[at:close])))
            at = close + len(CLOSE)
    return found


def scan_tags(text: str, tools: Sequence[ToolSpec] = ()) -> list[Found]:
    """Calls such as <search>text</search>, for the tools on offer; other tags are plain text.

    The text becomes the tool's single required string parameter, or `input` where there is no such one."""
    parameters = {tool.name: _text_parameter(tool) for tool in tools}
    if not parameters:
        return []
    opening = re.compile(f"<({'|'.join(map(re.escape, parameters))})>")
    found, position = list[Found](), 0
    while match := opening.search(text, position):
        name, tag = match[1], f"</{match[1]}>"
        end = text.find(tag, match.end())
        if end < 0:
            position = len(text)
            error = f"{match[0]} is never closed; expected {match[0]}...{tag}"
            found.append((match.start(), position, error))
        else:
            position = end + len(tag)
            call = ToolCall(name, {parameters[name]: text[match.end() : end].strip()})
            found.append((match.start(), position, call))
    return found


def write_calls(calls: Sequence[ToolCall]) -> str:
    """The calls as JSON in <tool_call>."""
    bodies = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
    return "\n".join(f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}" for body in bodies)


def write_tags(calls: Sequence[ToolCall]) -> str:
    written = []
    for call in calls:
        text = "\n".join(v if isinstance(v, str) else json.dumps(v) for v in call.arguments.values())
        written.append(f"<{call.name}>{text}</{call.name}>")
    return "\n".join(written)


def read_call(name: str, arguments: str, id: str = "") -> ToolCall | str:
    """A call whose parts a chat API gives apart, or what is wrong with it, in the words for calls in a text.

    Args:
        arguments: JSON, as the model wrote it.
    """
    try:
        found = read_json(arguments)
    except ValueError as error:
        return str(error)
    return make_call(name, found, id)


def _read_call(body: str) -> ToolCall | str:
    """One call, or what is wrong with it."""
    try:
        call = read_json(body)
    except ValueError as error:
        return str(error)
    found = read_object(call, EXPECTED)
    extra = sorted(call.keys() - {"name", "arguments", "id"}) if isinstance(call, dict) else []
    if extra and isinstance(found, ToolCall):
        return (
            f"unexpected {', '.join(map(json.dumps, extra))} in the call of {found.name}; expected {EXPECTED}"
        )
    return found


def read_object(call: object, expected: str) -> ToolCall | str:
    """A call written as one JSON object; Llama's word for arguments is parameters."""
    if not isinstance(call, dict):
        return f"got JSON of type {_json_type(call)}, expected an object {expected}"
    identity, key = call.get("id"), "arguments" if "arguments" in call else "parameters"
    arguments = call.get(key, {}) if "parameters" in expected else call.get("arguments", {})
    return make_call(call.get("name"), arguments, identity if isinstance(identity, str) else "", expected)


def make_call(name: object, arguments: object, id: str, expected: str = EXPECTED) -> ToolCall | str:
    if not isinstance(name, str) or not name:
        return f'"name" is missing or not a text; expected {expected}'
    if not isinstance(arguments, dict):
        return f'"arguments" of {name}: got {_json_type(arguments)}, expected an object {expected}'
    return ToolCall(name, arguments, id)


def skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def json_end(text: str, begin: int) -> int | None:
    """Where the JSON value that begins there ends; None if there is none."""
    try:
        return _DECODER.raw_decode(text, skip_space(text, begin))[1]
    except (ValueError, RecursionError):
        return None


def read_json(body: str, expected: str = EXPECTED) -> Any:
    """Raises ValueError, in words for the model; also for what JSON cannot hold: NaN, 1e999, surrogates."""
    try:
        value = finite_json(body)
        json.dumps(value, ensure_ascii=False).encode()  # "\ud800" is valid JSON and no valid text
    except UnicodeEncodeError:
        raise ValueError("holds characters that are no valid Unicode (a lone surrogate)") from None
    except RecursionError:
        raise ValueError(f"JSON is nested too deeply; expected {expected}") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}); expected {expected}") from None
    return value


def finite_json(text: str, *, strict: bool = True) -> Any:
    """Raises ValueError also for numbers that JSON lacks, or that are too large for one: NaN, 1e999.

    Args:
        strict: control characters inside of texts are refused too.
    """
    return json.loads(text, strict=strict, parse_constant=_refuse_constant, parse_float=_finite)


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
    texts = required or [name for name, schema in properties.items() if _is_text(schema)]
    return texts[0] if len(texts) == 1 else "input"


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def schemas(tools: Sequence[ToolSpec]) -> str:
    return "\n".join(json.dumps(as_function(tool), ensure_ascii=False) for tool in tools)


def describe_tags(tools: Sequence[ToolSpec]) -> str:
    lines = "\n".join(
        f"- <{tool.name}>{_text_parameter(tool)}</{tool.name}>: {tool.description}" for tool in tools
    )
    return (
        f"You can call these tools by writing their tags around the input:\n{lines}\n"
        "Stop after the closing tag; the result comes back to you."
    )

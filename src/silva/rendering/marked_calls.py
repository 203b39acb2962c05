"""Calls with markers around their parts: DeepSeek, Kimi, Qwen's XML, GLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from silva.rendering.tool_calls import Found, make_call, read_json
from silva.types import ToolCall, ToolSpec


def _marked(
    call: re.Pattern[str], broken: re.Pattern[str], read: Callable[[re.Match[str], Sequence[ToolSpec]], Any]
) -> Callable[[str, Sequence[ToolSpec]], list[Found]]:
    """A scan for calls that match `call`; what matches `broken` beside them is an error or lone markup.

    The group `error` of `broken` tells the two apart.
    """

    def scan(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
        found, at, good = list[Found](), 0, call.search(text)
        while at < len(text):
            if good and good.start() < at:
                good = call.search(text, at)
            bad = broken.search(text, at)
            if good and (bad is None or good.start() <= bad.start()):
                found.append((good.start(), good.end(), read(good, tools)))
                at = good.end()
            elif bad:
                error = bad.groupdict().get("error")
                what = None if error is None else f"{bad[0].strip()[:40]} does not begin a whole call"
                found.append((bad.start(), bad.end(), what))
                at = bad.end()
            else:
                break
        return found

    return scan


def _read(example: str) -> Callable[[re.Match[str], Sequence[ToolSpec]], ToolCall | str]:
    """Reads a match with the groups `name` and `json`."""

    def read(match: re.Match[str], tools: Sequence[ToolSpec]) -> ToolCall | str:
        try:
            arguments = read_json(match["json"], example)
        except ValueError as error:
            return str(error)
        return make_call(match["name"].strip(), arguments, match.groupdict().get("id") or "", example)

    return read


DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n"
    '{"argument": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
scan_deepseek = _marked(
    re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^<]*```))?(?P<name>[^<\n]+?)\s*"
        r"(?:<｜tool▁sep｜>|```json)\s*(?P<json>(?:(?!<｜tool▁call▁begin｜>).)*?)\s*(?:```)?\s*"
        r"<｜tool▁call▁end｜>\n?",
        re.DOTALL,
    ),
    re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|(?P<error><｜tool▁call▁begin｜>)"),
    _read(DEEPSEEK),
)

KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>"
    '{"argument": "value"}<|tool_call_end|><|tool_calls_section_end|>'
)
scan_kimi = _marked(
    re.compile(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<\s]+?):\d+)\s*<\|tool_call_argument_begin\|>"
        r"(?P<json>(?:(?!<\|tool_call_begin\|>).)*?)<\|tool_call_end\|>",
        re.DOTALL,
    ),
    re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|(?P<error><\|tool_call_begin\|>)"),
    _read(KIMI),
)


def write_deepseek(calls: Sequence[ToolCall]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{_json(c)}\n```<｜tool▁call▁end｜>"
        for c in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def write_kimi(calls: Sequence[ToolCall]) -> str:
    each = (
        f"<|tool_call_begin|>{kimi_id(c.name, i)}<|tool_call_argument_begin|>{_json(c)}<|tool_call_end|>"
        for i, c in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def _json(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


# --- values in tags, whose types are in the schema of the tool

XML = "<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>name\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
_PARAMETER = re.compile(
    r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))",
    re.DOTALL,
)


def _read_values(
    argument: re.Pattern[str], example: str
) -> Callable[[re.Match[str], Sequence[ToolSpec]], Any]:
    """Reads a match with the groups `name` and `body`, which holds one `argument` after the other."""

    def read(match: re.Match[str], tools: Sequence[ToolSpec]) -> ToolCall | str:
        name, body = match["name"].strip(), match["body"]
        types: Mapping[str, Any] = next(
            (tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {}
        )
        arguments = {m["key"]: _value(m["value"], types.get(m["key"])) for m in argument.finditer(body)}
        if rest := argument.sub("", body).strip():
            return f"{rest[:40]!r} in the call of {name} is no argument; expected {example}"
        return make_call(name, arguments, "", example)

    return read


def _value(text: str, schema: object) -> Any:
    """JSON if it is, except for what the schema calls a string. Templates write Python's True and None."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return read_json(text, "")
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


scan_xml = _marked(
    re.compile(
        r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?P<body>(?:(?!<function=).)*?)</function>"
        r"(?=\s*(?:</tool_call>|<function=|<tool_call>|\Z))(?:\s*</tool_call>)?",
        re.DOTALL,
    ),
    re.compile(r"(?P<error><tool_call>|</tool_call>|<function=)"),
    _read_values(_PARAMETER, XML),
)
scan_glm = _marked(
    re.compile(
        r"<tool_call>\s*(?P<name>[^<>\s{}]+)\s*(?P<body>(?:<arg_key>(?:(?!<tool_call>).)*?</arg_value>\s*)?)</tool_call>",
        re.DOTALL,
    ),
    re.compile(r"(?P<error></?tool_call>)"),
    _read_values(_ARGUMENT, GLM),
)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_xml(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        values = "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"

    return "\n".join(map(each, calls))


def write_glm(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        values = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{values}</tool_call>"

    return "\n".join(map(each, calls))

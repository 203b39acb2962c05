"""How families of models write calls: a `Form` for each, found from the chat template or named in
`rendering.tools`.

A form finds its calls in a reply. What it cannot read becomes an error in words for the model, and it never
raises on what a model wrote.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silva.rendering.tool_calls import (
    HERMES,
    Found,
    Parsed,
    describe_tags,
    json_end,
    make_call,
    parsed,
    read_json,
    read_object,
    scan_hermes,
    scan_tags,
    schemas,
    skip_space,
    write_calls,
)
from silva.types import ToolCall, ToolSpec


def _short_id(name: str, number: int) -> str:
    return f"call{number:05}"


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write calls.

    Attributes:
        scan: what of a text is a call, a broken one, or markup around calls.
        write: calls as a model of this family writes them.
        example: a call, for people and models to read.
        markers: tokens that are part of calls, although they may be control tokens.
        call_id: of the n-th call of a reply, for templates that show ids. Mistral wants nine characters.
    """

    scan: Callable[[str, Sequence[ToolSpec]], list[Found]]
    write: Callable[[Sequence[ToolCall]], str]
    example: str
    markers: tuple[str, ...] = ()
    call_id: Callable[[str, int], str] = _short_id

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return parsed(text, self.scan(text, tools))

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """For the system message, where the chat template does not describe tools in this form."""
        if self is FORMS["tags"]:
            return describe_tags(tools)
        return (
            f"You can call these tools, given by their JSON schemas:\n<tools>\n{schemas(tools)}\n</tools>\n\n"
            f"To call one, write its name and its arguments in this form:\n{self.example}\n"
            "You may write several calls; their results come back to you."
        )


def foreign(text: str, tools: Sequence[ToolSpec], form: str) -> str:
    """What to tell a model whose reply is nothing but a call in another form; empty for other replies."""
    if not tools or not text.strip():
        return ""
    names, found = {tool.name for tool in tools}, dict[str, Parsed]()
    for name, other in FORMS.items():
        read = other.parse(text, tools)
        if name != form and (read.calls or read.errors) and not read.content:
            found[name] = read
    best = max(found, key=lambda name: len(found[name].calls), default=None)
    if best is None or not {call.name for call in found[best].calls} <= names:
        return ""
    return f"this is a call in the form {best}, which is not read here; expected {FORMS[form].example}"


# --- markers around parts of a call


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


def _explained(example: str, found: ToolCall | str) -> ToolCall | str:
    return found if isinstance(found, ToolCall) else f"{found}; expected {example}"


def _read(example: str) -> Callable[[re.Match[str], Sequence[ToolSpec]], ToolCall | str]:
    """Reads a match with the groups `name` and `json`."""

    def read(match: re.Match[str], tools: Sequence[ToolSpec]) -> ToolCall | str:
        try:
            arguments = read_json(match["json"], example)
        except ValueError as error:
            return str(error)
        return make_call(match["name"].strip(), arguments, match.groupdict().get("id") or "", example)

    return read


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n"
    '{"argument": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_scan_deepseek = _marked(
    re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^<]*```))?(?P<name>[^<\n]+?)\s*"
        r"(?:<｜tool▁sep｜>|```json)\s*(?P<json>(?:(?!<｜tool▁call▁begin｜>).)*?)\s*(?:```)?\s*"
        r"<｜tool▁call▁end｜>\n?",
        re.DOTALL,
    ),
    re.compile(r"<｜tool▁calls▁(?:begin|end)｜>|(?P<error><｜tool▁call▁begin｜>)"),
    _read(_DEEPSEEK),
)

_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>"
    '{"argument": "value"}<|tool_call_end|><|tool_calls_section_end|>'
)
_scan_kimi = _marked(
    re.compile(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<\s]+?):\d+)\s*<\|tool_call_argument_begin\|>"
        r"(?P<json>(?:(?!<\|tool_call_begin\|>).)*?)<\|tool_call_end\|>",
        re.DOTALL,
    ),
    re.compile(r"<\|tool_calls_section_(?:begin|end)\|>|(?P<error><\|tool_call_begin\|>)"),
    _read(_KIMI),
)


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{_json(c)}\n```<｜tool▁call▁end｜>"
        for c in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _write_kimi(calls: Sequence[ToolCall]) -> str:
    each = (
        f"<|tool_call_begin|>{_kimi_id(c.name, i)}<|tool_call_argument_begin|>{_json(c)}<|tool_call_end|>"
        for i, c in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def _json(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


# --- values in tags, whose types are in the schema of the tool

_XML = "<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
_GLM = "<tool_call>name\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
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


_scan_xml = _marked(
    re.compile(
        r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?P<body>(?:(?!<function=).)*?)</function>"
        r"(?=\s*(?:</tool_call>|<function=|<tool_call>|\Z))(?:\s*</tool_call>)?",
        re.DOTALL,
    ),
    re.compile(r"(?P<error><tool_call>|</tool_call>|<function=)"),
    _read_values(_PARAMETER, _XML),
)
_scan_glm = _marked(
    re.compile(
        r"<tool_call>\s*(?P<name>[^<>\s{}]+)\s*(?P<body>(?:<arg_key>(?:(?!<tool_call>).)*?</arg_value>\s*)?)</tool_call>",
        re.DOTALL,
    ),
    re.compile(r"(?P<error></?tool_call>)"),
    _read_values(_ARGUMENT, _GLM),
)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_xml(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        values = "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"

    return "\n".join(map(each, calls))


def _write_glm(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        values = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{values}</tool_call>"

    return "\n".join(map(each, calls))


# --- JSON without tags around it

_LLAMA = '{"name": "name", "parameters": {"argument": "value"}}'
_MISTRAL = '[TOOL_CALLS][{"name": "name", "arguments": {"argument": "value"}}]'
_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;]*")
_ARGS = re.compile(r"\s*(?P<name>[\w.:-]+)(?:\[CALL_ID\](?P<id>\w*))?(?:\[ARGS\]|\s*(?=\{))")


def _scan_llama(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
    """The whole reply, or what comes after <|python_tag|>."""
    del tools
    tag = text.find(_TAG)
    at = len(text) - len(text.lstrip()) if tag < 0 else tag
    begin = at if tag < 0 else tag + len(_TAG)
    objects = list(_objects(text, begin))
    whole = bool(objects) and not text[objects[-1][1] :].strip(" ;\n")
    if not whole or not all(isinstance(o, dict) and _names_call(o) for _, _, o in objects):
        return [] if tag < 0 else [(tag, len(text), f"{_TAG} without a call after it; expected {_LLAMA}")]
    begins = [at, *(end for _, end, _ in objects[:-1])]
    ends = [*(end for _, end, _ in objects[:-1]), len(text)]
    calls = [_explained(_LLAMA, read_object(each, _LLAMA)) for _, _, each in objects]
    return list(zip(begins, ends, calls, strict=True))


def _names_call(value: Mapping[str, Any]) -> bool:
    return "name" in value and ("parameters" in value or "arguments" in value)


def _objects(text: str, at: int) -> Iterator[tuple[int, int, Any]]:
    """JSON values one after another, separated by semicolons or white space."""
    while at < len(text):
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        end = json_end(text, at) if text[at : at + 1] == "{" else None
        if end is None:
            return
        try:
            yield at, end, read_json(text[at:end], _LLAMA)
        except ValueError:
            return
        at = end


def _scan_mistral(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
    """After [TOOL_CALLS] a list of objects, or a name and its arguments (later models)."""
    del tools
    found, mark = list[Found](), "[TOOL_CALLS]"
    begin = text.find(mark)
    while begin >= 0:
        at, named = begin + len(mark), _ARGS.match(text, begin + len(mark))
        start = named.end() if named else skip_space(text, at)
        end = json_end(text, start)
        following = text.find(mark, end or at)
        if end is None:
            end = following if following >= 0 else len(text)
            found.append((begin, end, f"{mark} without a call after it; expected {_MISTRAL}"))
        else:
            found += _read_mistral(begin, end, text[start:end], named)
        begin = following
    return found


def _read_mistral(begin: int, end: int, body: str, named: re.Match[str] | None) -> list[Found]:
    try:
        value = read_json(body, _MISTRAL)
    except ValueError as error:
        return [(begin, end, str(error))]
    if named:
        return [(begin, end, make_call(named["name"], value, named["id"] or "", _MISTRAL))]
    calls = value if isinstance(value, list) else [value]
    found = [_explained(_MISTRAL, read_object(call, _MISTRAL)) for call in calls]
    return [(begin, end, None), *((end, end, each) for each in found)]


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(
        json.dumps({"name": c.name, "parameters": dict(c.arguments)}, ensure_ascii=False) for c in calls
    )


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    objects = [
        {"name": c.name, "arguments": dict(c.arguments), "id": _short_id(c.name, i)}
        for i, c in enumerate(calls)
    ]
    return f"[TOOL_CALLS]{json.dumps(objects, ensure_ascii=False)}"


# --- a list of calls in Python

_PYTHONIC = '[name(argument="value")]'
_LIST = re.compile(
    r"\s*(?:<\|python_tag\|>|<\|tool_call_start\|>)?\s*(?P<list>\[\s*[A-Za-z_][\w.]*\(.*\])\s*(?:<\|tool_call_end\|>)?",
    re.DOTALL,
)
_NAMES = {"true": True, "false": False, "null": None}


def _scan_pythonic(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
    """A reply that begins with a list of calls."""
    del tools
    match = _LIST.match(text)
    if match is None:
        return []
    try:
        calls = _python_calls(match["list"])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())[:100]
        return [(0, match.end(), f"not a list of calls ({reason}); expected {_PYTHONIC}")]
    return [(0, match.end(), None), *((match.end(), match.end(), call) for call in calls)]


def _python_calls(text: str) -> list[ToolCall]:
    """Raises SyntaxError, ValueError: not a list of calls with named literals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escapes in strings
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:  # templates and models write line breaks into strings
            tree = ast.parse(text.replace("\n", "\\n"), mode="eval").body
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("arguments need names")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            value = _literal(keyword.value)
            arguments |= value if keyword.arg is None else {keyword.arg: value}
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        calls.append(ToolCall(ast.unparse(node.func), arguments))
    return calls


def _literal(node: ast.expr) -> Any:
    for each in ast.walk(node):
        if isinstance(
            each, ast.List | ast.Tuple | ast.Dict | ast.Constant | ast.UnaryOp | ast.unaryop | ast.Load
        ):
            continue
        if not isinstance(each, ast.Name) or each.id not in _NAMES:
            raise ValueError(f"{ast.unparse(node)[:40]} is no literal")
    return ast.literal_eval(_Names().visit(node))


class _Names(ast.NodeTransformer):
    """JSON's true, false and null."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id])


def _write_pythonic(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        named = [f"{k}={v!r}" for k, v in call.arguments.items() if k.isidentifier()]
        others = {k: v for k, v in call.arguments.items() if not k.isidentifier()}
        return f"{call.name}({', '.join(named + ([f'**{others!r}'] if others else []))})"

    return f"[{', '.join(map(each, calls))}]"


FORMS: dict[str, Form] = {
    "hermes": Form(scan_hermes, lambda calls: write_calls(calls, "hermes"), HERMES),
    "tags": Form(scan_tags, lambda calls: write_calls(calls, "tags"), "<name>input</name>"),
    "qwen_xml": Form(_scan_xml, _write_xml, _XML),
    "glm": Form(_scan_glm, _write_glm, _GLM),
    "llama": Form(_scan_llama, _write_llama, _LLAMA, (_TAG,)),
    "mistral": Form(_scan_mistral, _write_mistral, _MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "deepseek": Form(
        _scan_deepseek, _write_deepseek, _DEEPSEEK,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁calls▁end｜>"),
    ),
    "kimi": Form(
        _scan_kimi, _write_kimi, _KIMI,
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        _kimi_id,
    ),
    "pythonic": Form(
        _scan_pythonic, _write_pythonic, _PYTHONIC, (_TAG, "<|tool_call_start|>", "<|tool_call_end|>")
    ),
}  # fmt: skip
MARKERS = frozenset(marker for form in FORMS.values() for marker in form.markers)

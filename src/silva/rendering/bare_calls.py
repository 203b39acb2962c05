"""Calls as JSON or Python without tags around each part: Llama, Mistral, and lists of calls in Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from silva.rendering.tool_calls import Found, json_end, make_call, read_json, read_object, skip_space
from silva.types import ToolCall, ToolSpec


def short_id(name: str, number: int) -> str:
    return f"call{number:05}"


def explained(example: str, found: ToolCall | str) -> ToolCall | str:
    return found if isinstance(found, ToolCall) else f"{found}; expected {example}"


LLAMA = '{"name": "name", "parameters": {"argument": "value"}}'
MISTRAL = '[TOOL_CALLS][{"name": "name", "arguments": {"argument": "value"}}]'
TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;]*")
_ARGS = re.compile(r"\s*(?P<name>[\w.:-]+)(?:\[CALL_ID\](?P<id>\w*))?(?:\[ARGS\]|\s*(?=\{))")


def scan_llama(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
    """The whole reply, or what comes after <|python_tag|>."""
    del tools
    tag = text.find(TAG)
    at = len(text) - len(text.lstrip()) if tag < 0 else tag
    begin = at if tag < 0 else tag + len(TAG)
    objects = list(_objects(text, begin))
    whole = bool(objects) and not text[objects[-1][1] :].strip(" ;\n")
    if not whole or not all(isinstance(o, dict) and _names_call(o) for _, _, o in objects):
        return [] if tag < 0 else [(tag, len(text), f"{TAG} without a call after it; expected {LLAMA}")]
    begins = [at, *(end for _, end, _ in objects[:-1])]
    ends = [*(end for _, end, _ in objects[:-1]), len(text)]
    calls = [explained(LLAMA, read_object(each, LLAMA)) for _, _, each in objects]
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
            yield at, end, read_json(text[at:end], LLAMA)
        except ValueError:
            return
        at = end


def scan_mistral(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
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
            found.append((begin, end, f"{mark} without a call after it; expected {MISTRAL}"))
        else:
            found += _read_mistral(begin, end, text[start:end], named)
        begin = following
    return found


def _read_mistral(begin: int, end: int, body: str, named: re.Match[str] | None) -> list[Found]:
    try:
        value = read_json(body, MISTRAL)
    except ValueError as error:
        return [(begin, end, str(error))]
    if named:
        return [(begin, end, make_call(named["name"], value, named["id"] or "", MISTRAL))]
    calls = value if isinstance(value, list) else [value]
    found = [explained(MISTRAL, read_object(call, MISTRAL)) for call in calls]
    return [(begin, end, None), *((end, end, each) for each in found)]


def write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(
        json.dumps({"name": c.name, "parameters": dict(c.arguments)}, ensure_ascii=False) for c in calls
    )


def write_mistral(calls: Sequence[ToolCall]) -> str:
    objects = [
        {"name": c.name, "arguments": dict(c.arguments), "id": short_id(c.name, i)}
        for i, c in enumerate(calls)
    ]
    return f"[TOOL_CALLS]{json.dumps(objects, ensure_ascii=False)}"


# --- a list of calls in Python

PYTHONIC = '[name(argument="value")]'
START = "<|tool_call_start|>"
_LIST = re.compile(
    r"(?:(?P<start><\|tool_call_start\|>)\s*|\A\s*(?:<\|python_tag\|>\s*)?)"
    r"(?P<list>\[\s*[A-Za-z_][\w.]*\((?:(?!<\|tool_call_(?:start|end)\|>).)*\])?\s*(?:<\|tool_call_end\|>)?",
    re.DOTALL,
)
_NAMES = {"true": True, "false": False, "null": None}


def scan_pythonic(text: str, tools: Sequence[ToolSpec]) -> list[Found]:
    """A list of calls that begins the reply, or stands after <|tool_call_start|> (LFM2)."""
    del tools
    found = list[Found]()
    for match in _LIST.finditer(text):
        begin, end = match.span()
        if match["list"] is None:
            if match["start"]:
                found.append((begin, end, f"{START} without a list of calls after it; expected {PYTHONIC}"))
            continue
        try:
            calls = _python_calls(match["list"])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = " ".join(str(error).split())[:100]
            found.append((begin, end, f"not a list of calls ({reason}); expected {PYTHONIC}"))
        else:
            found += [(begin, end, None), *((end, end, call) for call in calls)]
    return found


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


def write_pythonic(calls: Sequence[ToolCall]) -> str:
    def each(call: ToolCall) -> str:
        named = [f"{k}={v!r}" for k, v in call.arguments.items() if k.isidentifier()]
        others = {k: v for k, v in call.arguments.items() if not k.isidentifier()}
        return f"{call.name}({', '.join(named + ([f'**{others!r}'] if others else []))})"

    return f"[{', '.join(map(each, calls))}]"

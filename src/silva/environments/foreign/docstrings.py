"""Docstrings in Google's style: what they say of an argument goes into its schema, as in transformers."""

from __future__ import annotations

import re
from typing import Any

from silva.types import ToolSpec

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s{2,}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def described(tool: Any) -> Any:
    """The tool, its arguments with what the docstring says of them, its description without that."""
    spec = tool.spec
    about, arguments = parsed(spec.description)
    properties = spec.parameters.get("properties", {})
    added = {
        name: {**schema, "description": arguments[name]}
        if name in arguments and "description" not in schema
        else schema
        for name, schema in properties.items()
    }
    parameters = {**spec.parameters, "properties": added} if properties else spec.parameters
    tool.spec = ToolSpec(spec.name, about or spec.description, parameters)
    return tool


def parsed(docstring: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and what is said of each argument."""
    first = _SECTION.search(docstring)
    if first is None:
        return docstring.strip(), {}
    arguments: dict[str, str] = {}
    for section in _SECTION.finditer(docstring):
        if section[1] in ("Args", "Arguments"):
            following = _SECTION.search(docstring, section.end())
            body = docstring[section.end() : following.start() if following else None]
            arguments.update(_arguments(body))
    return docstring[: first.start()].strip(), arguments


def _arguments(body: str) -> dict[str, str]:
    lines = [line for line in body.splitlines() if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        matched = _ARGUMENT.match(line) if indent == margin else None
        if matched:
            name = matched[1]
            found[name] = matched[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found

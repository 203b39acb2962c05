"""Problems in words: where a value was given, what was got, what was expected, the nearest valid key.

Translates pydantic's errors.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from silva.config import field_types
from silva.config.field_types import Key, dotted, show
from silva.config.foreign import NEAREST
from silva.config.tree import Text, Tree, walk
from silva.errors import ConfigError

SECRET_WORDS = frozenset({"token", "key", "password", "passwd", "secret", "apikey"})
COLUMNS = {"id_key", "title_key", "text_key"}  # of a corpus: names of columns
OWN = 'your own as "file.py:Class" or "package.module:Class"'
OWN_FUNCTION = 'your own as "file.py:function" or "package.module:function"'
_MISSING: Any = object()


@dataclass(frozen=True)
class ConfigProblem:
    path: Key
    message: str
    origin: str = ""
    got: str | None = None


def config_error(problems: Sequence[ConfigProblem]) -> ConfigError:
    """All problems as one message, two lines each."""
    lines = [] if len(problems) == 1 else [f"{len(problems)} problems in the configuration:"]
    for problem in problems:
        where = f"{problem.origin}: " if problem.origin else ""
        got = f" = {problem.got}" if problem.got is not None else ""
        lines += [f"{where}{dotted(problem.path)}{got}", f"    {problem.message}"]
    return ConfigError("\n".join(lines))


def secrets(tree: Tree) -> list[ConfigProblem]:
    """Keys that look like secrets: a saved configuration must never hold one. Values are not shown."""
    return [
        ConfigProblem(
            path,
            "looks like a secret, and a configuration is saved with the run; "
            f"set it in the environment or in .env ({path[-1].upper()}=...)",
            node.origin,
        )
        for path, node in walk(tree.root)
        if isinstance(node.value, str | Text) and isinstance(path[-1], str)
        if path[-1].lower().split("_")[-1] in SECRET_WORDS and path[-1] not in COLUMNS
    ]


def dates(tree: Tree) -> list[ConfigProblem]:
    """TOML has dates, the configuration has none; as text they would pass for strings."""
    return [
        ConfigProblem(path, "a date; text needs quotes", node.origin, str(node.value))
        for path, node in walk(tree.root)
        if isinstance(node.value, datetime.date | datetime.time)
    ]


def validation(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], tree: Tree
) -> list[ConfigProblem]:
    """Every pydantic error as a problem; alternatives of one value ("an integer or a list") are one."""
    problems: dict[Key, ConfigProblem] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        if kind == "json_invalid":  # the data was made by json.dumps: only half a surrogate pair gets here
            return [ConfigProblem(("configuration",), "a text in it is not valid Unicode")]
        path, annotation, parent = _locate(model, data, item["loc"])
        if kind.startswith("union_tag"):
            path = (*path, "type")
        value = _lookup(data, path)
        if path in problems or (kind == "too_short" and len(value) >= item["ctx"]["min_length"]):
            continue  # pydantic leaves bad elements out when it counts
        node = tree.at(path)
        bare = node is not None and isinstance(node.value, Text) and node.value.bare
        if kind == "extra_forbidden":
            message = unknown_key(model, parent, path, data)
        elif kind.startswith("union_tag"):
            message = _unknown_type(annotation, path, value)
        else:
            message = _mismatch(item, annotation, path, bare)
        hidden = value is _MISSING or bare or (kind == "value_error" and isinstance(value, dict | list))
        problems[path] = ConfigProblem(path, message, tree.origin(path), None if hidden else show(value))
    return list(problems.values())


def _mismatch(item: Any, annotation: Any, path: Key, bare: bool) -> str:
    kind, value = item["type"], item.get("input")
    expected = field_types.describe(annotation)
    if kind in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"])
    if path == ("environments",) and kind == "too_long":
        return (
            f"expected at most {item['ctx']['max_length']} tables: each is evaluated on its own; many "
            "variants of an environment are tasks of one"
        )
    if kind == "missing":
        return f"missing; expected {expected}" if expected else "missing"
    if not expected:
        return f"{item['msg'][:1].lower()}{item['msg'][1:]}"
    if bare:
        return f"got no value, expected {expected}"
    choices = [choice for choice in field_types.literals(annotation) if isinstance(choice, str)]
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type") and not choices:
        return f"got text, expected {expected}"
    near = difflib.get_close_matches(str(value), choices, 1)
    return f"expected {expected}" + (f"; did you mean {show(near[0])}?" if near else "")


def _unknown_type(annotation: Any, path: Key, value: Any) -> str:
    known = [name for model in field_types.sections(annotation) if (name := field_types.tag(model))]
    of_parts = path[0] in ("environments", "algorithm", "rollout") and len(path) <= 3
    own = f", or {OWN}" if of_parts else f", or {OWN_FUNCTION}" if "function" in known else ""
    names = ", ".join(show(name) for name in known) + own
    if value is _MISSING:
        return f"missing; expected one of {names}"
    near = difflib.get_close_matches(str(value).lower(), known, 1)
    return f"unknown type; {f'did you mean {show(near[0])}? ' if near else ''}known: {names}"


def unknown_key(model: type[BaseModel], parent: Any, path: Key, data: Any) -> str:
    """The nearest valid keys: in the section, in the other variants of its union, anywhere else."""
    name = str(path[-1])
    if path == ("extends",):
        return "only a file extends others; give it as @ file.toml"
    section = field_types.pick(parent, _lookup(data, (*path[:-1], "type")))
    owners = [variant for variant in field_types.sections(parent) if name in variant.model_fields]
    if owners and section is not None:
        types = " or ".join(show(field_types.tag(owner)) for owner in owners)
        where = dotted(path[:-1])
        return (
            f"unknown key: it belongs to {where}.type = {types}, and this is {show(field_types.tag(section))}"
        )
    siblings = list(section.model_fields) if section is not None else []
    near = [dotted((*path[:-1], key)) for key in difflib.get_close_matches(name, siblings, 1, 0.5)]
    if not difflib.get_close_matches(name, siblings, 1, 0.75):
        if name in NEAREST and not any(key[-1] == name for key, _, _ in field_types.fields(model)):
            return f"unknown key; Silva's nearest is {NEAREST[name]}"
        near = elsewhere(model, path) or near
    return f"unknown key; did you mean {' or '.join(near)}?" if near else (
        f"unknown key; valid here: {', '.join(siblings)}"
    )  # fmt: skip


def elsewhere(model: type[BaseModel], path: Key) -> list[str]:
    """Up to three keys of the same or almost the same name in other sections, nearest sections first."""
    places = dict.fromkeys(key for key, _, _ in field_types.fields(model))
    near = difflib.get_close_matches(str(path[-1]), {str(key[-1]) for key in places}, 1, 0.85)

    def distance(key: Key) -> tuple[int, int]:
        return -sum(a == b for a, b in zip(key, path, strict=False)), len(key)

    return [dotted(key) for key in sorted((key for key in places if key[-1] in near), key=distance)[:3]]


def _locate(model: type[BaseModel], data: Any, location: Sequence[str | int]) -> tuple[Key, Any, Any]:
    """Turn a pydantic location, which names variants of unions too, into (path, annotation of the value,
    annotation of its parent)."""
    path: Key = ()
    annotation: Any = model
    parent: Any = None
    value: Any = data
    tagged: Key | None = None  # the union whose variant has been named
    for part in location:
        if tagged != path and len(field_types.sections(annotation)) > 1 and part == _lookup(value, ("type",)):
            tagged = path
            continue
        below = None
        if isinstance(value, dict):
            section = field_types.pick(annotation, value.get("type"))
            below = section.model_fields.get(str(part)) if section is not None else None
            if below is None and part not in value:
                break
        elif isinstance(part, int) and isinstance(value, list):
            below = field_types.element(annotation, part)
        else:
            break  # a member of a union of plain types
        path, parent, annotation, value = (*path, part), annotation, below, _lookup(value, (part,))
    return path, annotation, parent


def _lookup(value: Any, path: Key) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value

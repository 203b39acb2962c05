"""Problems in words: where a value was given, what was got, what was expected, the nearest valid key.

Translates pydantic's errors. Their locations name union variants as well as keys; `_locate` walks the
model beside the data to tell the two apart.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from silva.config import shape
from silva.config.layers import Layer, Problem, Text
from silva.config.shape import Key, dotted, show
from silva.errors import ConfigError

SECRET_WORDS = frozenset({"token", "key", "password", "passwd", "secret", "apikey"})


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """All problems as one message, two lines each."""
    lines = [] if len(problems) == 1 else [f"{len(problems)} problems in the configuration:"]
    for problem in problems:
        where = f"{problem.origin}: " if problem.origin else ""
        got = f" = {problem.got}" if problem.got is not None else ""
        lines += [f"{where}{dotted(problem.path)}{got}", f"    {problem.message}"]
    return ConfigError("\n".join(lines))


def secrets(layer: Layer) -> list[Problem]:
    """Keys that look like secrets: a saved configuration must never hold one. Values are not shown."""
    problems = []
    for path in _text_keys(layer.data, ()):
        if str(path[-1]).lower().split("_")[-1] in SECRET_WORDS:
            name = str(path[-1]).upper()
            message = (
                f"looks like a secret, and a configuration is saved with the run; "
                f"set it in the environment or in .env ({name}=...)"
            )
            problems.append(Problem(path, message, layer.origin(path)))
    return problems


def _text_keys(value: Any, path: Key) -> Iterable[Key]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        here = (*path, key)
        if isinstance(item, str | Text) and not isinstance(key, int):
            yield here
        yield from _text_keys(item, here)


def dates(layer: Layer) -> list[Problem]:
    """TOML has dates, the configuration has none; as text they would pass for strings."""
    problems: list[Problem] = []

    def walk(value: Any, path: Key) -> None:
        if isinstance(value, dict | list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                walk(item, (*path, key))
        elif isinstance(value, datetime.date | datetime.time):
            problems.append(Problem(path, "a date; text needs quotes", layer.origin(path), str(value)))

    walk(layer.data, ())
    return problems


def validation(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any],
               raw: Layer) -> list[Problem]:  # fmt: skip
    """Every pydantic error as a problem; alternatives of one value ("an integer or a list") are one."""
    problems: dict[Key, Problem] = {}
    for item in error.errors(include_url=False):
        path, annotation, parent = _locate(model, data, item["loc"])
        kind = item["type"]
        if kind == "json_invalid":  # the data was made by json.dumps: only half a surrogate pair gets here
            return [Problem(("configuration",), "a text in it is not valid Unicode")]
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, "type")
        value = _lookup(data, path)
        if path in problems or (kind == "too_short" and len(value) >= item["ctx"]["min_length"]):
            continue  # pydantic leaves bad elements out when it counts
        if kind == "extra_forbidden":
            message = unknown_key(model, parent, path, data)
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            message = _unknown_type(annotation, path, value)
        elif kind == "missing":
            expected = shape.describe(annotation)
            message = f"missing{'; expected ' + expected if expected else ''}"
            if path == ("environments",):
                message = "missing; expected at least one [[environments]] table with a type"
        elif kind == "too_short" and path == ("environments",):
            message = "expected at least one [[environments]] table with a type"
        elif kind == "too_long" and path == ("environments",):
            message = (
                f"expected at most {item['ctx']['max_length']} tables: each is evaluated on its own; many "
                "variants of a world are tasks of one"
            )
        else:
            message = _mismatch(item, annotation, _text(raw.data, path))
        text = _text(raw.data, path)
        got = None if value is _MISSING or (text and text.bare) else show(value)
        if kind == "value_error" and isinstance(value, dict | list):
            got = None
        problems[path] = Problem(path, message, raw.origin(path), got)
    return list(problems.values())


_MISSING: Any = object()


def _mismatch(item: Any, annotation: Any, text: Text | None) -> str:
    if item["type"] in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"])
    expected = shape.describe(annotation) if annotation is not None else ""
    if not expected:
        return f"{item['msg'][:1].lower()}{item['msg'][1:]}"
    if text is not None and text.bare:
        return f"got no value, expected {expected}"
    choices = [value for value in shape.literals(annotation) if isinstance(value, str)]
    if (
        isinstance(item.get("input"), str)
        and item["type"] in ("int_type", "float_type", "bool_type")
        and not choices
    ):
        return f"got text, expected {expected}"
    near = difflib.get_close_matches(str(item.get("input")), choices, 1)
    return f"expected {expected}" + (f"; did you mean {show(near[0])}?" if near else "")


def _unknown_type(annotation: Any, path: Key, value: Any) -> str:
    known = [name for model in shape.sections(annotation) if (name := shape.tag(model))]
    names = ", ".join(show(name) for name in known)
    own = ', or your own as "file.py:Class" or "package.module:Class"' if path[0] == "environments" else ""
    if value is _MISSING:
        return f"missing; expected one of {names}{own}"
    near = difflib.get_close_matches(str(value), known, 1)
    return f"unknown type; {f'did you mean {show(near[0])}? ' if near else ''}known: {names}{own}"


def unknown_key(model: type[BaseModel], parent: Any, path: Key, data: Any) -> str:
    """The nearest valid keys: in the section, in the other variants of its union, anywhere else."""
    name = str(path[-1])
    if path == ("extends",):
        return "only a file extends others; give it as @ file.toml"
    section = shape.pick(parent, _lookup(data, path[:-1])) if parent is not None else None
    owners = [variant for variant in shape.sections(parent) if name in variant.model_fields] if parent else []
    if owners and section is not None:
        types = " or ".join(show(shape.tag(owner)) for owner in owners)
        where = dotted(path[:-1])
        return f"unknown key: it belongs to {where}.type = {types}, and this is {show(shape.tag(section))}"
    siblings = list(section.model_fields) if section is not None else []
    near = difflib.get_close_matches(name, siblings, 1, 0.75)
    if not near:
        others = elsewhere(model, path)
        if others:
            return f"unknown key; did you mean {' or '.join(others)}?"
        near = difflib.get_close_matches(name, siblings, 1, 0.5)
    if near:
        return f"unknown key; did you mean {dotted((*path[:-1], near[0]))}?"
    return f"unknown key; valid here: {', '.join(siblings)}"


def elsewhere(model: type[BaseModel], path: Key) -> list[str]:
    """Up to three keys of the same or almost the same name in other sections, nearest sections first."""
    places = {key: owner for key, _, owner in shape.fields(model)}
    names = {str(key[-1]) for key in places}
    near = difflib.get_close_matches(str(path[-1]), names, 1, 0.85)
    found = [key for key in places if near and key[-1] == near[0]]

    def distance(key: Key) -> tuple[int, int]:
        shared = sum(a == b for a, b in zip(key, path, strict=False))
        return -shared, len(key)

    return [dotted(key) for key in sorted(found, key=distance)[:3]]


def _locate(model: type[BaseModel], data: Any, location: Sequence[str | int]) -> tuple[Key, Any, Any]:
    """Turn a pydantic location into (path, annotation of the value, annotation of its parent)."""
    path: Key = ()
    annotation: Any = model
    parent: Any = None
    value: Any = data
    skipped = False  # the variant's name that follows a union's own place
    for part in location:
        variants = shape.sections(annotation) if annotation is not None else []
        if len(variants) > 1 and not skipped and part in [shape.tag(each) for each in variants]:
            skipped = True
            continue
        if isinstance(value, dict):
            section = shape.pick(annotation, value) if variants else None
            field = section.model_fields.get(str(part)) if section is not None else None
            if field is None and part not in value:
                break
            parent, annotation = annotation, shape.annotation_of(field) if field is not None else None
        elif isinstance(part, int) and isinstance(value, list):
            parent, annotation = annotation, shape.element(annotation, part)
        else:
            break  # a member of a union of plain types
        path = (*path, part)
        value = _lookup(value, (part,))
        skipped = False
    return path, annotation, parent


def _lookup(value: Any, path: Key) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def _text(raw: Any, path: Key) -> Text | None:
    value = _lookup(raw, path)
    return value if isinstance(value, Text) else None

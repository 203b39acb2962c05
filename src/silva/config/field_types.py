"""Reading pydantic annotations: which sections a field holds, what it accepts, how to say so in words.

Checking, explaining, help and JSON Schema all read the models through this file.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from silva.errors import shorten

Key = tuple[str | int, ...]  # path of a value: ("environments", 0, "size")
Model = type[BaseModel]
NULL = type(None)
NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table",
         NULL: "null"}  # fmt: skip
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def options(annotation: Any) -> list[tuple[Any, list[Any]]]:
    """What a field or annotation may be, each as (type, its constraints); a plain type is one option."""
    constraints: list[Any] = []
    if isinstance(annotation, FieldInfo):  # pydantic keeps annotation and constraints apart
        annotation, constraints = annotation.annotation, annotation.metadata
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        constraints = [item for each in extra for item in getattr(each, "metadata", [each])]
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in options(member)]
    return [(annotation, constraints)]


def sections(annotation: Any) -> list[Model]:
    """The models a value may be: several for a union on `type`, none for a plain value."""
    return [kind for kind, _ in options(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def held(field: FieldInfo) -> list[Model]:
    """The models in a field, or in the elements of a list."""
    return sections(field) or sections(element(field, 0))


def accepts(annotation: Any, *kinds: type) -> bool:
    return any(kind in kinds for kind, _ in options(annotation))


def literals(annotation: Any) -> list[Any]:
    """Values of every `Literal` in the annotation."""
    found = [kind for kind, _ in options(annotation) if get_origin(kind) is Literal]
    return [value for kind in found for value in get_args(kind)]


def element(annotation: Any, index: int) -> Any | None:
    """Annotation of one element of a list field; None where the field is not a list."""
    for kind, _ in options(annotation):
        inner = get_args(kind)
        if get_origin(kind) in (tuple, list) and inner:
            if get_origin(kind) is list or inner[-1] is Ellipsis:
                return inner[0]
            return inner[index] if index < len(inner) else None
    return None


def tag(model: Model) -> str | None:
    """The value of `type` that picks this model; None where it has none."""
    values = literals(model.model_fields.get("type"))
    return values[0] if values else None


def default_tag(annotation: Any) -> str | None:
    """The `type` that a section in this field takes where it names none."""
    return getattr(annotation.default, "type", None) if isinstance(annotation, FieldInfo) else None


def pick(annotation: Any, chosen: Any) -> Model | None:
    """The model a table is checked against: the only one, or the one that its `type` names."""
    models = sections(annotation)
    return models[0] if len(models) == 1 else next((model for model in models if tag(model) == chosen), None)


def spelt_out(annotation: Any, text: str) -> Any:
    """The table for which a text is short where only sections with types may stand: "math" is
    {type = "math"}, and "file.py:name" is {type = "function", function = "file.py:name"}."""
    models = sections(annotation)
    if not models or len(models) < len(options(annotation)) or not all(map(tag, models)):
        return text
    if ":" in text and pick(annotation, "function") is not None:
        return {"type": "function", "function": text}
    return {"type": text}


def fields(model: Model, prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo, Model]]:
    """Every key below a model, through all variants: (path, field, model it belongs to)."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field, model
        for child in held(field):
            yield from fields(child, path if sections(field) else (*path, 0))


def describe(annotation: Any) -> str:
    """What the annotation accepts, in words; "" where there is no short way to say it."""
    models = sections(annotation)
    parts = [_describe(*option) for option in options(annotation) if option[0] not in models]
    if not all(parts):
        return ""
    return " or ".join((["a section (table)"] if models else []) + sorted(parts, key="null".__eq__))


def _describe(kind: Any, constraints: list[Any]) -> str:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in NAMES:
        bounds = [f"{sign} {show(bound)}" for item in constraints for name, sign in SIGNS.items()
                  if (bound := getattr(item, name, None)) is not None]  # fmt: skip
        if any(getattr(item, "min_length", None) == 1 for item in constraints):
            bounds.append("that is not empty")
        patterns = filter(None, [getattr(item, "pattern", None) for item in constraints])
        bounds += [f"that matches {pattern}" for pattern in patterns]
        return f"{NAMES[origin]} {' and '.join(bounds)}".rstrip()
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(show(value) for value in inner)
    if origin not in (tuple, list) or not inner:
        return ""
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)}: " + ", ".join(describe(each) for each in inner)
    if sections(inner[0]):
        return "a list of tables"
    each = describe(inner[0])
    return f"a list, each {each}" if each else "a list"


def show(value: Any, limit: int = 70) -> str:
    """A value as an error or help shows it. Tables stay closed, so that nothing private is echoed."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        if any(isinstance(item, dict | BaseModel) for item in value):
            return f"a list of {len(value)} table{'s' if len(value) != 1 else ''}"
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, float):
        text = number(value)
    elif value is None or isinstance(value, bool | int | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return shorten(text, limit)


def number(value: float) -> str:
    """The shortest text that reads back as this float, in JSON-like form: 1e-5, 0.5, inf."""
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def default_of(field: FieldInfo) -> Any:
    """The default as plain data; PydanticUndefined where the key must be given."""
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    return value if value is PydanticUndefined else plain(value)


def refuse_idle(section: BaseModel, idle: Mapping[str, str], *others: type[BaseModel]) -> None:
    """Raise ValueError for a key that does nothing beside the others, unless it has its default value.

    Args:
        idle: such keys, and why.
        others: sections whose defaults count too.
    """
    for key, why in idle.items():
        usual = {repr(default_of(of.model_fields[key])) for of in (type(section), *others)}
        if repr(plain(value := getattr(section, key))) not in usual:
            raise ValueError(f"{key}: got {plain(value)!r}, which does nothing with {why}; leave it out")


def plain(value: Any) -> Any:
    """Models to dicts, tuples to lists: what TOML and JSON can hold."""
    return to_jsonable_python(value, inf_nan_mode="constants", fallback=str)


def leaves(value: Any, path: Key = ()) -> dict[Key, Any]:
    """All values by path: what is neither a table nor a list of tables."""
    items: Any = ()
    if isinstance(value, dict) and (value or not path):
        items = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = enumerate(value)
    elif path:
        return {path: value}
    return {leaf: found for key, item in items for leaf, found in leaves(item, (*path, key)).items()}

"""Reading pydantic annotations: which sections a field holds, what it accepts, how to say so in words.

The explaining layer, help and the merge all walk the same models; this file is what they share.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Key = tuple[str | int, ...]  # path of a value: ("environments", 0, "size")
Model = type[BaseModel]
SEQUENCES = (tuple, list)


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def annotation_of(field: FieldInfo) -> Any:
    """The field's annotation with its constraints put back (pydantic keeps them apart)."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def options(annotation: Any) -> list[Any]:
    """Members of the union, each possibly `Annotated`; a plain type is a union of one."""
    core = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(core) in (Union, types.UnionType):
        return [inner for member in get_args(core) for inner in options(member)]
    return [annotation]


def core_of(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def sections(annotation: Any) -> list[Model]:
    """The models a value may be: several for a union on `type`, none for a plain value."""
    cores = [core_of(option) for option in options(annotation)]
    return [core for core in cores if isinstance(core, type) and issubclass(core, BaseModel)]


def is_optional(annotation: Any) -> bool:
    return any(core_of(option) in (None, type(None)) for option in options(annotation))


def accepts(annotation: Any, kind: type) -> bool:
    return any(core_of(option) is kind for option in options(annotation))


def literals(annotation: Any) -> list[Any]:
    """Values of every `Literal` in the annotation."""
    cores = [core_of(option) for option in options(annotation)]
    return [value for core in cores if get_origin(core) is Literal for value in get_args(core)]


def element(annotation: Any, index: int) -> Any | None:
    """Annotation of one element of a list field; None where the field is not a list."""
    for option in options(annotation):
        core = core_of(option)
        arguments = get_args(core)
        if get_origin(core) in SEQUENCES and arguments:
            if get_origin(core) is list or arguments[-1] is Ellipsis:
                return arguments[0]
            return arguments[index] if index < len(arguments) else None
    return None


def tag(model: Model) -> str | None:
    """The value of `type` that picks this model; None where it has none."""
    field = model.model_fields.get("type")
    values = literals(field.annotation) if field else []
    return values[0] if values else None


def default_tag(field: FieldInfo) -> str | None:
    """The `type` a section takes where it names none."""
    return getattr(field.default, "type", None) if isinstance(field.default, BaseModel) else None


def pick(annotation: Any, value: Any) -> Model | None:
    """The model a table is checked against: the only one, or the one its `type` names."""
    models = sections(annotation)
    if len(models) == 1:
        return models[0]
    chosen = value.get("type") if isinstance(value, dict) else None
    return next((model for model in models if tag(model) == chosen), None)


def fields(model: Model, prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo, Model]]:
    """Every key below a model, through all variants: (path, field, model it belongs to)."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field, model
        inner = element(field.annotation, 0)
        children = sections(inner) if inner is not None else []
        for child in sections(field.annotation):
            yield from fields(child, path)
        for child in children:
            yield from fields(child, (*path, 0))


def describe(annotation: Any) -> str:
    """What the annotation accepts, in words; "" where there is no short way to say it."""
    parts: list[str] = []
    models = sections(annotation)
    if models:
        parts.append("a section (table)")
    for option in options(annotation):
        core = core_of(option)
        if core in models or core in (None, type(None)):
            continue
        text = _describe_one(option, core)
        if not text:
            return ""
        parts.append(text)
    if is_optional(annotation):
        parts.append("null")
    return " or ".join(parts)


def _describe_one(option: Any, core: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table"}
    if core in names:
        return names[core] + _bounds(option)
    if get_origin(core) is Literal:
        values = [show(value) for value in get_args(core)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if get_origin(core) is dict:
        return "a table"
    if get_origin(core) in SEQUENCES:
        arguments = get_args(core)
        if get_origin(core) is tuple and arguments[-1] is not Ellipsis:
            return f"a list of {len(arguments)}: " + ", ".join(describe(each) for each in arguments)
        if sections(arguments[0]):
            return "a list of tables"
        inner = describe(arguments[0])
        return f"a list, each {inner}" if inner else "a list"
    return ""


def _bounds(option: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found: list[str] = []
    if get_origin(option) is Annotated:
        for extra in get_args(option)[1:]:
            for item in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
                found += [f"{sign} {show(getattr(item, name))}" for name, sign in signs.items()
                          if getattr(item, name, None) is not None]  # fmt: skip
                if getattr(item, "min_length", None) == 1:
                    found.append("that is not empty")
    return " " + " and ".join(found) if found else ""


def show(value: Any, limit: int = 70) -> str:
    """A value as an error or help shows it. Tables stay closed, so that nothing private is echoed."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        if any(isinstance(item, dict | BaseModel) for item in value):
            return f"a list of {len(value)} tables" if len(value) != 1 else "a list of 1 table"
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, float):
        text = number(value)
    elif value is None or isinstance(value, bool | int | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def number(value: float) -> str:
    """The shortest text that reads back as this float, in JSON-like form: 1e-5, 0.5, inf."""
    if not math.isfinite(value):
        return str(value)
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def default_of(field: FieldInfo) -> Any:
    """The default as plain data; PydanticUndefined where the key must be given."""
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
    return plain(value) if value is not PydanticUndefined else value


def plain(value: Any) -> Any:
    """Models to dicts, tuples to lists: what TOML and JSON can hold."""
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

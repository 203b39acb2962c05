"""The help page of a command that takes a configuration: usage, an example, and every key."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from silva.config import shape
from silva.config.schema import Registries, run_config
from silva.config.shape import Key, Model, dotted

WIDTH = 110
_HOW = """\
Values: --section.key value, --section.key=value, --flag, --no-flag, JSON for lists and tables, null.
Order: command line > TOML files, left to right, each over its `extends` > SILVA_SECTION__KEY > defaults."""


def help_text(command: str, summary: str, example: str, registries: Registries, options: str = "") -> str:
    """The page `silva COMMAND --help` prints; `options` are those that are no keys. Imports no torch."""
    lines = [
        f"{command}: {summary}",
        "",
        f"usage:   {command} [@ file.toml ...] [--section.key value ...]",
        f"example: {example}",
        "",
        *([options, ""] if options else []),
        _HOW,
        "",
    ]
    page = _Page(lines, {})
    _section(page, run_config(registries), (), None)
    return "\n".join(page.lines).rstrip() + "\n"


@dataclass
class _Page:
    lines: list[str]
    shown: dict[Model, tuple[str, FieldInfo]]  # sections explained so far: title and the field holding them


def _section(
    page: _Page, model: Model, path: Key, holder: FieldInfo | None, hide: Collection[str] = ()
) -> None:
    """The keys of one section, then its subsections. `hide`: lines that stand above for all variants."""
    page.lines += [line for line in _keys(model, holder, path) if line not in hide]
    for name, field in model.model_fields.items():
        variants = _inner(field)
        here = (*path, name)
        title = ("[{}]" if shape.sections(field.annotation) else "[[{}]]").format(dotted(here))
        common: list[str] = []
        if len(variants) > 1:
            common = _shared([_keys(variant, field, here) for variant in variants])
            if common or field.description:
                page.lines += ["", _title(f"{title} of every type", field.description), *common]
        for variant in variants:
            if page.shown.get(variant, ("",))[0] == title:  # model.lora, in each variant of model
                continue
            page.lines += ["", _heading(title, field, variant, alone=len(variants) == 1)]
            if variant in page.shown:
                page.lines += _as_before(page.shown[variant], variant, field)
                continue
            page.shown[variant] = (title, field)
            _section(page, variant, here, field, common)


def _shared(variants: Sequence[Sequence[str]]) -> list[str]:
    """Lines to show once for all variants: keys that all have, as most have them. One with a default of
    its own still lists that key."""
    names = [{line.split(" = ")[0] for line in lines} for lines in variants]
    everywhere = set.intersection(*names)
    counts = Counter(line for lines in variants for line in lines if line.split(" = ")[0] in everywhere)
    return [line for line, count in counts.items() if count > len(variants) / 2]


def _heading(title: str, field: FieldInfo, variant: Model, *, alone: bool) -> str:
    tag = shape.tag(variant)
    if tag is not None:
        title += f' type = "{tag}"' + (" (default)" if tag == shape.default_tag(field) and not alone else "")
    if field.default is None:
        title += " (off unless given)"
    own = variant.__dict__.get("__doc__")
    return _title(title, (field.description or own) if alone else own)


def _title(title: str, about: str | None) -> str:
    return _wrap(f"{title}  {' '.join((about or '').split())}".rstrip(), indent=4)


def _as_before(seen: tuple[str, FieldInfo], model: Model, field: FieldInfo) -> list[str]:
    """A section shown before: where, and which defaults differ there."""
    title, other = seen
    before = _keys(model, other, ("",))
    changed = [line for line in _keys(model, field, ("",)) if line not in before]
    return [f"  as {title}" + (", but" if changed else ""), *changed]


def _keys(model: Model, holder: FieldInfo | None, path: Key) -> list[str]:
    default = holder.default if holder is not None else None
    lines = []
    for name, field in model.model_fields.items():
        if not _inner(field) and (name != "type" or not path):
            inside = isinstance(default, model)
            value = shape.plain(getattr(default, name)) if inside else shape.default_of(field)
            lines.append(_line(name, field, value))
    return lines


def _inner(field: FieldInfo) -> list[Model]:
    element = shape.element(field.annotation, 0)
    return shape.sections(field.annotation) or (shape.sections(element) if element is not None else [])


def _line(name: str, field: FieldInfo, default: Any) -> str:
    value = "required" if default is PydanticUndefined else shape.show(default, 44)
    choices = [item for item in shape.literals(field.annotation) if item != default]
    also = f"[or {', '.join(shape.show(item) for item in choices)}] " if choices else ""
    about = f"{also}{' '.join((field.description or '').split())}".strip()
    head = f"  {name} = {value}"
    return _wrap(f"{head:<40}  {about}".rstrip(), indent=42)


def _wrap(text: str, indent: int) -> str:
    if len(text) <= WIDTH:
        return text
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)

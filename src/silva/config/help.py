"""The help of a command that takes a configuration: an overview, one section, or every key.

silva rl --help                     usage, the keys at the top, a line for each section
silva rl --help trainer.optimizer   one section; "algorithm.ppo" is one type of it
silva rl --help all                 every key
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from silva.config import shape
from silva.config.explain import elsewhere
from silva.config.schema import UNIONS, Registries, RunConfig, run_config
from silva.config.shape import Key, Model, dotted
from silva.errors import ConfigError

WIDTH = 110
LONG = 60  # a section with a longer page lists its types without explaining them
_HOW = """\
Values: --section.key value, --section.key=value, --flag, --no-flag, JSON for lists and tables, null.
Order: command line > TOML files, left to right, each over its `extends` > SILVA_SECTION__KEY > defaults."""


def help_text(
    command: str, summary: str, example: str, registries: Registries, options: str = "", topic: str = ""
) -> str:
    """What `silva COMMAND --help TOPIC` prints. Imports no torch.

    Args:
        options: the options that are not keys.
        topic: "" for the overview, "all", or a dotted section, type or key.

    Raises:
        ConfigError: nothing has that name.
    """
    if topic and topic != "all":
        return "\n".join(_topic(registries, topic)).strip("\n") + "\n"
    page = _Page(
        [
            f"{command}: {summary}",
            "",
            f"usage:   {command} [@ file.toml ...] [--section.key value ...]",
            f"example: {example}",
            "",
            *([options, ""] if options else []),
            _HOW,
            "",
        ],
        {},
    )
    if topic:
        _section(page, run_config(registries), (), None)
    else:
        page.lines += _overview(command, registries)
    return "\n".join(page.lines).rstrip() + "\n"


def _overview(command: str, registries: Registries) -> list[str]:
    """The keys at the top and a line for each section. Reads only the names in the registries."""
    tags = {name: list(getattr(registries, table)) for name, table in UNIONS.items()}
    lines = [*_keys(RunConfig, None, (), hide=UNIONS), ""]
    for name, field in RunConfig.model_fields.items():
        if name not in UNIONS and not _inner(field):
            continue
        about = [" ".join((field.description or "").split()).rstrip(".")]
        names = tags.get(name) or [tag for model in _inner(field) if (tag := shape.tag(model))]
        if len(names) > 1:
            about.append(f"types: {', '.join(names)}")
        title = f"[[{name}]]" if name == "environments" else f"[{name}]"
        lines.append(_wrap(f"  {title:<18}{'; '.join(about)}", 20))
    return [
        *lines,
        "",
        f"{command} --help trainer.optimizer  one section, or one key",
        f"{command} --help algorithm.ppo      one type of a section",
        f"{command} --help all                every section",
    ]


def _topic(registries: Registries, topic: str) -> list[str]:
    """One section with those below it, one type of it, or one key."""
    names = [part for part in topic.replace("-", "_").split(".") if not part.isdecimal()]
    models: list[Model] = [_narrow(registries, names[0])]
    holder: FieldInfo | None = None
    path: Key = ()
    for depth, name in enumerate(names):
        chosen = [model for model in models if len(models) > 1 and shape.tag(model) == name]
        owners = [model for model in models if name in model.model_fields]
        if chosen:
            models = chosen
            continue
        if not owners:
            raise ConfigError(_unknown(registries, topic, name, models))
        field = owners[0].model_fields[name]
        if not _inner(field):
            if depth + 1 < len(names):
                raise ConfigError(f"--help {topic}: {name} is a key, with nothing below it")
            lines = [line for owner in owners for line in _keys(owner, holder, path)]
            found = dict.fromkeys(line for line in lines if line.startswith(f"  {name} = "))
            return [*([_bracketed(holder, path)] if holder else []), *found]
        models, holder, path = _inner(field), field, (*path, name)
    assert holder is not None
    page = _Page([], {})
    if len(models) < len(_inner(holder)):
        page.lines.append(_heading(_bracketed(holder, path), holder, models[0], alone=False))
        _section(page, models[0], path, holder)
        return page.lines
    _field(page, holder, path)
    if len(page.lines) > LONG and len(models) > 1:
        page = _Page([], {})
        common = _shared([_keys(variant, holder, path) for variant in models])
        page.lines += [_title(f"{_bracketed(holder, path)} of every type", holder.description), *common, ""]
        page.lines += [_heading(_bracketed(holder, path), holder, model, alone=False) for model in models]
        page.lines += ["", f"--help {dotted(path)}.{shape.tag(models[0])} shows all of one type."]
    return page.lines


def _narrow(registries: Registries, name: str) -> Model:
    """The model that explains one top-level key, built with as few variants as possible."""
    if name not in UNIONS:
        return RunConfig
    tables = {table: getattr(registries, table) for other, table in UNIONS.items() if other != name}
    firsts: dict[str, Any] = {table: dict([*items.items()][:1]) for table, items in tables.items()}
    return run_config(replace(registries, **firsts))


def _unknown(registries: Registries, topic: str, name: str, models: list[Model]) -> str:
    near = [f"{section}.{name}" for section, table in UNIONS.items() if name in getattr(registries, table)]
    near = near or elsewhere(run_config(registries), (name,))
    names = [*models[0].model_fields] if len(models) == 1 else [str(shape.tag(model)) for model in models]
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected all, or one of {', '.join(names)}"
    return f"--help {topic}: there is no section, type or key {name!r} here; {hint}"


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
        _field(page, field, (*path, name))


def _field(page: _Page, field: FieldInfo, path: Key) -> None:
    """The section or sections in a field, for every type."""
    variants, title = _inner(field), _bracketed(field, path)
    common: list[str] = []
    if len(variants) > 1:
        common = _shared([_keys(variant, field, path) for variant in variants])
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
        _section(page, variant, path, field, common)


def _bracketed(field: FieldInfo, path: Key) -> str:
    return f"[{dotted(path)}]" if shape.sections(field.annotation) else f"[[{dotted(path)}]]"


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


def _keys(model: Model, holder: FieldInfo | None, path: Key, hide: Collection[str] = ()) -> list[str]:
    default = holder.default if holder is not None else None
    lines = []
    for name, field in model.model_fields.items():
        if not _inner(field) and name not in hide and (name != "type" or not path):
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

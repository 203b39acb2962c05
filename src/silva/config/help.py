"""The help of a command that takes a configuration: an overview, one section, or every key.

silva rl --help                     usage, the keys at the top, a line for each section
silva rl --help trainer.optimizer   one section; "algorithm.ppo" is one type of it
silva rl --help all                 every key
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from silva.config import field_types
from silva.config.explain import elsewhere
from silva.config.field_types import Key, Model, dotted, held
from silva.config.schema import OUTSIDE, UNIONS, Registries, RunConfig, run_config
from silva.errors import ConfigError

WIDTH = 110
LONG = 60  # a section with a longer page lists its types without explaining them
_HOW = """\
Values: --section.key value, --section.key=value, --flag, --no-flag, JSON for lists and tables, null.
Order: command line > TOML files, left to right, each over its `extends` > SILVA_SECTION__KEY > defaults."""


def help_text(command: str, own: str, registries: Registries, topic: str = "") -> str:
    """What `silva COMMAND --help TOPIC` prints. Imports no torch.

    Args:
        own: what stands before the keys, such as the usage.
        topic: "" for the overview, "all", or a dotted section, type or key.

    Raises:
        ConfigError: nothing has that name.
    """
    if topic not in ("", "all"):
        return "\n".join(_topic(registries, topic)).strip("\n") + "\n"
    page = HelpPage([own, "", _HOW, ""])
    if topic:
        page.section(run_config(registries), (), None)
    else:
        page.lines += _overview(command, registries)
    return "\n".join(page.lines).rstrip() + "\n"


def _overview(command: str, registries: Registries) -> list[str]:
    """The keys at the top and a line for each section. Reads only the names in the registries."""
    lines = [*map(_line, keys(RunConfig, None, hide=OUTSIDE)), ""]
    for name, field in RunConfig.model_fields.items():
        if name not in OUTSIDE and not held(field):
            continue
        tags = [str(field_types.tag(model)) for model in held(field)]
        if name in UNIONS:
            tags = list(getattr(registries, UNIONS[name]))
        about = " ".join((field.description or "").split()).rstrip(".")
        types = f"; types: {', '.join(tags)}" if len(tags) > 1 else ""
        title = f"[[{name}]]" if name == "environments" else f"[{name}]"
        lines.append(_wrap(f"  {title:<18}{about}{types}", 20))
    return [
        *lines,
        "",
        f"{command} --help environments       a line for each environment",
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
    for name in names:
        chosen = [model for model in models if len(models) > 1 and field_types.tag(model) == name]
        owners = [model for model in models if name in model.model_fields]
        if chosen:
            models = chosen
        elif not owners:
            raise ConfigError(_unknown(registries, topic, name, models))
        elif field_models := held(owners[0].model_fields[name]):
            models, holder, path = field_models, owners[0].model_fields[name], (*path, name)
        elif name != names[-1]:
            raise ConfigError(f"--help {topic}: {name} is a key, with nothing below it")
        else:
            rows = [row for owner in owners for row in keys(owner, holder, path) if row.name == name]
            return [*([_bracketed(holder, path)] if holder else []), *map(_line, dict.fromkeys(rows))]
    assert holder is not None
    page = HelpPage([])
    if len(models) < len(held(holder)):
        page.lines.append(_title(*_heading(holder, path, models[0], alone=False)))
        page.section(models[0], path, holder)
        return page.lines
    page.field(holder, path)
    if len(page.lines) <= LONG or len(models) == 1:
        return page.lines
    return [
        _title(f"{_bracketed(holder, path)} of every type", holder.description),
        *map(_line, _shared(holder, path)),
        "",
        *(_title(*_heading(holder, path, model, alone=False)) for model in models),
        "",
        f"--help {dotted(path)}.{field_types.tag(models[0])} shows all of one type.",
    ]


def _narrow(registries: Registries, name: str) -> Model:
    """The model that explains one top-level key, built with as few variants as possible."""
    if name not in OUTSIDE:
        return RunConfig
    table: Any = {UNIONS[name]: getattr(registries, UNIONS[name])} if name in UNIONS else {}
    return run_config(replace(registries.only(()), **table))


def _unknown(registries: Registries, topic: str, name: str, models: list[Model]) -> str:
    near = [f"{section}.{name}" for section, table in UNIONS.items() if name in getattr(registries, table)]
    near = near or _types_below(run_config(registries), name) or elsewhere(run_config(registries), (name,))
    names = (
        [*models[0].model_fields] if len(models) == 1 else [str(field_types.tag(model)) for model in models]
    )
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected all, or one of {', '.join(names)}"
    return f"--help {topic}: there is no section, type or key {name!r} here; {hint}"


def _types_below(model: Model, tag: str) -> list[str]:
    """Where sections have a type of this name: environments.reward.math. The first of each section's name."""
    found = {
        path[-1]: f"{dotted(tuple(part for part in path if part != 0))}.{tag}"
        for path, field, _ in reversed([*field_types.fields(model)])
        if len(held(field)) > 1 and tag in map(field_types.tag, held(field))
    }
    return sorted(found.values(), key=len)[:3]


class KeyRow(NamedTuple):
    """What is told of a key. `default`: as TOML writes it, or "required"; `also`: the other values that it
    may have; `accepts`: in words, "" if there is no short way to say it."""

    name: str
    default: str
    also: tuple[str, ...]
    accepts: str
    about: str


class HelpPage:
    """The sections of a configuration one after the other, as the lines of a terminal. A subclass may put
    titles, rows and remarks in another form; the documentation has one in Markdown."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.shown: dict[Model, tuple[str, FieldInfo]] = {}  # sections so far: title, the field holding them

    def title(self, title: str, about: str | None, path: Key) -> None:
        self.lines += ["", _title(title, about)]

    def rows(self, rows: Collection[KeyRow]) -> None:
        self.lines += map(_line, rows)

    def remark(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def section(
        self, model: Model, path: Key, holder: FieldInfo | None, hide: Collection[KeyRow] = ()
    ) -> None:
        """The keys of one section, then its subsections. `hide`: rows that stand above for all variants."""
        self.rows([row for row in keys(model, holder, path) if row not in hide])
        for name, field in model.model_fields.items():
            self.field(field, (*path, name))

    def field(self, field: FieldInfo, path: Key) -> None:
        """The section or sections in a field, for every type."""
        title = _bracketed(field, path)
        common = _shared(field, path)
        if len(held(field)) > 1 and (common or field.description):
            self.title(f"{title} of every type", field.description, path)
            self.rows(common)
        for variant in held(field):
            before, other = self.shown.setdefault(variant, (title, field))
            if before == title and other is not field:  # model.lora, in each variant of model
                continue
            self.title(*_heading(field, path, variant, alone=len(held(field)) == 1), path)
            if other is field:
                self.section(variant, path, field, common)
                continue
            known = keys(variant, other, ("",))
            changed = [row for row in keys(variant, field, ("",)) if row not in known]
            self.remark(f"as {before}" + (", but" if changed else ""))
            self.rows(changed)


def _shared(field: FieldInfo, path: Key) -> list[KeyRow]:
    """Rows to show once for all variants: keys that all have, as most have them. One with a default of
    its own still lists that key."""
    variants = [keys(variant, field, path) for variant in held(field)]
    if len(variants) < 2:
        return []
    everywhere = set.intersection(*({row.name for row in rows} for rows in variants))
    counts = Counter(row for rows in variants for row in rows if row.name in everywhere)
    return [row for row, count in counts.items() if count > len(variants) / 2]


def _bracketed(field: FieldInfo, path: Key) -> str:
    return f"[{dotted(path)}]" if field_types.sections(field) else f"[[{dotted(path)}]]"


def _heading(field: FieldInfo, path: Key, variant: Model, *, alone: bool) -> tuple[str, str | None]:
    """The title of a section, and what it says of itself."""
    tag = field_types.tag(variant)
    title = _bracketed(field, path)
    if tag is not None:
        title += f' type = "{tag}"' + (
            " (default)" if tag == field_types.default_tag(field) and not alone else ""
        )
    if field.default is None:
        title += " (off unless given)"
    own = about(variant) if path == ("environments",) else vars(variant).get("__doc__")
    return title, (field.description or own) if alone else own


def about(settings: Model) -> str:
    """What a class of settings says of itself in its first line, else what its module says."""
    text = vars(settings).get("__doc__") or sys.modules[settings.__module__].__doc__ or ""
    return text.strip().partition("\n")[0]


def _title(title: str, about: str | None) -> str:
    return _wrap(f"{title}  {' '.join((about or '').split())}".rstrip(), indent=4)


def keys(
    model: Model, holder: FieldInfo | None = None, path: Key = (), hide: Collection[str] = ()
) -> list[KeyRow]:
    """A row for each key of a section: its default there, other choices, what it means."""
    section = holder.default if holder is not None and isinstance(holder.default, model) else None
    rows = []
    for name, field in model.model_fields.items():
        if held(field) or name in hide or (name == "type" and path):
            continue
        default = getattr(section, name) if section else field.get_default(call_default_factory=True)
        default = field_types.plain(default)
        value = "required" if field.is_required() and not section else field_types.show(default, 44)
        also = tuple(field_types.show(item) for item in field_types.literals(field) if item != default)
        about = " ".join((field.description or "").split())
        rows.append(KeyRow(name, value, also, field_types.describe(field), about))
    return rows


def _line(row: KeyRow) -> str:
    also = f"[or {', '.join(row.also)}] " if row.also else ""
    return _wrap(f"{f'  {row.name} = {row.default}':<40}  {also}{row.about}".rstrip(), 42)


def _wrap(text: str, indent: int) -> str:
    if len(text) <= WIDTH:
        return text
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)

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
from typing import Any

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
    page = _Page([own, "", _HOW, ""])
    if topic:
        page.section(run_config(registries), (), None)
    else:
        page.lines += _overview(command, registries)
    return "\n".join(page.lines).rstrip() + "\n"


def _overview(command: str, registries: Registries) -> list[str]:
    """The keys at the top and a line for each section. Reads only the names in the registries."""
    lines = [*_keys(RunConfig, None, hide=OUTSIDE), ""]
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
            lines = [line for owner in owners for line in _keys(owner, holder, path)]
            found = dict.fromkeys(line for line in lines if line.startswith(f"  {name} = "))
            return [*([_bracketed(holder, path)] if holder else []), *found]
    assert holder is not None
    page = _Page([])
    if len(models) < len(held(holder)):
        page.lines.append(_heading(holder, path, models[0], alone=False))
        page.section(models[0], path, holder)
        return page.lines
    page.field(holder, path)
    if len(page.lines) <= LONG or len(models) == 1:
        return page.lines
    return [
        _title(f"{_bracketed(holder, path)} of every type", holder.description),
        *_shared(holder, path),
        "",
        *(_heading(holder, path, model, alone=False) for model in models),
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


class _Page:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.shown: dict[Model, tuple[str, FieldInfo]] = {}  # sections so far: title, the field holding them

    def section(self, model: Model, path: Key, holder: FieldInfo | None, hide: Collection[str] = ()) -> None:
        """The keys of one section, then its subsections. `hide`: lines that stand above for all variants."""
        self.lines += [line for line in _keys(model, holder, path) if line not in hide]
        for name, field in model.model_fields.items():
            self.field(field, (*path, name))

    def field(self, field: FieldInfo, path: Key) -> None:
        """The section or sections in a field, for every type."""
        title = _bracketed(field, path)
        common = _shared(field, path)
        if len(held(field)) > 1 and (common or field.description):
            self.lines += ["", _title(f"{title} of every type", field.description), *common]
        for variant in held(field):
            before, other = self.shown.setdefault(variant, (title, field))
            if before == title and other is not field:  # model.lora, in each variant of model
                continue
            self.lines += ["", _heading(field, path, variant, alone=len(held(field)) == 1)]
            if other is field:
                self.section(variant, path, field, common)
                continue
            known = _keys(variant, other, ("",))
            changed = [line for line in _keys(variant, field, ("",)) if line not in known]
            self.lines += [f"  as {before}" + (", but" if changed else ""), *changed]


def _shared(field: FieldInfo, path: Key) -> list[str]:
    """Lines to show once for all variants: keys that all have, as most have them. One with a default of
    its own still lists that key."""
    variants = [_keys(variant, field, path) for variant in held(field)]
    if len(variants) < 2:
        return []
    everywhere = set.intersection(*({line.split(" = ")[0] for line in lines} for lines in variants))
    counts = Counter(line for lines in variants for line in lines if line.split(" = ")[0] in everywhere)
    return [line for line, count in counts.items() if count > len(variants) / 2]


def _bracketed(field: FieldInfo, path: Key) -> str:
    return f"[{dotted(path)}]" if field_types.sections(field) else f"[[{dotted(path)}]]"


def _heading(field: FieldInfo, path: Key, variant: Model, *, alone: bool) -> str:
    tag = field_types.tag(variant)
    title = _bracketed(field, path)
    if tag is not None:
        title += f' type = "{tag}"' + (
            " (default)" if tag == field_types.default_tag(field) and not alone else ""
        )
    if field.default is None:
        title += " (off unless given)"
    own = about(variant) if path == ("environments",) else vars(variant).get("__doc__")
    return _title(title, (field.description or own) if alone else own)


def about(settings: Model) -> str:
    """What a class of settings says of itself in its first line, else what its module says."""
    text = vars(settings).get("__doc__") or sys.modules[settings.__module__].__doc__ or ""
    return text.strip().partition("\n")[0]


def _title(title: str, about: str | None) -> str:
    return _wrap(f"{title}  {' '.join((about or '').split())}".rstrip(), indent=4)


def _keys(model: Model, holder: FieldInfo | None, path: Key = (), hide: Collection[str] = ()) -> list[str]:
    """A line for each key of a section: its default there, other choices, what it means."""
    section = holder.default if holder is not None and isinstance(holder.default, model) else None
    lines = []
    for name, field in model.model_fields.items():
        if held(field) or name in hide or (name == "type" and path):
            continue
        default = getattr(section, name) if section else field.get_default(call_default_factory=True)
        default = field_types.plain(default)
        value = "required" if field.is_required() and not section else field_types.show(default, 44)
        choices = [field_types.show(item) for item in field_types.literals(field) if item != default]
        also = f"[or {', '.join(choices)}] " if choices else ""
        head = f"  {name} = {value}"
        lines.append(_wrap(f"{head:<40}  {also}{' '.join((field.description or '').split())}".rstrip(), 42))
    return lines


def _wrap(text: str, indent: int) -> str:
    if len(text) <= WIDTH:
        return text
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)

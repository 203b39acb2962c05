"""From a command line to a checked configuration:

SILVA_A__B  <  a.toml (its `extends` first)  <  b.toml  <  --a.b value  <  keys from Python
    |              |                                |
    +--------------+---- merge (tree.py) -----------+
                          |
      own environments (plugins.py) close the unions (schema.py)
                          |
      settle: default types, text to values, "null"
                          |
      pydantic, strict -> Resolved, or one ConfigError that names everything (explain.py)
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from silva.config import explain, field_types, plugins
from silva.config.explain import ConfigProblem
from silva.config.field_types import NULL, Key, dotted
from silva.config.schema import UNIONS, Own, Registries, RunConfig, import_settings, run_config
from silva.config.sections import Section
from silva.config.sources import command_line, file_layers, place_files, python_values, variables
from silva.config.tree import Items, Layer, Node, Text, Tree, implied_types, typed, walk
from silva.errors import ConfigError

Outside = tuple[Own, Callable[[Any], Any] | None, list[ConfigProblem]]
"""Parts of the user's own, what makes recipes take those of an algorithm, and what is wrong with them."""


@dataclass(frozen=True)
class Resolved:
    """A checked configuration. `data` is all of it as plain values; `provenance` says where each value
    that was given comes from ("trainer.optimizer.lr" -> "b.toml:12"; defaults are absent); `notes` say
    what was left behind where a layer changed a `type`."""

    config: RunConfig
    data: dict[str, Any]
    provenance: dict[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def load(
    argv: Sequence[str],
    registries: Registries,
    *,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    own_code: bool = True,
) -> Resolved:
    """Read files and overrides, merge, check.

    Args:
        argv: `@ a.toml`, `@a.toml`, `--a.b value`, `--a.b=value`, `--flag`, `--no-flag`.
        registries: what may stand under `type`.
        values: keys from Python, nested or dotted; they override the files and `argv`.
        env: variables to read SILVA_A__B from; the process's own where None.
        cwd: what relative files are relative to; the working folder where None.
        own_code: whether code may be loaded that the configuration names; if not, what this process has
            loaded already will do.

    Raises:
        ConfigError: with one readable message: a syntax error, or everything else that is wrong at once.
    """
    env, cwd = (os.environ if env is None else env), cwd or Path.cwd()
    names, command = command_line(argv)
    keys = list(RunConfig.model_fields)
    for (key, *_), given in command:
        if key not in keys and str(typed(given.value)).endswith(".toml"):
            raise ConfigError(
                f"--{key} {typed(given.value)}: unknown key; give the file as @ {typed(given.value)}"
            )
    files = [found for name in names for found in file_layers(cwd / Path(name).expanduser(), cwd)]
    own: list[Layer] = [variables(env, keys), command, python_values(values or {})]
    lowest, *highest = (place_files(layer, cwd) for layer in own)
    layers = [lowest, *(layer for _, layer in files), *highest]
    named = registries.only(_texts(layers))
    tree = _laid(layers, named)
    outside = _from_outside(tree, registries, own_code)  # once: it runs code
    try:
        config = _check(tree, named, outside)
    except ConfigError:  # its words may need the other variants: which types there are, whose key this is
        tree = _laid(layers, registries)
        config = _check(tree, registries, outside)
    data = field_types.plain(config)
    provenance = {dotted(path): node.origin for path in field_types.leaves(data) if (node := tree.at(path))}
    return Resolved(config, data, provenance, tuple(path for path, _ in files), tuple(tree.notes))


def _texts(layers: Sequence[Layer]) -> set[str]:
    """All texts among the values, so also each that stands under `type`."""
    found = (typed(node.value) for layer in layers for path, given in layer for _, node in walk(given, path))
    return {value for value in found if isinstance(value, str)}


def _laid(layers: Sequence[Layer], registries: Registries) -> Tree:
    tree = Tree(implied_types(run_config(registries)))
    for layer in layers:
        tree.lay([(path, copy.deepcopy(given)) for path, given in layer])
    return tree


def _check(tree: Tree, registries: Registries, outside: Outside) -> RunConfig:
    own, widen, unknown = outside
    model = run_config(registries, own, widen)
    gaps: list[ConfigProblem] = []
    data = settle(tree.root, model, gaps)
    problems = [*gaps, *explain.secrets(tree), *explain.dates(tree), *unknown]
    config = None
    try:
        # JSON mode: strict, yet lists do for tuples and integers for floats.
        config = model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        told = [problem.path for problem in problems]
        problems += [
            problem
            for problem in explain.validation(error, model, data, tree)
            if not any(problem.path[: len(path)] == path for path in told)
        ]
    if problems or config is None:
        raise explain.config_error(problems)
    return config


def _from_outside(tree: Tree, registries: Registries, own_code: bool) -> Outside:
    own, unknown = _own_parts(tree, registries, own_code)
    adopted, wrong = _adopted(tree, registries, own_code)
    widen = importlib.import_module(registries.algorithm_parts).widened if adopted else None
    return own, widen, [*unknown, *wrong]


def _own_parts(tree: Tree, registries: Registries, own_code: bool) -> tuple[Own, list[ConfigProblem]]:
    """Classes of the user's own behind `type`: environments, recipes, strategies of rollouts."""
    environments = tree.at(("environments",))
    count = len(environments.value) if environments and isinstance(environments.value, Items) else 0
    places: list[tuple[Key, str]] = [(("environments", i), registries.environment_base) for i in range(count)]
    places += [(("rollout",), registries.rollout_base), (("algorithm",), registries.algorithm_base)]
    own: dict[str, dict[str, type[Section]]] = {}
    problems: list[ConfigProblem] = []
    for path, base in places:
        key = str(path[0])
        name, given = _name_at(tree, path)
        if name is None or name in getattr(registries, UNIONS[key]) or name in own.get(key, {}):
            continue
        try:
            _may_load(name, own_code)
            settings = plugins.find_settings(name, import_settings(base), installed=key == "environments")
        except ConfigError as error:
            problems.append(
                ConfigProblem(given, str(error), tree.origin(given), field_types.show(name, 1000))
            )
            continue
        if settings is not None:
            own.setdefault(key, {})[name] = settings
    return own, problems


def _adopted(tree: Tree, registries: Registries, own_code: bool) -> tuple[bool, list[ConfigProblem]]:
    """Takes in losses, advantages and credit of the user's own; whether the configuration names any."""
    adopted, problems = False, []
    for key in ("loss", "advantage", "credit"):
        name, given = _name_at(tree, ("algorithm", key))
        if name is None or ":" not in name:
            continue
        parts = importlib.import_module(registries.algorithm_parts)
        try:
            if own_code:
                parts.adopt(key, name)
            elif name not in parts.TABLES[key]:
                _may_load(name, own_code)
            adopted = True
        except ConfigError as error:
            problems.append(
                ConfigProblem(given, str(error), tree.origin(given), field_types.show(name, 1000))
            )
    return adopted, problems


def _may_load(name: str, own_code: bool) -> None:
    if ":" in name and not own_code and not plugins.is_loaded(name):
        raise ConfigError(
            "this process loads no code that others name: set it in the configuration it is started with"
        )


def _name_at(tree: Tree, path: Key) -> tuple[str | None, Key]:
    """What stands under `type` of a section, or in place of the section; and where."""
    for place in ((*path, "type"), path):
        node = tree.at(place)
        if node is not None and isinstance(name := typed(node.value), str):
            return name, place
    return None, path


def settle(node: Node, annotation: Any, gaps: list[ConfigProblem], path: Key = ()) -> Any:
    """Plain values for pydantic: default types filled in, typed text read by what its field accepts,
    the string "null" read as null where that is meant.

    Args:
        annotation: the model, field or type the value is meant for; None for an unknown key, which pydantic
            reports.
        gaps: gets a problem for each list element that has none before it.
    """
    value = node.value
    if isinstance(value, Text):
        return _settle_text(annotation, value)
    if value == "null" and field_types.accepts(annotation, NULL):
        # A string field means null by it only if it has no other way: leaving the key out.
        absent = isinstance(annotation, FieldInfo) and annotation.default is None
        return value if absent and field_types.accepts(annotation, str) else None
    if isinstance(value, Items):
        elements: list[Any] = []
        for index, item in sorted(value.items()):
            here = (*path, index)
            if index > len(elements):
                count = f"{len(elements)} elements" if len(elements) != 1 else "1 element (number 0)"
                gaps.append(ConfigProblem(here, f"no element {index}: the list has {count}", item.origin))
            else:
                elements.append(settle(item, field_types.element(annotation, index), gaps, here))
        return elements
    if isinstance(value, str):
        return field_types.spelt_out(annotation, value)
    if not isinstance(value, dict):
        return value
    settled = {}
    usual = field_types.default_tag(annotation)
    if len(field_types.sections(annotation)) > 1 and "type" not in value and usual is not None:
        settled["type"] = usual
    section = field_types.pick(annotation, typed(value["type"].value) if "type" in value else usual)
    fields = dict(section.model_fields) if section is not None else {}
    default = annotation.default if isinstance(annotation, FieldInfo) else None
    if isinstance(default, BaseModel) and type(default) is section:
        # A table changes the keys it names. The others keep the defaults of this place, not of the class.
        own = {name: getattr(default, name) for name in fields}
        differing = (
            name for name in own if field_types.plain(own[name]) != field_types.default_of(fields[name])
        )
        settled |= {name: field_types.plain(own[name]) for name in differing}
        for name in fields:
            fields[name] = copy.copy(fields[name])
            fields[name].default = own[name]
    for key, item in value.items():
        settled[key] = settle(item, fields.get(key), gaps, (*path, key))
    return settled


def _settle_text(annotation: Any, text: Text) -> Any:
    if field_types.sections(annotation) and text.bare:
        return {} if text.value else None  # --warm-start, --no-warm-start
    read = (
        text.bare
        or field_types.accepts(annotation, type(text.value))
        or not field_types.accepts(annotation, str)
    )
    value = text.value if read and text.text not in field_types.literals(annotation) else text.text
    return field_types.spelt_out(annotation, value) if isinstance(value, str) else value

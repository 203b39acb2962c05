"""From a command line to a checked configuration:

SILVA_A__B  <  a.toml (its `extends` first)  <  b.toml  <  --a.b value, or keys from Python
    |              |                                |
    +--------------+---- merge (layers.py) ---------+
                          |
      own environments (plugins.py) close the unions (schema.py)
                          |
      settle: default types, text to values, "null"
                          |
      pydantic, strict -> Resolved, or one ConfigError that names everything (explain.py)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from silva.config import explain, plugins, shape
from silva.config.command_line import parse_arguments
from silva.config.layers import (
    Layer,
    Merger,
    Problem,
    Text,
    absolute_type,
    environment_layer,
    file_layers,
    implied_types,
    python_layer,
)
from silva.config.schema import Registries, RunConfig, import_settings, run_config
from silva.config.sections import Section
from silva.config.shape import Key, dotted
from silva.errors import ConfigError


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
) -> Resolved:
    """Read files and overrides, merge, check.

    Args:
        argv: `@ a.toml`, `@a.toml`, `--a.b value`, `--a.b=value`, `--flag`, `--no-flag`.
        registries: what may stand under `type`.
        values: keys from Python, nested or dotted; they override the files and `argv`.
        env: variables to read SILVA_A__B from; the process's own where None.
        cwd: what relative files are relative to; the working folder where None.

    Raises:
        ConfigError: with one readable message: a syntax error, or everything else that is wrong at once.
    """
    env, cwd = (os.environ if env is None else env), cwd or Path.cwd()
    names, command = parse_arguments(argv)
    model = run_config(registries)
    for key, value in command.data.items():
        if key not in model.model_fields and isinstance(value, Text) and value.text.endswith(".toml"):
            raise ConfigError(f"--{key} {value.text}: unknown key; give the file as @ {value.text}")
    variables = environment_layer(env, list(model.model_fields))
    files = [found for name in names for found in file_layers(_path(name, cwd), cwd)]
    merger = Merger(implied_types(model))
    raw = Layer()
    above = [_place_types(layer, cwd) for layer in (command, python_layer(values or {}))]
    for layer in [_place_types(variables, cwd), *(layer for _, layer in files), *above]:
        raw = merger.merge(raw, layer)
    config = _check(raw, registries, merger.problems)
    data = shape.plain(config)
    return Resolved(
        config, data, _provenance(data, raw), tuple(path for path, _ in files), tuple(merger.notes)
    )


def _path(name: str, cwd: Path) -> Path:
    return cwd / Path(name).expanduser()


def _place_types(layer: Layer, cwd: Path) -> Layer:
    """Files of environments named on the command line are relative to the working folder."""
    worlds = layer.data.get("environments")
    elements = worlds.values() if isinstance(worlds, dict) else worlds if isinstance(worlds, list) else ()
    for world in elements:
        if isinstance(world, dict) and "type" in world:
            world["type"] = absolute_type(world["type"], cwd)
    return layer


def _check(raw: Layer, registries: Registries, found: Sequence[Problem]) -> RunConfig:
    problems = [*found, *explain.secrets(raw), *explain.dates(raw)]
    own, failures = _own_environments(raw, registries)
    problems += failures
    model = run_config(registries, own)
    data = settle(model, raw.data)
    config = None
    try:
        # JSON mode: strict, yet lists do for tuples and integers for floats.
        config = model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        told = [problem.path for problem in problems]
        problems += [
            problem
            for problem in explain.validation(error, model, data, raw)
            if not any(problem.path[: len(path)] == path for path in told)
        ]
    if problems or config is None:
        raise explain.config_error(problems)
    return config


def _own_environments(raw: Layer, registries: Registries) -> tuple[dict[str, type[Section]], list[Problem]]:
    own: dict[str, type[Section]] = {}
    problems: list[Problem] = []
    worlds = raw.data.get("environments")
    for index, world in enumerate(worlds if isinstance(worlds, list) else ()):
        name = world.get("type") if isinstance(world, dict) else None
        name = name.text if isinstance(name, Text) else name
        if not isinstance(name, str) or name in registries.environments or name in own:
            continue
        try:
            settings = plugins.find_environment(name, import_settings(registries.environment_base))
        except ConfigError as error:
            path: Key = ("environments", index, "type")
            problems.append(Problem(path, str(error), raw.origin(path), shape.show(name, 1000)))
            continue
        if settings is not None:
            own[name] = settings
    return own, problems


def settle(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for pydantic: default types filled in, typed text read by what its field accepts,
    the string "null" read as null where that is meant."""
    return _settle(model, data, PydanticUndefined)


def _settle(annotation: Any, value: Any, default: Any) -> Any:
    annotation = Any if annotation is None else annotation  # an unknown key: pydantic reports it
    if isinstance(value, Text):
        return _settle_text(annotation, value)
    if value == "null" and isinstance(value, str) and shape.is_optional(annotation):
        # A string field means null by it only if it has no other way: leaving the key out.
        return None if default is not None or not shape.accepts(annotation, str) else value
    if isinstance(value, list):
        return [
            _settle(shape.element(annotation, i), item, PydanticUndefined) for i, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    if len(shape.sections(annotation)) > 1 and "type" not in value and isinstance(default, BaseModel):
        value = {"type": getattr(default, "type", None), **value}
    settled = {}
    section = shape.pick(annotation, _read_type(value))
    known = section.model_fields if section is not None else {}
    defaults = {name: field.default for name, field in known.items()}
    if isinstance(default, BaseModel) and type(default) is section:
        # A table changes the keys it names. The others keep the defaults of this place, not of the class.
        defaults = {name: getattr(default, name) for name in known}
        value = {
            **{
                n: shape.plain(d) for n, d in defaults.items() if shape.plain(d) != shape.default_of(known[n])
            },
            **value,
        }
    for key, item in value.items():
        inner = shape.annotation_of(known[key]) if key in known else None
        settled[key] = _settle(inner, item, defaults.get(key, PydanticUndefined))
    return settled


def _read_type(value: dict[str, Any]) -> dict[str, Any]:
    chosen = value.get("type")
    return {"type": chosen.text} if isinstance(chosen, Text) else value


def _settle_text(annotation: Any, text: Text) -> Any:
    value = text.value
    if shape.sections(annotation) and text.bare and isinstance(value, bool):
        return {} if value else None  # --warm-start, --no-warm-start
    if text.text in shape.literals(annotation):
        return text.text
    if shape.accepts(annotation, str) and not isinstance(value, str):
        others = [shape.core_of(option) for option in shape.options(annotation)]
        keeps = type(value) in others or (value is None and shape.is_optional(annotation)) or text.bare
        return value if keeps else text.text
    return value


def _provenance(data: dict[str, Any], raw: Layer) -> dict[str, str]:
    return {dotted(path): raw.origin(path) for path in leaves(data) if _given(raw.data, path)}


def leaves(value: Any, path: Key = ()) -> list[Key]:
    """Paths of all values: what is neither a table nor a list of tables."""
    if isinstance(value, dict) and (value or not path):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


def _given(raw: Any, path: Key) -> bool:
    for part in path:
        inside = part in raw if isinstance(raw, dict) else isinstance(raw, list) and part in range(len(raw))
        if not inside:
            return False
        raw = raw[part]
    return True

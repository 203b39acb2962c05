"""The saved configuration of a run: TOML in which each given value names its origin in a comment.

    lr = 1e-5  # b.toml:12

`to_toml` writes it; it loads back to an equal configuration. `read_saved` reads values and origins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from silva.config import shape
from silva.config.command_line import parse_arguments
from silva.config.layers import Text, environment_layer, shorten
from silva.config.load import Resolved, load
from silva.config.schema import Registries, RunConfig
from silva.config.shape import Key, dotted
from silva.config.toml_lines import scan
from silva.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(resolved: Resolved) -> str:
    """All of a resolved configuration as TOML. Null is the absent key where it is the default, and
    the string "null" where it is not."""
    return _document(resolved.config, resolved.provenance)


def config_to_toml(config: RunConfig) -> str:
    """The same for a configuration built in Python, which has no origins."""
    return _document(config, {})


def _document(config: RunConfig, provenance: Mapping[str, str]) -> str:
    lines: list[str] = []
    _table(lines, _expressible(config), (), provenance)
    return "\n".join(lines).strip() + "\n"


def _expressible(value: Any) -> Any:
    """Plain data without the nulls that are defaults."""
    if isinstance(value, BaseModel):
        result = {}
        for name, field in type(value).model_fields.items():
            item = getattr(value, name)
            if item is not None or shape.default_of(field) not in (None, PydanticUndefined):
                result[name] = _expressible(item)
        return result
    if isinstance(value, list | tuple):
        return [_expressible(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _expressible(item) for key, item in value.items()}
    return shape.plain(value)


def _table(lines: list[str], table: Mapping[str, Any], path: Key, provenance: Mapping[str, str]) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) or _is_tables(value):
            later.append((key, value))
            continue
        origin = provenance.get(dotted((*path, key)))
        comment = f"  # {_one_line(origin)}" if origin else ""
        lines.append(f"{_key(key)} = {toml_value(value)}{comment}")
    for key, value in later:
        inner = (*path, key)
        name = ".".join(_key(part) for part in inner if isinstance(part, str))
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            _table(lines, value, inner, provenance)
            continue
        for index, item in enumerate(value):
            lines += ["", f"[[{name}]]"]
            _table(lines, item, (*inner, index), provenance)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def toml_value(value: Any) -> str:
    """One value on one line; null as "null"."""
    if value is None:
        return '"null"'
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return shape.number(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def load_saved(
    argv: Sequence[str],
    registries: Registries,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Resolved | None:
    """The configuration saved in the run that `name` and `output_dir` of a command line point to.

    The rest of the command line overrides it. The other values keep the origins they had in the run.

    Returns:
        None if the command line has its own: it names a file, or environments while there is no run.

    Raises:
        ConfigError: there is no run, or as `load`.
    """
    env, cwd = (os.environ if env is None else env), cwd or Path.cwd()
    files, command = parse_arguments(argv)
    if files:
        return None
    given = {**environment_layer(env, ["name", "output_dir"]).data, **command.data}
    name, folder = (
        text.text if isinstance(text := given.get(key), Text) else RunConfig.model_fields[key].default
        for key in ("name", "output_dir")
    )
    path = cwd / Path(folder).expanduser() / name / "config.toml"
    if not path.is_file():
        if "environments" in given:
            return None
        raise ConfigError(
            f"--resume: there is no run in {shorten(path.parent, cwd)}; name one with --name and "
            "--output_dir, or give a configuration as @ FILE.toml"
        )
    resolved = load([f"@{path}", *argv], registries, env=env, cwd=cwd)
    origins = {dotted(key): origin for key, origin in read_saved(path)[1].items()}
    here = f"{shorten(path, cwd)}:"
    provenance = {
        key: origins.get(key, "") if origin.startswith(here) else origin
        for key, origin in resolved.provenance.items()
    }
    return replace(resolved, provenance={key: origin for key, origin in provenance.items() if origin})


def read_saved(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """Values of a saved configuration and their origins.

    Args:
        path: a run's folder, or a TOML file.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    file = path / "config.toml" if path.is_dir() else path
    try:
        return parse_saved(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{file} cannot be read: {reason}; expected a run's folder") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def parse_saved(text: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """The same for the text itself."""
    return tomllib.loads(text), scan(text).comments

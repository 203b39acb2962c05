"""The saved configuration of a run: TOML in which each given value names its origin in a comment.

    lr = 1e-5  # b.toml:12

`to_toml` writes it; it loads back to an equal configuration. `read_saved` reads values and origins.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from silva.config import field_types
from silva.config.field_types import Key, dotted
from silva.config.load import Resolved, load
from silva.config.schema import Registries, RunConfig
from silva.config.sources import command_line, shorten, variables
from silva.config.toml_lines import scan
from silva.config.tree import typed
from silva.errors import ConfigError


def to_toml(resolved: Resolved) -> str:
    """All of a resolved configuration as TOML."""
    return toml(saved_values(resolved.config), resolved.provenance)


def toml(table: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """A table as TOML; `origins` become comments behind the values at their dotted paths."""
    import tomlkit  # takes 40 ms
    from tomlkit.items import Float, Item, Trivia

    def item(value: Any, path: Key) -> Any:
        if isinstance(value, dict):
            return {key: item(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list):
            value = [item(inner, (*path, index)) for index, inner in enumerate(value)]
            if value and all(isinstance(inner, dict) for inner in value):
                return value
        made: Item = tomlkit.item(value)
        if isinstance(value, float):
            made = Float(value, Trivia(), field_types.number(value))  # tomlkit writes 1e-05
        if origin := origins.get(dotted(path)):
            one_line = "".join(char if char.isprintable() else "?" for char in origin)
            made.trivia.comment_ws, made.trivia.comment = "  ", f"# {one_line}"
        return made

    return tomlkit.item(item(table, ())).as_string().strip() + "\n"


def saved_values(value: Any) -> Any:
    """What is saved of a configuration: null is the absent key where it is the default, else "null"."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            name: saved_values(item)
            for name, item in value
            if item is not None or fields[name].get_default(call_default_factory=True) is not None
        }
    if isinstance(value, dict):
        return {str(key): saved_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [saved_values(item) for item in value]
    return "null" if value is None else field_types.plain(value)


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
    files, command = command_line(argv)
    if files:
        return None
    layers = [*variables(env, ["name", "output_dir"]), *command]
    given = {path[0]: typed(node.value) for path, node in layers}
    folder, name = (
        str(given.get(key, RunConfig.model_fields[key].default)) for key in ("output_dir", "name")
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
    before = {dotted(key): origin for key, origin in read_saved(path)[1].items()}
    provenance = {
        key: before.get(key, "") if origin.startswith(f"{shorten(path, cwd)}:") else origin
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
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text), scan(text).comments
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{file} cannot be read: {reason}; expected a run's folder") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None

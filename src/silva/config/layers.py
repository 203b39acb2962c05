"""Layers of a configuration and how they merge: environment < files, left to right < command line.

A layer is plain data plus the origin of each value ("b.toml:12", "--seed", "SILVA_SEED"). Tables merge
key by key; lists and values replace whole; `Elements` (from `--environments.0.size 6`) change single
elements of a list. A layer that changes a section's `type` restarts that section: what lower layers
said about it belongs to another variant and is left behind, with a note. In place of a section that has
types, a name is short for a table with only its `type`.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from silva.config import shape
from silva.config.shape import Key, dotted
from silva.config.toml_lines import scan
from silva.errors import ConfigError

_MISSING: Any = object()
PYTHON = "Python"
"""The origin of values that were given in Python."""


@dataclass
class Layer:
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def origin(self, path: Key) -> str:
        """Where the value at `path` comes from, or the nearest table around it; "" where nobody gave one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return ""


class Elements(dict[int, Any]):
    """Changes to single elements of a list."""


@dataclass(frozen=True)
class Text:
    """A scalar from a command line or variable: `value` as JSON or TOML reads it, `text` as typed.
    A string field takes the text ("8"), any other the value (8). `bare`: a flag without a value."""

    text: str
    value: Any
    bare: bool = False


@dataclass(frozen=True)
class Problem:
    path: Key
    message: str
    origin: str = ""
    got: str | None = None


def read_text(text: str) -> Any:
    """What a value typed on the command line means: plain lists and tables, `Text` for scalars."""
    value: Any = text
    try:
        value = json.loads(text)
    except ValueError:
        if re.match(r"[\[{]|[+-]?([0-9][0-9_]*(\.[0-9_]+)?([eE][+-]?[0-9]+)?|inf|nan)$|0[xob]\w+$", text):
            try:
                value = tomllib.loads(f"value = {text}\n")["value"]
            except tomllib.TOMLDecodeError:
                value = text
    return value if isinstance(value, list | dict) else Text(text, value)


def insert(layer: Layer, path: Key, value: Any, origin: str) -> None:
    """Put a value at `path`, making the tables (and `Elements`) on the way; a table merges."""
    node: Any = layer.data
    for depth, (part, following) in enumerate(itertools.pairwise(path)):
        child = _get(node, part)
        if not _holds(child, following):
            here = path[: depth + 1]
            if _is_name(child) and isinstance(following, str):
                child = {"type": child}
                layer.origins[(*here, "type")] = layer.origin(here)
            else:
                child = Elements() if isinstance(following, int) else {}
            _set(node, part, child, path, origin)
            layer.origins[here] = origin
        node = child
    if isinstance(value, dict):
        if not _holds(_get(node, path[-1]), ""):
            _set(node, path[-1], {}, path, origin)
        layer.origins[path] = origin
        for key, item in value.items():
            insert(layer, (*path, key), item, origin)
        return
    if _is_name(value) and type(_get(node, path[-1])) is dict:
        path, node = (*path, "type"), _get(node, path[-1])
    _set(node, path[-1], value, path, origin)
    layer.origins[path] = origin


def _is_name(value: Any) -> bool:
    """Whether it may be short for a table with this `type`."""
    text = value.value if isinstance(value, Text) else value
    return isinstance(text, str) and text != "null"


def _holds(container: Any, part: str | int) -> bool:
    """Whether `part` may be a key of it: numbers fit tables (as text) and lists, names fit tables."""
    return isinstance(container, dict | list) if isinstance(part, int) else type(container) is dict


def _get(node: Any, part: str | int) -> Any:
    if isinstance(node, list):
        return node[part] if isinstance(part, int) and part < len(node) else _MISSING
    return node.get(part, _MISSING)


def _set(node: Any, part: str | int, value: Any, path: Key, origin: str) -> None:
    if isinstance(node, list):
        if not isinstance(part, int) or part > len(node):
            raise ConfigError(
                f"{origin}: {dotted(path)}\n    no element {part}: the list has {len(node)} elements"
            )
        node[part : part + 1] = [value]
    else:
        node[part] = value


def environment_layer(env: Mapping[str, str], top: Sequence[str]) -> Layer:
    """Variables `SILVA_A__B`. Those that name no section (SILVA_CACHE) belong to other parts of Silva,
    unless they look like a misspelled key."""
    layer = Layer()
    for name in sorted(env):
        if not name.startswith("SILVA_"):
            continue
        path = split_path(name.removeprefix("SILVA_").lower(), "__")
        if path[0] in top or len(path) > 1 or difflib.get_close_matches(str(path[0]), top, 1, 0.8):
            insert(layer, path, read_text(env[name]), name)
    return layer


def python_layer(values: Mapping[str, Any]) -> Layer:
    """Keys given from Python, nested or dotted. Text is text, as in a file: "8" is no number."""
    layer = Layer()
    for key, value in values.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise ConfigError(f"{PYTHON}: got the key {key!r}, expected text such as 'trainer.optimizer.lr'")
        insert(layer, split_path(key), _plain(value, key), PYTHON)
    return layer


def _plain(value: Any, path: str) -> Any:
    """The value as TOML can hold it, or None. Numbers of other packages, paths and tuples are converted."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | datetime.date | datetime.time):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        f"{PYTHON}: {path}: got {type(value).__name__}, expected a number, text, true or false, None, a list "
        "or a mapping"
    )


def split_path(text: str, separator: str = ".") -> Key:
    first, *parts = text.replace("-", "_").split(separator)
    return (first, *(int(part) if part.isdecimal() else part for part in parts))


def file_layers(path: Path, cwd: Path, chain: tuple[Path, ...] = ()) -> list[tuple[Path, Layer]]:
    """One TOML file with the files it `extends` in front of it, lowest first."""
    shown = shorten(path, cwd)
    if path.resolve() in chain:
        circle = " -> ".join(shorten(each, cwd) for each in (*chain, path))
        raise ConfigError(f"{shown}: `extends` goes in a circle: {circle}")
    layer = _read_file(path, shown, came_from=shorten(chain[-1], cwd) if chain else "")
    bases = layer.data.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{layer.origins[('extends',)]}: extends\n    expected a file name or a list of them, "
            f"got {shape.show(bases)}"
        )
    below = [
        found for base in bases for found in file_layers(path.parent / base, cwd, (*chain, path.resolve()))
    ]
    return [*below, (path, layer)]


def _read_file(path: Path, shown: str, came_from: str) -> Layer:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(_missing_file(path, shown, came_from)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(shown, text, str(error))) from None
    origins = {key: f"{shown}:{line}" for key, line in scan(text).lines.items()}
    worlds = data.get("environments")
    for world in worlds if isinstance(worlds, list) else ():
        if isinstance(world, dict) and "type" in world:
            world["type"] = absolute_type(world["type"], path.parent)
    return Layer(data, origins)


def absolute_type(value: Any, folder: Path) -> Any:
    """`file.py:Class` with the file's place written out, so that it means the same from any folder."""
    if isinstance(value, Text):
        return Text(absolute_type(value.text, folder), absolute_type(value.value, folder))
    if isinstance(value, str) and ".py:" in value:
        file, _, name = value.rpartition(":")
        return f"{(folder / Path(file).expanduser()).resolve()}:{name}"
    return value


def _missing_file(path: Path, shown: str, came_from: str) -> str:
    why = f" ({came_from} extends it)" if came_from else ""
    if not path.parent.is_dir():
        return f"{shown}: no such file{why}; there is no folder {path.parent}"
    names = sorted(each.name for each in path.parent.iterdir() if each.suffix == ".toml")
    near = near_file(path)
    if near:
        return f"{shown}: no such file{why}; did you mean {shown.removesuffix(path.name)}{near}?"
    return f"{shown}: no such file{why}; TOML files there: {', '.join(names) or 'none'}"


def near_file(path: Path) -> str | None:
    """The name most like that of a missing file, among its folder's files of the same kind."""
    stems = [each.stem for each in path.parent.glob(f"*{path.suffix}")] if path.suffix else []
    near = difflib.get_close_matches(path.stem, sorted(stems), 1, 0.5)
    return near[0] + path.suffix if near else None


def _syntax_error(shown: str, text: str, error: str) -> str:
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", error)
    what = error[: found.start()] if found else error
    lines = text.splitlines() or [""]
    line = int(found[1]) if found and found[1] else len(lines)
    source = lines[min(line, len(lines)) - 1]
    hint = "; text needs quotes" if re.search(r"=\s*[A-Za-z/.~]", source) and "value" in what.lower() else ""
    return (
        f"{shown}:{line}: not valid TOML: {what[:1].lower()}{what[1:]}{hint}\n    {source.strip()}".rstrip()
    )


def shorten(path: Path, cwd: Path) -> str:
    """A path as messages show it: relative where it lies under the working folder."""
    path, cwd = path.resolve(), cwd.resolve()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


@dataclass
class Merger:
    """Merges layers upwards; `implied` says which `type` a section has where a layer names none."""

    implied: Mapping[Key, tuple[str | None, frozenset[str]]]  # path -> (default type, keys of that variant)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def merge(self, below: Layer, above: Layer) -> Layer:
        merged = Layer({}, dict(below.origins))
        merged.data = self._merge(below.data, above.data, (), merged, above)
        return merged

    def _merge(self, below: Any, value: Any, path: Key, merged: Layer, above: Layer) -> Any:
        if isinstance(value, Elements) and not isinstance(below, dict):
            return self._elements(below, value, path, merged, above)
        if path in self.implied and _is_name(value):
            above.origins[(*path, "type")] = above.origin(path)
            value = {"type": value}
        if not isinstance(value, dict):
            self._forget(path, merged)
            merged.origins |= {key: at for key, at in above.origins.items() if key[: len(path)] == path}
            return value
        if not isinstance(below, dict) or self._restarts(below, value, path):
            self._note_dropped(below, path, merged, above)
            self._forget(path, merged)
            below = {}
        if path in above.origins:
            merged.origins.setdefault(path, above.origins[path])
        result = dict(below)
        for key, item in value.items():
            name = str(key)
            result[name] = self._merge(result.get(name, _MISSING), item, (*path, key), merged, above)
        return result

    def _elements(self, below: Any, value: Elements, path: Key, merged: Layer, above: Layer) -> list[Any]:
        result = list(below) if isinstance(below, list) else []
        for index in sorted(value):
            here = (*path, index)
            if index > len(result):
                origins = [at for key, at in above.origins.items() if key[: len(here)] == here]
                count = f"{len(result)} elements" if len(result) != 1 else "1 element (number 0)"
                message = f"no element {index}: the list has {count}"
                self.problems.append(Problem(here, message, origins[0] if origins else ""))
                continue
            old = result[index] if index < len(result) else _MISSING
            result[index : index + 1] = [self._merge(old, value[index], here, merged, above)]
        return result

    def _restarts(self, below: dict[str, Any], value: dict[str, Any], path: Key) -> bool:
        """Whether `value` makes the section another variant. A section without `type` counts as its
        default only if its keys fit that variant: otherwise it was written for the type yet to come."""
        if "type" not in value or not below:
            return False
        implied, keys = self.implied.get(path, (None, frozenset()))
        old = below.get("type", implied if keys.issuperset(below) else None)
        return old is not None and _bare(old) != _bare(value["type"])

    def _note_dropped(self, below: Any, path: Key, merged: Layer, above: Layer) -> None:
        dropped = [key for key in below if key != "type"] if isinstance(below, dict) else []
        if dropped:
            names = ", ".join(f"{key} ({merged.origin((*path, key))})" for key in dropped)
            by = above.origin((*path, "type"))
            self.notes.append(f"{by} changes {dotted(path)}.type, so the section starts anew without {names}")

    def _forget(self, path: Key, merged: Layer) -> None:
        for key in [key for key in merged.origins if key[: len(path)] == path]:
            del merged.origins[key]


def _bare(value: Any) -> Any:
    return value.text if isinstance(value, Text) else value


def implied_types(model: type[BaseModel]) -> dict[Key, tuple[str | None, frozenset[str]]]:
    """For each section that is a union: its default `type` and the keys of that variant.

    The type is None if it depends on the section around it.
    """
    found: dict[Key, tuple[str | None, frozenset[str]]] = {}
    for path, item, _ in shape.fields(model):
        default = shape.default_tag(item)
        for variant in shape.sections(item.annotation):
            if default is not None and shape.tag(variant) == default:
                known, _ = found.setdefault(path, (default, frozenset(variant.model_fields)))
                if known != default:
                    found[path] = (None, frozenset())
    return found

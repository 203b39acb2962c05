"""Where values come from: TOML files, the command line, variables, Python. Each becomes layers of tree.py.

Knows no keys: checking comes later.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from silva.config import field_types
from silva.config.field_types import Key
from silva.config.toml_lines import scan
from silva.config.tree import Layer, Node, Text, nodes, walk
from silva.errors import ConfigError

PYTHON = "Python"
"""The origin of values that were given in Python."""
FILES = frozenset({"path", "corpus", "arpo_cache", "lock"})  # keys of environments that name a file
_HUB = re.compile(r"[\w-]+/[\w-]+")  # "zai-org/LongBench-v2", which is no path unless there is such a folder
_NUMBER = r"[+-]?([0-9][0-9_]*(\.[0-9_]+)?([eE][+-]?[0-9]+)?|inf|nan)$|0[xob]\w+$"


def split_path(text: str, separator: str = ".") -> Key:
    first, *parts = text.replace("-", "_").split(separator)
    return (first, *(int(part) if part.isdecimal() else part for part in parts))


def read_text(text: str, origin: str) -> Node:
    """What a value typed on the command line means: plain lists and tables, `Text` for scalars."""
    value: Any = text
    try:
        value = json.loads(text)
    except ValueError:
        if text.startswith(("[", "{")) or re.match(_NUMBER, text):
            try:
                value = tomllib.loads(f"value = {text}\n")["value"]
            except tomllib.TOMLDecodeError:
                value = text
    return nodes(value if isinstance(value, list | dict) else Text(text, value), lambda _: origin)


def command_line(argv: Sequence[str]) -> tuple[list[str], Layer]:
    """Read `@ a.toml @b.toml --a.b value --a.b=value --flag --no-flag`: (files in order, the values)."""
    files: list[str] = []
    layer: Layer = []
    rest = list(argv)

    def value_follows() -> bool:
        return bool(rest) and not rest[0].startswith(("--", "@"))

    while rest:
        argument = rest.pop(0)
        if argument.startswith("@"):
            file = argument[1:] or (rest.pop(0) if value_follows() else "")
            if not file:
                raise ConfigError("@ needs a file name, as in @ run.toml")
            files.append(file)
        elif argument.startswith("--") and len(argument) > 2:
            flag, equals, text = argument.partition("=")
            off = flag.startswith("--no-") and not equals
            path = split_path(flag[5 if off else 2 :])
            if not all(flag[2:].split(".")):
                raise ConfigError(f"{flag}: not a key; expected a form like --trainer.optimizer.lr")
            if equals or (value_follows() and not off):
                layer.append((path, read_text(text if equals else rest.pop(0), flag)))
            else:
                layer.append((path, Node(Text("false" if off else "true", not off, bare=True), flag)))
        else:
            hint = f"; a file is given as @ {argument}" if argument.endswith(".toml") else ""
            raise ConfigError(f"unexpected argument {argument!r}: expected @ file.toml or --key value{hint}")
    return files, layer


def variables(env: Mapping[str, str], top: Sequence[str]) -> Layer:
    """Variables `SILVA_A__B`. Those that name no section (SILVA_CACHE) belong to other parts of Silva,
    unless they look like a misspelled key."""
    layer: Layer = []
    for name in sorted(name for name in env if name.startswith("SILVA_")):
        path = split_path(name.removeprefix("SILVA_").lower(), "__")
        if path[0] in top or len(path) > 1 or difflib.get_close_matches(str(path[0]), top, 1, 0.8):
            layer.append((path, read_text(env[name], name)))
    return layer


def python_values(values: Mapping[str, Any]) -> Layer:
    """Keys given from Python, nested or dotted. Text is text, as in a file: "8" is no number."""
    for key in values:
        if not isinstance(key, str) or not all(key.split(".")):
            raise ConfigError(f"{PYTHON}: got the key {key!r}, expected text such as 'trainer.optimizer.lr'")
    return [(split_path(key), nodes(_plain(value, key), lambda _: PYTHON)) for key, value in values.items()]


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
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise ConfigError(
        f"{PYTHON}: {path}: got {type(value).__name__}, expected a number, text, true or false, None, a list "
        "or a mapping"
    )


def place_files(layer: Layer, folder: Path) -> Layer:
    """The layer with files of the user's own written out from `folder`, so that they mean the same from
    anywhere: `file.py:name`, the keys of FILES and `*_path`, and what is there of a `command` and of the
    evaluation sets of `synth`, which may be other words, too."""
    for path, given in layer:
        for inner, node in walk(given, path):
            if inner[:1] in (("environments",), ("algorithm",), ("rollout",), ("data",), ("synth",)):
                value, key = node.value, next(str(part) for part in reversed(inner) if isinstance(part, str))
                if isinstance(value, Text):
                    node.value = Text(*(_absolute(each, folder, key) for each in (value.text, value.value)))
                else:
                    node.value = _absolute(value, folder, key)
    return layer


def _absolute(value: Any, folder: Path, key: str) -> Any:
    if not isinstance(value, str) or not value:
        return value
    there = key in ("command", "decontaminate") and len(value) < 4096 and (folder / value).is_file()
    there |= key == "decontaminate" and "/" in value and (folder / value).is_dir()
    if key == "path" and _HUB.fullmatch(value) and not (folder / value).exists():
        return value
    if there or key in FILES or key.endswith("_path"):
        return str((folder / Path(value).expanduser()).resolve())
    if ".py:" not in value:
        return value
    file, _, name = value.rpartition(":")
    return f"{(folder / Path(file).expanduser()).resolve()}:{name}"


def file_layers(path: Path, cwd: Path, chain: tuple[Path, ...] = ()) -> list[tuple[Path, Layer]]:
    """One TOML file with the files it `extends` in front of it, lowest first."""
    shown = shorten(path, cwd)
    if path.resolve() in chain:
        circle = " -> ".join(shorten(each, cwd) for each in (*chain, path))
        raise ConfigError(f"{shown}: `extends` goes in a circle: {circle}")
    text = _read(path, shown, came_from=shorten(chain[-1], cwd) if chain else "")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(shown, text, str(error))) from None
    lines = scan(text).lines
    bases = data.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{shown}:{lines['extends',]}: extends\n    expected a file name or a list of them, "
            f"got {field_types.show(bases)}"
        )
    below = [
        found for base in bases for found in file_layers(path.parent / base, cwd, (*chain, path.resolve()))
    ]
    root = nodes(data, lambda key: f"{shown}:{lines[key]}" if key else "")
    return [*below, (path, place_files([((), root)], path.parent))]


def _read(path: Path, shown: str, came_from: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        why = f"no such file ({came_from} extends it)" if came_from else "no such file"
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    if not path.parent.is_dir():
        raise ConfigError(f"{shown}: {why}; there is no folder {path.parent}")
    if near := near_file(path):
        raise ConfigError(f"{shown}: {why}; did you mean {shown.removesuffix(path.name)}{near}?")
    names = sorted(each.name for each in path.parent.glob("*.toml"))
    raise ConfigError(f"{shown}: {why}; TOML files there: {', '.join(names) or 'none'}")


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

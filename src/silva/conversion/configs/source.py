"""Files of other frameworks as flat keys with places. Nothing in them is run: YAML is loaded by the rules of
SafeLoader, Python and shell scripts are read as text."""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from silva.config.toml_lines import scan
from silva.conversion.configs.carried import Computed, Found
from silva.errors import ConfigError, RecordError, SilvaError

MOST_BYTES, MOST_KEYS = 2_000_000, 20_000
VERL_DEFAULTS = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
"""Hydra files that hold verl's own defaults, which `verl.py` knows."""
CALLS = (
    "GRPOConfig",
    "SFTConfig",
    "LoraConfig",
    "GRPOTrainer",
    "SFTTrainer",
    "RLOOConfig",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "RLOOTrainer",
    "load_dataset",
    "TrainerConfig",
)
"""Calls whose arguments are read from Python."""
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_OVERRIDE = re.compile(r"""(?:^|\s)['"]?[+]{0,2}([a-z_]\w*(?:\.\w+)*)=("[^"]*"|'[^']*'|\$\(\(.*\)\)|\S+)""")
Flat = dict[str, Found]


def read(path: Path) -> Flat:
    """Raises ConfigError if the file is missing or of no form that is known; RecordError with its line if its
    syntax is wrong."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise ConfigError(f"{path}: got no regular file, expected a configuration")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{path}: got {len(data):,} bytes, expected a configuration of at most {MOST_BYTES:,}"
        )
    text, readers = (
        data.decode("utf-8-sig", "replace"),
        {
            ".toml": _toml,
            ".yaml": _yaml,
            ".yml": _yaml,
            ".py": _python,
            ".sh": _shell,
            ".bash": _shell,
        },
    )
    if path.suffix not in readers:
        raise ConfigError(f"{path}: got {path.suffix or 'no suffix'}, expected {', '.join(readers)}")
    try:
        return readers[path.suffix](text, path, ())
    except SilvaError:
        raise
    except (RecursionError, MemoryError) as error:
        raise RecordError(f"{path}: got values nested too deeply, expected a configuration") from error
    except (ValueError, OverflowError) as error:  # what is no value of its type, such as a 13th month
        raise RecordError(f"{path}: {' '.join(str(error).split())}") from error


def _toml(text: str, path: Path, _: tuple[Path, ...]) -> Flat:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"{path}: {error}") from error
    lines = scan(text).lines
    return {
        ".".join(map(str, key)): Found(value, f"{path.name}:{lines.get(key, 1)}")
        for key, value in _leaves(found)
        if key
    }


def _yaml(text: str, path: Path, above: tuple[Path, ...]) -> Flat:
    """With the files of Hydra's `defaults` in the same folder below it, and ${a.b} filled in."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        flat = dict(itertools.islice(_nodes(node, path), MOST_KEYS + 1)) if node else {}
    except yaml.YAMLError as error:
        raise RecordError(f"{path}: {' '.join(str(error).split())}") from error
    if len(flat) > MOST_KEYS:
        raise RecordError(
            f"{path}: got more than {MOST_KEYS:,} keys (aliases count each time that they stand)"
        )
    merged: Flat = {}
    named = [found.value for key, found in flat.items() if re.fullmatch(r"defaults\.\d+", key)]
    for name in named:
        file = path.parent / f"{name}.yaml"
        if (
            name not in VERL_DEFAULTS
            and os.path.isfile(file)
            and file not in (path, *above)
            and len(above) < 10
        ):
            merged |= _yaml(file.read_text("utf-8-sig", "replace"), file, (*above, path))
    for key in [
        key for key in merged if any(key.startswith(f"{new}.") or new.startswith(f"{key}.") for new in flat)
    ]:
        if not any(new.startswith(key.rpartition(".")[0]) for new in flat):
            del merged[key]  # a table replaced by a value, or a value by a table
    lists = {key.rpartition(".")[0] for key in flat if key.rpartition(".")[2].isdigit()}
    merged = {key: found for key, found in merged.items() if key.rpartition(".")[0] not in lists}
    merged |= {key: found for key, found in flat.items() if not key.startswith(("defaults", "hydra"))}
    if above:
        return merged
    filled = _Size(path)
    return {key: Found(_filled(found.value, merged, filled), found.place) for key, found in merged.items()}


def _nodes(node: yaml.Node, path: Path, key: str = "") -> Iterator[tuple[str, Found]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, value in node.value:
            yield from _nodes(value, path, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, yaml.SequenceNode) and (
        key == "defaults" or not all(isinstance(each, yaml.ScalarNode) for each in node.value)
    ):
        for index, value in enumerate(node.value):
            yield from _nodes(value, path, f"{key}.{index}")
    else:
        line = node.start_mark.line + 1
        try:
            value = yaml.SafeLoader("").construct_object(node, deep=True)
            str(value)  # Python writes no whole number of more than 4,300 digits
        except ValueError as error:
            raise RecordError(f"{path}:{line}: {key}: no value of YAML: {error}") from error
        yield key, Found(value, f"{path.name}:{line}")


class _Size:
    """Of what names in a file stand for: a few lines that name each other twice can stand for gigabytes."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum = path, 0

    def add(self, text: str = "") -> str:
        """Raises RecordError if with this text all together are too large."""
        self._sum += len(text) + 1
        if self._sum > MOST_BYTES:
            raise RecordError(
                f"{self._path}: got names that stand for more than {MOST_BYTES:,} characters, "
                "expected a configuration"
            )
        return text


def _filled(value: Any, flat: Mapping[str, Found], size: _Size, depth: int = 10) -> Any:
    size.add()
    if isinstance(value, list):
        return [_filled(each, flat, size, depth) for each in value]
    if not isinstance(value, str) or "${" not in value or not depth:
        return value
    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if whole and whole[1] in flat:
        return _filled(flat[whole[1]].value, flat, size, depth - 1)

    def one(match: re.Match[str]) -> str:
        return size.add(str(flat[match[1]].value)) if match[1] in flat else match[0]

    return re.sub(r"\$\{([\w.]+)\}", one, value)


def _shell(text: str, path: Path, _: tuple[Path, ...]) -> Flat:
    """Overrides of Hydra (a.b=value) and flags (--a_b value) on the command lines of a script, with the
    variables that it sets."""
    known: dict[str, str] = {}
    found: Flat = {}
    size, continued = _Size(path), False
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.strip()
        if code.startswith("#"):
            continue
        begins, continued = not continued, code.endswith("\\")
        if begins and (assigned := re.match(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)$", code)):
            known[assigned[1]] = _expanded(_unquoted(re.split(r"\s+#", assigned[2])[0].strip()), known, size)
            continue
        code = re.sub(r"\s*\\$", "", re.sub(r"\s+(?:2>&1|\||\$@).*$", "", code))
        for key, value in _OVERRIDE.findall(code):
            if not key.startswith("hydra.") and ("." in key or not begins):
                found[key] = Found(_scalar(_expanded(_unquoted(value), known, size)), f"{path.name}:{number}")
        for flag, value in re.findall(r"--([a-z]\w*)(?:[ =]+(?!--)(\S+))?", code):
            shown = _scalar(_expanded(_unquoted(value), known, size)) if value else True
            found[flag] = Found(shown, f"{path.name}:{number}")
    return found


def _expanded(text: str, known: Mapping[str, str], size: _Size) -> str:
    def braced(match: re.Match[str]) -> str:
        usual = _expanded(_unquoted(match[2]), known, size) if match[2] else ""
        return size.add(known.get(match[1]) or usual or match[0])

    text = re.sub(r"\$\{(\w+)(?::-((?:[^{}]|\$\{\w+\})*))?\}", braced, text)
    text = re.sub(r"\$(\w+)", lambda match: size.add(known.get(match[1], match[0])), text)

    def sum_of(match: re.Match[str]) -> str:
        names = re.sub(r"[A-Za-z_]\w*", lambda m: size.add(known.get(m[0], m[0])), match[1])
        try:
            return str(_value(ast.parse(names, mode="eval").body, {}, size))
        except RecordError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return match[0]

    return re.sub(r"\$\(\((.*)\)\)", sum_of, text)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text.rstrip("'\"")


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _python(text: str, path: Path, _: tuple[Path, ...]) -> Flat:
    """Arguments of the calls in `CALLS`, as CALL.argument, and fields of a class called TrainerConfig. "
    "Names are
    looked up among plain assignments; what is computed is no value, and stands there as its source."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        raise RecordError(f"{place}: no valid Python: {error}") from error
    known: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = node.value
    found: Flat = {}
    size = _Size(path)

    def add(key: str, value: ast.expr) -> None:
        try:
            known_value = _value(value, known, size)
        except RecordError:
            raise
        except ValueError:
            known_value = Computed(ast.unparse(value))
        found.setdefault(key, Found(known_value, f"{path.name}:{value.lineno}"))

    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "TrainerConfig":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                    add(f"TrainerConfig.{field.target.id}", field.value)
        if isinstance(node, ast.Call) and (name := _called(node.func)) in CALLS:
            for index, each in enumerate(node.args):
                add(f"{name}.{index}", each)
            for keyword in node.keywords:
                if keyword.arg:
                    add(f"{name}.{keyword.arg}", keyword.value)
    return found


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _value(node: ast.expr, known: Mapping[str, ast.expr], size: _Size, depth: int = 20) -> Any:
    """The value of a literal, a name of one, or arithmetic on them. Raises ValueError for anything else."""
    size.add()
    if depth:
        match node:
            case ast.Constant(value=str() | float() | None):
                return node.value
            case ast.Constant(value=int() as number):
                return _short(number)
            case ast.Name() if node.id in known:
                return _value(known[node.id], known, size, depth - 1)
            case ast.List() | ast.Tuple():
                return [_value(each, known, size, depth - 1) for each in node.elts]
            case ast.UnaryOp(op=ast.USub()):
                number = _value(node.operand, known, size, depth - 1)
                if isinstance(number, int | float):
                    return -number
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                sides = [_value(side, known, size, depth - 1) for side in (node.left, node.right)]
                if all(isinstance(side, int | float) for side in sides):
                    with suppress(ArithmeticError):  # a division by zero, what is too large for a float
                        return _short(_ARITHMETIC[type(node.op)](*sides))
    raise ValueError("computed")


def _short(number: Any) -> Any:
    """Raises ValueError for a whole number beyond what TOML holds."""
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise ValueError("computed")
    return number


def _leaves(value: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(each, (*key, name))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, (*key, index))
    else:
        yield key, value

"""Rows of a data set: from JSON Lines, JSON, CSV or parquet files, or from the Hugging Face hub."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from silva.errors import ConfigError
from silva.rendering.tool_calls import finite_json

_HUB = re.compile(r"[\w.-]+/[\w.-]+")
LONGEST_CELL = 1 << 30  # characters of a CSV cell; Python's own limit is 128 KiB


class Row(NamedTuple):
    """`where` names the row in messages, such as "train.jsonl:12"; `values` are plain JSON. `left_out` are
    columns that JSON cannot hold, such as images, with the type of what they hold."""

    where: str
    values: Mapping[str, Any]
    left_out: Mapping[str, str] = MappingProxyType({})


def read_rows(source: str, *, split: str = "train", subset: str = "") -> Iterator[Row]:
    """The rows of a file, of all files in a folder (in order of their names), or of a data set on the hub.

    Args:
        source: a path, or a hub id such as "openai/gsm8k".
        split: of a data set on the hub.
        subset: the same; "main" of openai/gsm8k, say.

    Raises:
        ConfigError: there is nothing at `source`, or a row cannot be read; it names file and line.
    """
    files = files_of(source)
    for file in files:
        yield from read_file(file)
    if not files:
        for number, values in enumerate(from_hub(source, split, subset), 1):
            yield columns(f"{source} ({split}): row {number}", values)


def files_of(source: str) -> list[Path]:
    """The file, or the files in the folder in order of their names; none if it is the id of a hub.

    Raises:
        ConfigError: there is nothing at `source`.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(
            file
            for file in path.iterdir()
            if file.suffix.lower() in READERS and not file.name.startswith(".")  # "._train.jsonl" of macOS
        )
        if not files:
            raise ConfigError(f"{source}: no file in this folder ends with {_suffixes()}")
        return files
    if path.exists():
        return [path]
    if _HUB.fullmatch(source) and path.suffix.lower() not in READERS:
        return []
    raise ConfigError(f"{source}: no such file or folder, and no hub id (owner/name)")


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a file.

    Raises:
        ConfigError: as `read_rows`.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: got a file that ends with {path.suffix!r}, expected {_suffixes()}")
    with reading(path):
        yield from reader(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError with the file's name if it cannot be read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield json_row(line.rstrip("\n"), f"{path}:{number}")


def json_row(text: str, where: str) -> Row:
    """The row that is one object of JSON.

    Raises:
        ConfigError: it is not.
    """
    return _row(where, _parsed(text, where))


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or an object of which one value is such a list."""
    data = _parsed(path.read_text("utf-8-sig"), str(path))
    if isinstance(data, dict):
        lists = [key for key, value in data.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise ConfigError(
                f"{path}: expected a list of rows, or an object with one list; got an object with "
                f"{', '.join(map(repr, data)) or 'no keys'}"
            )
        data = data[lists[0]]
    if not isinstance(data, list):
        raise ConfigError(f"{path}: got {type(data).__name__}, expected a list of rows")
    for number, values in enumerate(data, 1):
        yield _row(f"{path}: row {number}", values)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = reader.fieldnames or ()
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"{path}:1: several columns are called {', '.join(map(repr, twice))}")
            for values in reader:
                where = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    got = len([v for v in values.values() if isinstance(v, str)]) + len(
                        values.get(None) or ()
                    )
                    expected = len(names)
                    raise ConfigError(f"{where}: got {got} cells, expected {expected} as in the first line")
                yield Row(where, values)
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.reader.line_num}: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield columns(f"{path}: row {number}", values)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a parquet file: {error}") from error


def from_hub(name: str, split: str, subset: str) -> Any:
    """A data set of the hub, with a length and rows by number. Its file is read when a row is asked for.

    Raises:
        ConfigError: the package is missing, or the hub gave nothing.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name}: reading from the hub needs the package datasets: pip install 'silva[hub]'. Or download "
            "a file of the data set and set `path` to it."
        ) from None
    try:
        return datasets.load_dataset(name, subset or None, split=split)
    except Exception as error:  # offline, no such data set, gated: as many types as there are causes
        raise ConfigError(
            f"{name}: the hub gave no data ({type(error).__name__}: {str(error).splitlines()[0][:200]}). "
            f"Without a network, run `huggingface-cli download {name} --repo-type dataset --local-dir data` "
            "where there is one, and set `path` to a file in that folder."
        ) from error


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


def _suffixes() -> str:
    return ", ".join(READERS)


def _row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: got {type(values).__name__}, expected an object with named values")
    return Row(where, values)


def _parsed(text: str, where: str) -> Any:
    try:
        # Not strict: control characters stand in the strings of published data sets.
        return finite_json(text, strict=False)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ConfigError(f"{where}: not JSON: {error.msg}{line}, column {error.colno}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: objects or lists are nested too deeply to be read") from None


def columns(where: str, values: Mapping[str, Any]) -> Row:
    """A row of values that may be more than JSON can hold."""
    plain, left_out = {}, {}
    for key, value in values.items():
        try:
            plain[key] = _plain(value)
        except TypeError as error:
            left_out[key] = str(error)
    return Row(where, plain, left_out)


def _plain(value: Any) -> Any:
    """The same as JSON can hold it. TypeError with the name of a type that JSON cannot hold."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(type(value).__name__)

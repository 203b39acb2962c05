"""Rows by number, without holding them: sources may be larger than memory.

JSON Lines are an array of where lines begin, 8 bytes a row, and a row is read when asked for. Of parquet one
row group is held at a time, so its rows come in `blocks`, which are shuffled apart. A data set of the hub is
read from its own files. Rows of JSON and CSV are held: such files are read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from silva.data.rows import Row, columns, files_of, from_hub, json_row, read_file, reading
from silva.data.settings import GivenRows
from silva.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 24  # bytes that are searched for the ends of lines at once
SHORT = 8  # bytes: only shorter lines are looked at, whether they are blank


class Rows(Protocol):
    """Attributes:
    blocks: how many rows follow each other that are best read together; their sum is the length.
    """

    @property
    def blocks(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def indexed(given: GivenRows) -> Rows:
    """The rows of a source.

    Raises:
        ConfigError: there is nothing, or it is no file of rows. What is wrong in a row of JSON Lines or
            parquet is found when the row is read.
    """
    if given.rows:
        return Listed(list(given.read()))
    source = given.path or given.hub
    files = files_of(source)
    if not files:
        return FromHub(source, given.split, given.subset)
    group = lru_cache(1)(_row_group)
    return Joined([_of_file(file, group) for file in files])


def _of_file(path: Path, group: Callable[[Path, int], Any]) -> Rows:
    with reading(path):
        match path.suffix.lower():
            case ".jsonl" | ".ndjson":
                return Lines(path)
            case ".parquet":
                return Groups(path, group)
    return Listed(list(read_file(path)))


class Listed:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.blocks: Sequence[int] = [len(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class Lines:
    """JSON Lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begins, self._numbers = _lines(path)
        self.blocks: Sequence[int] = [len(self)]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> Row:
        begin, end = (int(place) for place in self._begins[index : index + 2])
        number = index + 1 if self._numbers is None else int(self._numbers[index])
        where = f"{self.path}:{number}"
        with reading(self.path), self.path.open("rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: not UTF-8 at byte {error.start}") from error
        return json_row(text.rstrip("\r\n"), where)


class Groups:
    """Parquet."""

    def __init__(self, path: Path, group: Callable[[Path, int], Any]) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path, self._group = path, group
        try:
            about = parquet.ParquetFile(path).metadata
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"{path}: not a parquet file: {error}") from error
        self.blocks: Sequence[int] = [about.row_group(i).num_rows for i in range(about.num_row_groups)]

    def __len__(self) -> int:
        return sum(self.blocks)

    def __getitem__(self, index: int) -> Row:
        number, inside = _place(self.blocks, index)
        with reading(self.path):
            values = self._group(self.path, number).slice(inside, 1).to_pylist()[0]
        return columns(f"{self.path}: row {index + 1}", _given(values))


class FromHub:
    def __init__(self, name: str, split: str, subset: str) -> None:
        self._name, self._rows = f"{name} ({split})", from_hub(name, split, subset)
        self.blocks: Sequence[int] = [len(self)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return columns(f"{self._name}: row {index + 1}", _given(self._rows[index]))


class Joined:
    """Files one after the other. Rows of files without row groups are shuffled together."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts, self._lengths = parts, [len(part) for part in parts]
        grouped = any(isinstance(part, Groups) for part in parts)
        self.blocks: Sequence[int] = [n for p in parts for n in p.blocks] if grouped else [len(self)]

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, index: int) -> Row:
        part, inside = _place(self._lengths, index)
        return self._parts[part][inside]


def shuffled(blocks: Sequence[int], seed: int) -> np.ndarray:
    """An order of all rows, int64 [sum(blocks)]: blocks in a random order, the rows of each in another."""
    import numpy as np

    from silva.ports import derive, uniform

    count = sum(blocks)
    keys = uniform(derive(seed, "rows"), np.arange(count))
    if len(blocks) == 1:
        return np.argsort(keys, kind="stable")
    ranks = uniform(derive(seed, "blocks"), np.arange(len(blocks)))
    return np.lexsort((keys, np.repeat(ranks, blocks)))


def _place(lengths: Sequence[int], index: int) -> tuple[int, int]:
    """Number of the part that holds a row, and its place there."""
    for number, length in enumerate(lengths):
        if index < length:
            return number, index
        index -= length
    raise IndexError(f"row {index} after the last one")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that only other rows have: Arrow gives objects of one column the same keys, of which those
    that a row lacks are null. A call would otherwise have the arguments of all tools."""

    def given(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: given(item) for key, item in value.items() if item is not None}
        return [given(item) for item in value] if isinstance(value, list) else value

    return {column: given(value) for column, value in values.items()}


def _row_group(path: Path, number: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(number)


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Where lines begin that are not blank, int64 [rows + 1], the last one being the end of the file; and
    their numbers from 1 on, None if no line is blank."""
    import numpy as np

    begins, size = [np.zeros(1, dtype=np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            begins.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
        places = np.concatenate(begins)
        if places[-1] < size:  # the last line does not end
            places = np.append(places, size)
        kept = np.ones(len(places) - 1, dtype=bool)
        for line in np.flatnonzero(np.diff(places) <= SHORT):
            file.seek(places[line])
            kept[line] = bool(file.read(places[line + 1] - places[line]).strip())
    if kept.all():
        return places, None
    return np.append(places[:-1][kept], size), np.flatnonzero(kept) + 1

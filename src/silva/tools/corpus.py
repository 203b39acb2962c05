"""Documents to be searched: rows of JSON Lines, JSON or parquet files, or text files in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from silva.errors import ConfigError

TEXTS = (".txt", ".md")


class Document(NamedTuple):
    id: str
    title: str
    text: str


class Keys(NamedTuple):
    """Names of the columns of a corpus. A row may lack `title`, and `id`: then its number is its id."""

    id: str = "id"
    title: str = "title"
    text: str = "text"


def corpus_files(path: str | Path) -> list[Path]:
    """The file, or all files in the folder and below that can be read, in order of their names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix.lower() not in (*READERS, *TEXTS):
            raise ConfigError(f"{path}: got a file that ends with {path.suffix!r}, expected {_suffixes()}")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"corpus {path}: no such file or folder")
    files = [file for file in path.rglob("*") if file.suffix.lower() in (*READERS, *TEXTS) and file.is_file()]
    if not files:
        raise ConfigError(f"corpus {path}: no file in this folder ends with {_suffixes()}")
    return sorted(files, key=lambda file: file.relative_to(path).as_posix())


def read_documents(path: str | Path, keys: Keys = Keys()) -> list[Document]:
    """All documents of a file or folder. The id of a text file is its path inside the folder.

    Raises:
        ConfigError: something cannot be read, or two documents have one id; it names file and row.
    """
    path = Path(path).expanduser()
    documents: list[Document] = []
    seen: dict[str, str] = {}
    for file in corpus_files(path):
        for where, document in _read(file, path, keys, len(documents)):
            first = seen.setdefault(document.id, where)
            if first != where:
                raise ConfigError(f"{where}: the id {document.id!r} is that of {first} too; ids must differ")
            documents.append(document)
    return documents


def _read(file: Path, root: Path, keys: Keys, number: int) -> Iterator[tuple[str, Document]]:
    try:
        if file.suffix.lower() in TEXTS:
            name = file.relative_to(root).as_posix() if file != root else file.name
            yield str(file), _text_document(name, file.read_text("utf-8-sig"))
            return
        for where, values in READERS[file.suffix.lower()](file):
            yield where, _document(values, keys, where, number)
            number += 1
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error


def _text_document(name: str, text: str) -> Document:
    """The title is the first line if that is a heading of Markdown, else the file's name."""
    first, _, rest = text.lstrip().partition("\n")
    if first.startswith("#"):
        return Document(name, first.lstrip("#").strip(), rest.strip())
    return Document(name, Path(name).stem, text.strip())


def _document(values: Any, keys: Keys, where: str, number: int) -> Document:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {type(values).__name__}, expected an object with {keys.text!r}")
    text = values.get(keys.text)
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: got {keys.text!r} = {text!r:.80}, expected text; its keys are "
            f"{', '.join(map(repr, values)) or 'none'}. Set text_key to the one that holds the text"
        )
    identity, title = values.get(keys.id, number), values.get(keys.title)
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise ConfigError(f"{where}: got {keys.id!r} = {identity!r:.80}, expected text or an integer")
    if title is not None and not isinstance(title, str):
        raise ConfigError(f"{where}: got {keys.title!r} = {title!r:.80}, expected text")
    return Document(str(identity), title or "", text)


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file}:{number}", _parsed(line, f"{file}:{number}")


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    rows = _parsed(file.read_text("utf-8-sig"), str(file))
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: got {type(rows).__name__}, expected a list of rows")
    for number, values in enumerate(rows, 1):
        yield f"{file}: row {number}", values


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for values in batch.to_pylist():
                number += 1
                yield f"{file}: row {number}", values
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{file}: not a parquet file: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}


def _suffixes() -> str:
    return ", ".join((*READERS, *TEXTS))

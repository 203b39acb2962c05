"""Documents to be searched: rows of JSON Lines, JSON or parquet files, or text files in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from silva.data.documents import Document
from silva.data.rows import Row, read_rows, reading
from silva.errors import ConfigError

ROWS, TEXTS = (".jsonl", ".json", ".parquet"), (".txt", ".md")


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
        if path.suffix.lower() not in (*ROWS, *TEXTS):
            raise ConfigError(f"{path}: got a file that ends with {path.suffix!r}, expected {_suffixes()}")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"corpus {path}: no such file or folder")
    files = [file for file in path.rglob("*") if file.suffix.lower() in (*ROWS, *TEXTS) and file.is_file()]
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
    if file.suffix.lower() in TEXTS:
        name = file.relative_to(root).as_posix() if file != root else file.name
        with reading(file):
            yield str(file), _text_document(name, file.read_text("utf-8-sig"))
        return
    for row in read_rows(str(file)):
        yield row.where, _document(row, keys, number)
        number += 1


def _text_document(name: str, text: str) -> Document:
    """The title is the first line if that is a heading of Markdown, else the file's name."""
    first, _, rest = text.lstrip().partition("\n")
    if first.startswith("#"):
        return Document(name, first.lstrip("#").strip(), rest.strip())
    return Document(name, Path(name).stem, text.strip())


def _document(row: Row, keys: Keys, number: int) -> Document:
    where, values = row.where, row.values
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


def _suffixes() -> str:
    return ", ".join((*ROWS, *TEXTS))

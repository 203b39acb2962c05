"""Documents that a model searches and reads: from a user's files, or the made-up encyclopedia."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from silva.data.rows import Row
from silva.errors import ConfigError

IDS = ("docid", "id", "_id", "page_id")
TEXTS = ("text", "content", "contents", "article")
INSIDE = ("gold_docs", "evidence_docs", "negative_docs")  # columns of BrowseComp-Plus that hold documents
INTRODUCTION, WHOLE = "Introduction", "Full page"
_HEADING = re.compile(r"#{1,6}\s+(.+)")
_FRONT_TITLE = re.compile(r"---\n(?:.*\n)*?title:\s*(.+)")  # of BrowseComp-Plus


class Document(NamedTuple):
    id: str
    title: str
    text: str  # Markdown or plain


class DocumentSection(NamedTuple):
    id: str
    name: str
    text: str


def documents(rows: Iterable[Row]) -> list[Document]:
    """One document a row: an id or a title, and a text. The first of those with the same id counts.

    Raises:
        ConfigError: a row has no text, or neither id nor title; it names the row.
    """
    return _distinct(_document(row.values, row.where) for row in rows)


def documents_inside(rows: Iterable[Row]) -> list[Document]:
    """Those that rows of questions bring along: `gold_docs`, `evidence_docs` and `negative_docs` of
    BrowseComp-Plus, `context` of HotpotQA (titles and their sentences)."""
    return _distinct(document for row in rows for document in _inside(row))


def sections(document: Document) -> list[DocumentSection]:
    """What its Markdown headings divide it into; a page without any is one section. Every id is used once."""
    parts: list[tuple[str, list[str]]] = [(INTRODUCTION, [])]
    for line in document.text.splitlines():
        if heading := _HEADING.fullmatch(line.strip()):
            parts.append((heading[1].strip("# \t"), []))
        else:
            parts[-1][1].append(line)
    if len(parts) == 1:
        parts = [(WHOLE, parts[0][1])]
    elif not any(line.strip() for line in parts[0][1]):
        del parts[0]
    named: dict[str, DocumentSection] = {}
    for name, lines in parts:
        id_ = base = f"{document.id}:{as_id(name)}"
        number = 1
        while id_ in named:
            number += 1
            id_ = f"{base}_{number}"
        named[id_] = DocumentSection(id_, name, "\n".join(lines).strip())
    return list(named.values())


def as_id(text: str) -> str:
    """A name as an id: lower case, with _ for spaces."""
    return "_".join(text.casefold().split())


def _distinct(documents: Iterable[Document]) -> list[Document]:
    found: dict[str, Document] = {}
    for document in documents:
        found.setdefault(document.id, document)
    return list(found.values())


def _document(values: Mapping[str, Any], where: str) -> Document:
    text = _first(values, TEXTS)
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: no text: got {', '.join(map(repr, values)) or 'no columns'}, expected one of "
            f"{', '.join(TEXTS)}"
        )
    title, id_ = values.get("title"), _first(values, IDS)
    if not title:
        front = _FRONT_TITLE.match(text)
        first, _, rest = text.partition("\n")
        if front:
            title = front[1].strip()
        elif len(first) > 2 and first[0] == first[-1] == '"':  # Search-R1: '"Title"\ntext'
            title, text = first.strip('"'), rest
    if id_ is None and not title:
        raise ConfigError(f"{where}: neither a title nor an id; expected title or one of {', '.join(IDS)}")
    return Document(as_id(str(title)) if id_ is None else str(id_), str(title or id_), text)


def _inside(row: Row) -> Iterator[Document]:
    for key in INSIDE:
        for number, entry in enumerate(row.values.get(key) or ()):
            yield _document(entry, f"{row.where}: {key}.{number}")
    context = row.values.get("context")
    if isinstance(context, Mapping):
        for title, sentences in zip(context["title"], context["sentences"], strict=True):
            yield Document(as_id(title), title, "".join(sentences))


def _first(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)

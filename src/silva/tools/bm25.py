"""Search by words over local documents: BM25 as Lucene has it, computed by the package bm25s.

    score(q, d) = sum over words of q:  ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 (1 - b + b |d| / L))

with N documents of L words on average, n of which hold the word, d tf times. Words are runs of letters and
digits, without case; characters of Chinese and Japanese are words of their own. No word is left out, none is
stemmed.

The ranking depends on the documents alone, not on their order: documents with equal scores come in order of
their ids. A document that holds no word of the query is never found.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from silva.data.documents import Document
from silva.errors import ConfigError
from silva.storage.placed import placed
from silva.tools.corpus import Keys, corpus_files, read_documents

FORMAT = 1  # of an index on disk, and of the words
_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_WIDE}]|[^\W_{_WIDE}]+")


class Hit(NamedTuple):
    """One result: a document, or a web page (its address as `id`)."""

    id: str
    title: str
    text: str
    score: float = 0.0


def words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Bm25:
    """An index over documents.

    Args:
        documents: with different ids.
        k1: how much a word counts that occurs again.
        b: how much long documents count less, from 0 to 1.

    Raises:
        ConfigError: the package bm25s is missing, or there is no word to be found.
    """

    def __init__(self, documents: Iterable[Document], *, k1: float = 1.5, b: float = 0.75) -> None:
        self._documents: Sequence[Document] = sorted(documents, key=lambda document: document.id)
        for one, other in zip(self._documents, self._documents[1:], strict=False):
            if one.id == other.id:
                raise ConfigError(f"corpus: two documents have the id {one.id!r}; ids must differ")
        self._index = _built(self._documents, k1, b)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        cache: str | Path = "",
        keys: Keys = Keys(),
        k1: float = 1.5,
        b: float = 0.75,
    ) -> Bm25:
        """The index of a corpus; it is built once and then kept in `cache`, if that is given.

        Its name there is a hash of the corpus and of all settings. Processes that open it at the same time
        build it once.
        """
        if not cache:
            return cls(read_documents(path, keys), k1=k1, b=b)
        folder = Path(cache).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / f"bm25-{_digest(path, keys, k1, b)}"
        if not index.is_dir():
            with open(folder / f".{index.name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system, however the process ends
                if not index.is_dir():
                    cls(read_documents(path, keys), k1=k1, b=b)._write(index)
        return cls._read(index)

    def search(self, query: str, k: int = 10) -> list[Hit]:
        """The best `k` documents, the best first."""
        known = [word for word in words(query) if word in self._index.vocab_dict]
        if not known or k < 1:
            return []
        scores = self._index.get_scores(known)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # all documents as good as the k-th, so that ids decide between equal ones
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.lexsort((found, -scores[found]))][:k]
        return [Hit(*self._documents[int(place)], float(scores[place])) for place in best]

    def document(self, id: str) -> Document:
        """KeyError if there is none."""
        place = bisect.bisect_left(self._documents, id, key=lambda document: document.id)
        if place == len(self) or (found := self._documents[place]).id != id:
            raise KeyError(id)
        return found

    def __len__(self) -> int:
        return len(self._documents)

    def _write(self, folder: Path) -> None:
        with placed(folder) as temporary:
            temporary.mkdir()
            lines = [(json.dumps(document) + "\n").encode() for document in self._documents]
            (temporary / "documents.jsonl").write_bytes(b"".join(lines))
            np.save(temporary / "starts.npy", np.cumsum([0, *map(len, lines)]))
            self._index.save(temporary, show_progress=False)

    @classmethod
    def _read(cls, folder: Path) -> Bm25:
        self = cls.__new__(cls)
        try:
            self._documents = _Stored(folder)
            self._index = _bm25s().BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise ConfigError(f"{folder}: a damaged index; remove the folder ({error})") from error
        return self


class _Stored(Sequence[Document]):
    """Documents on disk: an index of millions of them takes no memory for their texts."""

    def __init__(self, folder: Path) -> None:
        self._starts = np.load(folder / "starts.npy", mmap_mode="r", allow_pickle=False)
        self._file = open(folder / "documents.jsonl", "rb")  # noqa: SIM115 (open as long as the index)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | Sequence[Document]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        start, end = int(self._starts[place]), int(self._starts[place + 1])
        return Document(*json.loads(os.pread(self._file.fileno(), end - start, start)))

    def __del__(self) -> None:
        if file := getattr(self, "_file", None):
            file.close()


def _built(documents: Sequence[Document], k1: float, b: float) -> Any:
    index = _bm25s().BM25(method="lucene", k1=k1, b=b, auto_compile=False)
    tokens = [words(f"{document.title} {document.text}") for document in documents]
    if not any(tokens):
        raise ConfigError("corpus: no document holds a word")
    index.index(tokens, show_progress=False)
    return index


def _digest(path: str | Path, keys: Keys, k1: float, b: float) -> str:
    root = Path(path).expanduser()
    about = [FORMAT, _bm25s().__version__, unicodedata.unidata_version, keys, k1, b]
    digest = hashlib.blake2b(json.dumps(about).encode(), digest_size=12)
    for file in corpus_files(root):
        name = file.relative_to(root).as_posix() if file != root else file.suffix
        digest.update(f"\n{name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while part := content.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError("BM25 needs the package bm25s: pip install 'silva[search]'") from error
    return bm25s

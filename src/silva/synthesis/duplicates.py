"""Near duplicates and contamination: what texts have in common, by sequences of words.

text ──> words ──> shingles ──> MinHash, candidates ──> exact Jaccard ──> the earlier text, or None
              └──> 13-grams ──> those of evaluation sets               ──> names of the sets
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from silva.data.row_shapes import asked, recognised
from silva.data.rows import read_rows
from silva.errors import CapabilityError
from silva.evaluation.suites import SUITES, published
from silva.synthesis.texts import bare_words, ngrams, words

SHINGLE = 5  # words
PERMUTATIONS = 128
SHORTEST = 8
"""Words of the shortest text that is compared with evaluation sets, as in GPT-3 (arXiv:2005.14165, C)."""

Gram = tuple[str, ...]


def shingles(text: str) -> frozenset[Gram]:
    """All sequences of 5 words; of a shorter text, the whole."""
    tokens = words(text)
    return frozenset(ngrams(tokens, SHINGLE) or [tuple(tokens)])


def jaccard(a: frozenset[Gram], b: frozenset[Gram]) -> float:
    """Shared shingles over all shingles of two texts."""
    return len(a & b) / len(a | b)


class NearDuplicates:
    """Texts so far. MinHash (package `datasketch`) finds candidates, and the exact Jaccard index decides, so
    a text is never dropped by an estimate.

    Raises:
        CapabilityError: the package is not installed.
    """

    def __init__(self, threshold: float) -> None:
        try:
            from datasketch import MinHashLSH
        except ImportError as error:
            raise CapabilityError(
                "near duplicates need the package datasketch: pip install 'silva[synth]'"
            ) from error
        self.threshold = threshold
        # Candidates are sought well below the threshold: one that is missed is worse than one too many.
        self._index = MinHashLSH(threshold=0.7 * threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
        self._kept: list[frozenset[Gram]] = []

    def find(self, text: str) -> int | None:
        """The place of a text that was added and is nearly the same; None if there is none."""
        found, sketch = _sketched(text)
        for place in sorted(map(int, self._index.query(sketch))):
            if jaccard(found, self._kept[place]) >= self.threshold:
                return place
        return None

    def add(self, text: str) -> None:
        found, sketch = _sketched(text)
        self._index.insert(str(len(self._kept)), sketch)
        self._kept.append(found)


@lru_cache(maxsize=1)  # what is not found is added next
def _sketched(text: str) -> tuple[frozenset[Gram], Any]:
    """The shingles of a text and their MinHash."""
    from datasketch import MinHash

    found, sketch = shingles(text), MinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update_batch([" ".join(gram).encode("utf-8", "replace") for gram in sorted(found)])
    return found, sketch


@dataclass
class EvaluationSets:
    """Sequences of `n` words of named evaluation sets.

    A text with fewer than `n` words but at least 8 counts as a whole; shorter ones are not compared.

    Attributes:
        texts: how many of each set are compared.
        too_short: how many of each set are not.
    """

    n: int = 13
    texts: dict[str, int] = field(default_factory=dict)
    too_short: dict[str, int] = field(default_factory=dict)
    _sets: dict[int, dict[Gram, set[str]]] = field(default_factory=dict)

    @classmethod
    def named(cls, names: Iterable[str], n: int = 13) -> EvaluationSets:
        """Of suites, files, folders and data sets of the hub.

        Raises:
            ConfigError: there is none of a name, or a row of it asks nothing.
        """
        return cls.of({name: _questions(name) for name in names}, n)

    @classmethod
    def of(cls, sets: Mapping[str, Iterable[str]], n: int = 13) -> EvaluationSets:
        made = cls(n)
        for name, texts in sets.items():
            made.texts[name] = made.too_short[name] = 0
            for text in texts:
                made._add(name, bare_words(text))
        return made

    def _add(self, name: str, tokens: list[str]) -> None:
        length = min(self.n, len(tokens))
        if length < min(SHORTEST, self.n):
            self.too_short[name] += 1
            return
        self.texts[name] += 1
        known = self._sets.setdefault(length, {})
        for gram in ngrams(tokens, length):
            known.setdefault(gram, set()).add(name)

    def found_in(self, texts: Iterable[str]) -> set[str]:
        """Names of the sets that share a sequence of words with one of these texts."""
        all_words = [bare_words(text) for text in texts]
        return {
            name
            for length, known in self._sets.items()
            for tokens in all_words
            for gram in ngrams(tokens, length)
            for name in known.get(gram, ())
        }


def _questions(name: str) -> Iterator[str]:
    """What the users of an evaluation set say."""
    a_place = "/" in name or Path(name).exists()  # a hub id has a slash, too
    rows, column = (read_rows(name), "") if a_place and name not in SUITES else published(name)
    for row in rows:
        said = asked(row, recognised(row, column if column in row.values else ""))
        yield "\n".join(message.content for message in said if message.role == "user")

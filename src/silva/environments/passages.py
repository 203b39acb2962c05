"""A long text in overlapping parts, and search over them: BM25 as Lucene has it, without any package.

    score(q, d) = sum over words of q:  ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 (1 - b + b |d| / L))

with N parts of L words on average, n of which hold the word, d tf times; k1 = 1.5, b = 0.75. Made for one
text of up to some million words, not for a corpus.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1, B = 1.5, 0.75
_WORD = re.compile(r"\w+")


def parts(text: str, words: int, overlap: int) -> list[str]:
    """Parts of this many words; each begins with the last `overlap` words of the one before."""
    ends = [match.span() for match in re.finditer(r"\S+", text)]
    step = words - overlap
    starts = range(0, max(len(ends) - overlap, 1), step)
    return [text[ends[i][0] : ends[min(i + words, len(ends)) - 1][1]] for i in starts] if ends else []


class Passages:
    """Parts with their search index."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self._where: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (part, how often)
        self._lengths = []
        for number, text in enumerate(texts):
            found = Counter(_WORD.findall(text.casefold()))
            self._lengths.append(found.total())
            for word, count in found.items():
                self._where[word].append((number, count))
        self._mean = sum(self._lengths) / max(len(texts), 1)

    def scores(self, query: str) -> dict[int, float]:
        """Of all parts with a word of the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in _WORD.findall(query.casefold()):
            places = self._where.get(word, ())
            rarity = math.log(1 + (len(self.texts) - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean)
                scores[number] += rarity * count / (count + norm)
        return scores

    def best(self, query: str) -> int | None:
        """The part with the highest score, the first of equal ones; None if none has a word of the query."""
        scores = self.scores(query)
        return min(scores, key=lambda number: (-scores[number], number), default=None)

"""Parts of long texts, and ranking of texts for a query: BM25 in plain Python, for small collections.

The order depends on the texts and the query alone: texts with equal scores keep their order.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"[^\W_]+")
K1, B = 1.2, 0.75  # how much more a word counts if a text repeats it; how much long texts are marked down


class Ranking:
    """BM25 (Robertson and Zaragoza 2009, section 3) with an idf that is never negative:
    ln(1 + (N - n + 0.5) / (n + 0.5)) for a word that is in n of N texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        self.size = len(counts)
        lengths = [count.total() for count in counts]
        average = sum(lengths) / max(self.size, 1) or 1.0
        postings: dict[str, list[tuple[int, float]]] = {}
        for number, count in enumerate(counts):
            norm = K1 * (1 - B + B * lengths[number] / average)
            for word, times in count.items():
                postings.setdefault(word, []).append((number, times * (K1 + 1) / (times + norm)))
        self._postings = postings

    def scores(self, query: str) -> dict[int, float]:
        """The score of every text that has a word of the query, by its number."""
        found: dict[int, float] = {}
        for word in dict.fromkeys(words(query)):
            posting = self._postings.get(word, [])
            idf = math.log(1 + (self.size - len(posting) + 0.5) / (len(posting) + 0.5))
            for number, weight in posting:
                found[number] = found.get(number, 0.0) + idf * weight
        return found

    def best(self, query: str, count: int) -> list[int]:
        """The numbers of the best texts, best first; only those that have a word of the query."""
        scores = self.scores(query)
        return heapq.nsmallest(count, scores, key=lambda number: (-scores[number], number))


def words(text: str) -> list[str]:
    """The words of a text in lower case, plurals as singulars."""
    return [_singular(word) for word in _WORD.findall(text.casefold())]


def has_phrase(words: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether the words of a phrase stand one after the other in a text."""
    size = len(phrase)
    return any(words[i : i + size] == phrase for i in range(len(words) - size + 1))


def parts(text: str, words: int, overlap: int) -> list[str]:
    """Parts of this many words; each begins with the last `overlap` words of the one before."""
    ends = [match.span() for match in re.finditer(r"\S+", text)]
    step = words - overlap
    starts = range(0, max(len(ends) - overlap, 1), step)
    return [text[ends[i][0] : ends[min(i + words, len(ends)) - 1][1]] for i in starts] if ends else []


def best_window(text: str, query: str, size: int) -> tuple[int, int]:
    """Which words of a text (as split at spaces) to show: the first window with most words of the query.

    Returns:
        Index of its first word, and of the one after its last.
    """
    wanted = set(words(query))
    hits = [wanted.intersection(words(part)) for part in text.split()]
    inside: Counter[str] = Counter()
    best, start = -1, 0
    for end, found in enumerate(hits, 1):
        inside.update(found)
        if end > size:
            inside.subtract(hits[end - size - 1])
        distinct = sum(times > 0 for times in inside.values())
        if end >= min(size, len(hits)) and distinct > best:
            best, start = distinct, max(0, end - size)
    return start, min(start + size, len(hits))


def _singular(word: str) -> str:
    """The S stemmer (Harman 1991): three rules for endings of plurals."""
    if len(word) <= 3 or word.endswith(("ss", "us")) or not word.endswith("s"):
        return word
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else f"{word[:-3]}y"
    return word[:-1]

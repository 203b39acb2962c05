"""SQuAD's comparison of answers (arXiv:1606.05250), with HotpotQA's guard (arXiv:1809.09600) for yes and no.

An answer is its words: lower case, without ASCII punctuation, without a, an, the. Unlike there, the sign and
the point of a number stay: -2 is not 2, and 3.5 is not 35.

    precision = common words / words of the answer      recall = common words / words of the reference
    F1 = 2 * precision * recall / (precision + recall)  (a word counts as often as it is in both)

Where one of them is "yes", "no" or "noanswer" and the other is not the same, F1 is 0. A reference that has no
words left ("The", "?!") is compared as it is: an empty answer must not equal it.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from silva.rewards import text as plain

_ARTICLES = {"a", "an", "the"}
_CLOSED = {"yes", "no", "noanswer"}
_OF_NUMBER = re.compile(r"(?<![\w)])-(?=\.?\d)|(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)")
_KEPT = {"-": "−", ".": "·"}  # no ASCII, so no punctuation
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """The words that count, in order."""
    text = _OF_NUMBER.sub(lambda found: _KEPT[found[0]], text.lower().replace("−", "-"))
    return [w for w in text.translate(_NO_PUNCTUATION).split() if w not in _ARTICLES]


def same(answer: str, reference: str) -> bool:
    """Exact match: the same words in the same order."""
    expected = words(reference)
    return words(answer) == expected if expected else plain.normalise(answer) == plain.normalise(reference)


def f1(answer: str, reference: str) -> float:
    """Overlap of words, from 0 to 1; 1 only for the same words, each as often."""
    given, expected = words(answer), words(reference)
    if not given or not expected:
        return float(same(answer, reference))
    if given != expected and _CLOSED & {" ".join(given), " ".join(expected)}:
        return 0.0
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))

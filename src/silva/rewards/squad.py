"""SQuAD's comparison of answers (arXiv:1606.05250), with HotpotQA's guard (arXiv:1809.09600) for yes and no.

An answer is its words: lower case, without ASCII punctuation, without a, an, the. Unlike in SQuAD, the minus
sign and the decimal point of a number stay: -7 is not 7, and 1.5 is not 15.

    precision = common words / words of the answer      recall = common words / words of the reference
    F1 = 2 * precision * recall / (precision + recall)  (a word counts as often as it is in both)

Where one of them is "yes", "no" or "noanswer" and the other is not the same, F1 is 0. A reference that has no
words left ("The", "?!") is compared as it is: an empty answer must not equal it.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from silva.rewards.text import normalise, plain

_ARTICLES = {"a", "an", "the"}
_CLOSED = {"yes", "no", "noanswer"}
# Not that of -7, -\pi, .5 and 1.5.
_PUNCTUATION = re.compile(rf"(?!(?<!\w)-\.?[\d\\]|(?<![^\W\d])\.\d)[{re.escape(string.punctuation)}]")


def words(text: str) -> list[str]:
    """The words that count, in order."""
    return [w for w in _PUNCTUATION.sub("", plain(text).lower()).split() if w not in _ARTICLES]


def same(answer: str, reference: str) -> bool:
    """Exact match: the same words in the same order."""
    expected = words(reference)
    return words(answer) == expected if expected else normalise(answer) == normalise(reference)


def f1(answer: str, reference: str) -> float:
    """Overlap of words, from 0 to 1; 1 only for the same words, each as often."""
    given, expected = words(answer), words(reference)
    if not given or not expected:
        return float(same(answer, reference))
    if given != expected and _CLOSED & {" ".join(given), " ".join(expected)}:
        return 0.0
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected))

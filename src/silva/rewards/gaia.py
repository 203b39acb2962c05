"""GAIA's quasi exact match (arXiv:2311.12983): the kind of the reference decides how answers are compared.

a number         equal as numbers; $, % and commas in the answer do not matter
a list: , or ;   as many items, each equal in its place: numbers as numbers, texts without case and spaces
a text           the same characters, without case, spaces and punctuation
"""

from __future__ import annotations

import math
import re
import string

_UNITS = str.maketrans("", "", "$%,")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ITEMS = re.compile(r"[,;]")


def same(answer: str, reference: str) -> bool:
    """Whether an answer is right."""
    if _number(reference) is not None:
        return _number(answer.translate(_UNITS)) == _number(reference)
    if _ITEMS.search(reference):
        given, expected = _ITEMS.split(answer), _ITEMS.split(reference)
        return len(given) == len(expected) and all(map(_same_item, given, expected))
    expected_text = _letters(reference).translate(_PUNCTUATION)
    # A reference of nothing but punctuation must not equal every other one.
    return (_letters(answer).translate(_PUNCTUATION) or None) == expected_text


def _same_item(answer: str, reference: str) -> bool:
    number = _number(reference)
    if number is not None:
        return _number(answer.translate(_UNITS)) == number
    return _letters(answer) == _letters(reference)


def _letters(text: str) -> str:
    return re.sub(r"\s", "", text).lower()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value

"""Reading and comparing answers: pure functions of text, exact, bounded in time."""

from __future__ import annotations

import re
import string
from difflib import SequenceMatcher
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_INTEGER = re.compile(r"-?\d+")
MAX_DIGITS = 60  # longer ones are no answers


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly: 1,234 or -0.5; None where there is none.

    A quotient such as 6/3 is two numbers: repeating a question must not count as computing it.
    """
    found = _NUMBER.findall(text.replace("−", "-"))
    if not found or len(found[-1]) > MAX_DIGITS:
        return None
    return Fraction(found[-1].replace(",", ""))


def integers(text: str) -> list[int]:
    """All integers in a text, in order; too long ones are left out."""
    return [int(digits) for digits in _INTEGER.findall(text.replace("−", "-")) if len(digits) <= MAX_DIGITS]


def extract_answer(text: str) -> str:
    """What stands in the first <answer>...</answer> (closed or not), else the whole text; stripped."""
    body = text.rpartition("</think>")[2]
    _, tag, answer = body.partition("<answer>")
    return (answer if tag else body).partition("</answer>")[0].strip()


def normalise(text: str) -> str:
    """Lower case, single spaces, no punctuation at either end."""
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")


def exact_match(reply: str, answer: str) -> bool:
    """Whether two texts are the same after `normalise`."""
    return normalise(reply) == normalise(answer)


def same_number(reply: str, answer: str) -> bool:
    """Whether the last number of the reply is exactly the answer."""
    expected = last_number(answer)
    return expected is not None and last_number(reply) == expected


def similarity(text: str, other: str) -> float:
    """Share of characters in common, in order (0 to 1; 1 only for equal texts)."""
    return SequenceMatcher(None, text, other, autojunk=False).ratio()

"""Reading and comparing answers: pure functions of text, exact, bounded in time."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from fractions import Fraction

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d+)?|\.\d+)"
_NUMERAL = re.compile(rf"[-+]?{_DECIMAL}")
# In a text; the second part (an exponent or a percent sign) changes the number.
_NUMBER = re.compile(rf"(?<![\w.])(-?{_DECIMAL})([eE][-+]?\d|\s?%)?")
_CODE = re.compile(r"[-+]?0\d")
_INTEGER = re.compile(r"-?\d+")
_QUOTES = (('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"), ("‘", "’"), ("«", "»"), ("**", "**"))
_SENTENCE_END = re.compile(r"(?<![.\s])\s?\.$|(?<=[^\W\d_]{2})!$")  # of "Paris!", not of "5!" or "n!"
MAX_DIGITS = 60  # longer ones are no answers


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly: 1,234 or -0.5; None if there is none, or if it is 5% or 1e5.

    A quotient such as 6/3 is two numbers: repeating a question must not count as computing it.
    """
    found = _NUMBER.findall(text.replace("−", "-"))
    return None if not found or found[-1][1] else _fraction(found[-1][0])


def as_number(answer: str) -> Fraction | None:
    """The number, if the whole answer is one; None for every other text.

    Not numbers: 5%, 1e5, 1/2, 2020-05-12, and codes, which begin with a superfluous 0 (007).
    """
    text = normalise(answer)
    return None if _CODE.match(text) else _read_number(text)


def integers(text: str) -> list[int]:
    """All integers in a text, in order; too long ones are left out."""
    return [int(digits) for digits in _INTEGER.findall(text.replace("−", "-")) if len(digits) <= MAX_DIGITS]


def extract_answer(text: str) -> str:
    """What stands in the last <answer>...</answer> (closed or not), else the whole text; stripped."""
    body = text.rpartition("</think>")[2]
    tagged = tagged_answer(body)
    return body.partition("</answer>")[0].strip() if tagged is None else tagged


def tagged_answer(text: str) -> str | None:
    """What follows the last <answer>, up to the next </answer> or the end; None if there is no tag.

    The last one counts, as with \\boxed{...}: a reply that corrects itself is graded on what it says last,
    and one that gives many answers on exactly one of them.
    """
    _, tag, answer = text.rpartition("<answer>")
    return answer.partition("</answer>")[0].strip() if tag else None


def normalise(text: str) -> str:
    """Lower case and single spaces, without quotes or ** around the text and without its last full stop.

    Everything else may be part of an answer: -5, .5, 5%, C++, (a). Nothing becomes empty.
    """
    text = " ".join(text.casefold().replace("−", "-").split())
    while (shorter := _without_frame(text)) and shorter != text:
        text = shorter
    return text


def exact_match(reply: str, answer: str) -> bool:
    """Whether two texts are the same after `normalise`; a number is compared as a number (5.0 is 5)."""
    expected = as_number(answer)
    if expected is None:
        return normalise(reply) == normalise(answer)
    return _read_number(normalise(reply)) == expected


def same_number(reply: str, answer: str) -> bool:
    """Whether the last number of the reply is exactly the answer."""
    expected = as_number(answer)
    return expected is not None and last_number(reply) == expected


def similarity(text: str, other: str) -> float:
    """Share of characters in common, in order (0 to 1; 1 only for equal texts)."""
    return SequenceMatcher(None, text, other, autojunk=False).ratio()


def _read_number(text: str) -> Fraction | None:
    return _fraction(text) if _NUMERAL.fullmatch(text) else None


def _fraction(numeral: str) -> Fraction | None:
    return Fraction(numeral.replace(",", "")) if len(numeral) <= MAX_DIGITS else None


def _without_frame(text: str) -> str:
    for opening, closing in _QUOTES:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            return text[len(opening) : -len(closing)].strip()
    return _SENTENCE_END.sub("", text)

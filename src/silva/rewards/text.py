"""Reading and comparing answers: pure functions of text, exact, bounded in time."""

from __future__ import annotations

import re
import unicodedata
from difflib import SequenceMatcher
from fractions import Fraction

from silva.rewards.maths_words import leads, quantity
from silva.thoughts import answer_of

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d+)?|\.\d+)"
_NUMERAL = re.compile(rf"[-+]?{_DECIMAL}")
# In a text; the second part (an exponent or a percent sign) changes the number.
_NUMBER = re.compile(rf"(?<![\w.])(-?{_DECIMAL})([eE][-+]?\d|\s?%)?")
_BREAK = re.compile(r"=|\n|[.:;]\s")
_NEXT = re.compile(r"\n|[.:;]\s")  # where another sentence begins
_TAKEN_BACK = re.compile(r"\b(?:no|not|wrong|incorrect|false|wait|actually|instead|sorry)\b|n't\b", re.I)
_HARMLESS = re.compile(r"(?:[\s.,;:'*$€£°`\"]|[^\W\d_])*")
_MARKS = re.compile(r"[$€£°*`'\"]")
_NAME = re.compile(r"^\s*[A-Za-z]?\s*=(?!=)")
_CODE = re.compile(r"[-+]?0\d")
_INTEGER = re.compile(r"-?\d+")
_FRAMES = (('"', '"'), ("'", "'"), ("`", "`"), ("**", "**"))
_FORMULAS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
STYLES = "text|textbf|textit|textrm|textsf|texttt|emph|mbox|mathrm|mathbf|mathsf|operatorname"  # of words
_STYLE = rf"\\(?:{STYLES}|boxed|fbox)\s*\{{"
_STYLED = re.compile(_STYLE)
_WORDS_STYLED = re.compile(_STYLE + r"([^{}]*[^{}\s][^{}]*)\}")
_ESCAPED = re.compile(r"\\([%$&#_])")
_TYPOGRAPHY = str.maketrans("“”„‟«»‘’‚‛−–‐‑", '""""""\'\'\'\'----')
_BRACES = re.compile(r"\\[\s\S]|[{}]")
_FORMULA_SIGN = re.compile(r"(?<!\\)\$|\\[()\[\]]")
MAX_FRAMES = 8  # around an answer
_SENTENCE_END = re.compile(r"(?<![.\s])\s?\.$|(?<=[^\W\d_]{2})!$")  # of "Paris!", not of "5!" or "n!"
MAX_DIGITS = 60  # longer ones are no answers


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly: 1,234 or -0.5; None if there is none.

    What stands next to it must leave it what it is ("so it is 5 km.", "3 + 2 = 5"). In 12-5, 10/2, x^5, 5!,
    "by 5", "5 thousand" and "5 is wrong" there is none: repeating a question must not count as computing it.
    Sentences that follow may say anything but that it was wrong.
    """
    text = plain(text)
    found = list(_NUMBER.finditer(text))
    if not found or found[-1][2] or _CODE.match(found[-1][1]):
        return None
    before, after = text[: found[-1].start()], text[found[-1].end() :]
    *others, before = _BREAK.split(before[found[-2].end() if len(found) > 1 else 0 :])
    after, *later = _NEXT.split(after, maxsplit=1)
    if not _HARMLESS.fullmatch(before + after) or (later and _TAKEN_BACK.search(later[0])):
        return None
    before, words = _MARKS.sub(" ", before), quantity(_MARKS.sub(" ", after))
    is_alone = len(found) == 1 or others or before.strip(" ,")  # "41, 42" are two numbers
    changed = words is None or words.percent or words.plus or words.scale != 1
    return _fraction(found[-1][1]) if is_alone and leads(before) and not changed else None


def lone_number(text: str) -> Fraction | None:
    """The number that all of a text says: 5, "5 km", "x = 5" or "It is 5."; None if it says anything else."""
    text = _NAME.sub("", plain(text))
    found = list(_NUMBER.finditer(text))
    several = len(found) != 1 or "=" in text or _NEXT.search(text[found[0].end() :].rstrip())
    return None if several else last_number(text)


def as_number(answer: str) -> Fraction | None:
    """The number, if the whole answer is one; None for every other text.

    Not numbers: 5%, 1e5, 1/2, 2020-05-12, and codes, which begin with a superfluous 0 (007).
    """
    text = normalise(answer)
    return _fraction(text) if _NUMERAL.fullmatch(text) and not _CODE.match(text) else None


def integers(text: str) -> list[int]:
    """All integers in a text, in order; too long ones are left out."""
    return [int(digits) for digits in _INTEGER.findall(text.replace("−", "-")) if len(digits) <= MAX_DIGITS]


def extract_answer(text: str) -> str:
    """What stands in the last <answer>...</answer> (closed or not), else the whole text; stripped."""
    body = answer_of(text)
    tagged = tagged_answer(body)
    return body.partition("</answer>")[0].strip() if tagged is None else tagged


def tagged_answer(text: str) -> str | None:
    """What follows the last <answer>, up to the next </answer> or the end; None if there is no tag.

    The last one counts, as with \\boxed{...}: a reply that corrects itself is graded on what it says last,
    and one that gives many answers on exactly one of them.
    """
    _, tag, answer = text.rpartition("<answer>")
    return answer.partition("</answer>")[0].strip() if tag else None


def group_end(text: str, start: int) -> int | None:
    """Where the brace closes that opens at `start`; None if it does not."""
    depth = 0
    for found in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


def unframed(text: str) -> str:
    r"""Without the dress of LaTeX around all of it: $...$, \text{...}, \textbf{...}, \boxed{...}."""
    for _ in range(MAX_FRAMES):
        text = text.strip()
        inner = _unframed_once(text).strip()
        if not inner or inner == text:
            break
        text = inner
    return text


def plain(text: str) -> str:
    r"""In the plainest dress: \text{so} is so, 5\% is 5%, and é, quotes and dashes have one form each."""
    text = unicodedata.normalize("NFC", unframed(text)).translate(_TYPOGRAPHY)
    return _WORDS_STYLED.sub(r"\1", _ESCAPED.sub(r"\1", text))


def normalise(text: str) -> str:
    """`plain`, in lower case, with single spaces, without quotes or ** around it and its last full stop.

    Everything else may be part of an answer: -5, .5, 5%, C++, (a). Nothing becomes empty.
    """
    text = " ".join(plain(text).casefold().split())
    while (shorter := _without_frame(text)) and shorter != text:
        text = shorter
    return text


def exact_match(reply: str, answer: str) -> bool:
    """Whether two texts are the same after `normalise`; a number is compared as a number (5.0 is 5)."""
    expected = as_number(answer)
    if expected is None:
        return normalise(reply) == normalise(answer)
    return as_number(reply) == expected


def same_answer(given: str, answer: str) -> bool:
    """Whether an answer is that of the task: the same number, if that is one, and otherwise the same text."""
    expected = as_number(answer)
    return exact_match(given, answer) if expected is None else lone_number(given) == expected


def is_right(reply: str, answer: str) -> bool:
    """Whether a reply gives the answer of the task, in <answer>...</answer> or else as all of it.

    Without the tag, the last number of the reply counts if the answer is a number.
    """
    expected, untagged = as_number(answer), tagged_answer(answer_of(reply)) is None
    if expected is not None and untagged:
        return last_number(extract_answer(reply)) == expected
    return same_answer(extract_answer(reply), answer)


def similarity(text: str, other: str) -> float:
    """Share of characters in common, in order (0 to 1; 1 only for equal texts)."""
    return SequenceMatcher(None, text, other, autojunk=False).ratio()


def _fraction(numeral: str) -> Fraction | None:
    return Fraction(numeral.replace(",", "")) if len(numeral) <= MAX_DIGITS else None


def _unframed_once(text: str) -> str:
    for opening, closing in _FORMULAS:
        inner = text[len(opening) : -len(closing)]
        whole = len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing)
        if whole and not text.endswith("\\$") and not _FORMULA_SIGN.search(inner):
            return inner
    found = _STYLED.match(text)
    return text[found.end() : -1] if found and group_end(text, found.end() - 1) == len(text) - 1 else text


def _without_frame(text: str) -> str:
    for opening, closing in _FRAMES:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            return text[len(opening) : -len(closing)].strip()
    return _unframed_once(_SENTENCE_END.sub("", text))

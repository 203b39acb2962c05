"""Multiple choice: 1 for the right letter, else 0.

The final answer must name one letter: alone (`B`, `(B)`, `b`), with the option's text (`B. Paris`,
`D. Vitamin C`) or in a sentence (`It is B`). An answer that names two different letters, such as "A B C D" or
"A or B", names none. Letters that it rules out do not count: "B, not A", "B is right; A and C are wrong".
Before a word in lower case, "I" is a pronoun ("I think B"), and "A" after another letter is an article
("B. A river").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from silva.errors import RecordError
from silva.protocols import Attempt, Reward, Score
from silva.rewards.answers import Extract, find_answer
from silva.rewards.settings import RewardSettings
from silva.rewards.text import plain

_ALONE = re.compile(r"\W*([A-Za-z])\W*", re.ASCII)
_NAMED = re.compile(r"(?<![\w'’])([A-Z])(?![\w'’])")
_WORD = re.compile(r"\s+(?!(?:or|and|nor)\b)[a-z]")  # after "A" or "I": an article, a pronoun
_OPTION = re.compile(r"\W{0,3}([A-Z])[.):]+\W{0,3}(?=[^\W\d_]{2})")  # B. and the text of the option
_CHOICE = re.compile(
    r"(?:^|[,;/(&]|\b(?:or|and|nor|but|is))\s*[(\"'*]*[A-Z](?![\w'’])|(?<![\w'’])[A-Z][.):]", re.I
)
_LIST = r"[(]?[A-Z]\b[)]?(?:\s*(?:,|/|,?\s*\b(?:and|or|nor)\b)\s*[(]?[A-Z]\b[)]?)*"
_RULED_OUT = re.compile(
    rf"[,;(]\s*(?:and\s+)?not\s+{_LIST}|{_LIST}\s+(?:is|are)\s+(?:wrong|incorrect|false)\b"
)
_NEGATION = re.compile(r"\b(?:not|never|neither|nor|cannot|except)\b|n['’]t\b", re.I)


class Letter(RewardSettings):
    """Multiple choice: 1 for the right letter, else 0."""

    type: Literal["letter"] = "letter"
    extract: Extract = "auto"
    """Where the final answer stands: a tag, a box, the last line, the whole reply."""

    def vote(self, reply: str) -> str | None:
        answer = find_answer(reply, self.extract)
        return None if answer is None else named_letter(answer)

    def build(self) -> Reward:
        return LetterReward(self)


class LetterReward:
    def __init__(self, settings: Letter) -> None:
        self.settings = settings

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`."""
        _right(answer)

    async def score(self, attempt: Attempt) -> Score:
        right = _right(attempt.answer)
        answer = find_answer(attempt.reply, self.settings.extract)
        chosen = None if answer is None else named_letter(answer)
        solved = chosen == right
        return Score(float(solved), solved, {"answered": float(chosen is not None)})


def _right(answer: Any) -> str:
    if not isinstance(answer, str) or (letter := named_letter(answer)) is None:
        raise RecordError(f"answer of the task: got {answer!r}, expected one letter from A to Z")
    return letter


def named_letter(answer: str) -> str | None:
    """The only letter that an answer names, in upper case; None if there is none or more than one."""
    answer = _RULED_OUT.sub("", plain(answer))
    if _NEGATION.search(answer):
        return None
    if alone := _ALONE.fullmatch(answer):
        return alone[1].upper()
    option = _OPTION.match(answer)
    if option and not _CHOICE.search(answer, option.end()):
        return option[1]
    named: list[str] = []
    for found in _NAMED.finditer(answer):
        is_word = _WORD.match(answer, found.end()) and (found[1] == "I" or (found[1] == "A" and named))
        if not is_word and found[1] not in named:
            named.append(found[1])
    return named[0] if len(named) == 1 else None

r"""The final answer of a reply, and what it is compared with. Pure functions of text, linear in its length.

Only what the policy wrote in its last reply is read, without its thoughts: tags in the question, in tool
results or in earlier turns count for nothing. Of several answers the last one counts, so that a reply is
graded on exactly one. Where the place that the rules name is empty, there is no answer; no other place is
tried.

    extract      the answer is
    answer_tag   what follows the last <answer>, up to the next </answer> or the end
    boxed        the braces of the last \boxed{...}; they must close
    last_line    the last line that is not blank
    whole        the whole reply
    auto         the first of these that the reply has: the tag (in it, the last box); the last box; what
                 follows the last "Final answer:", "The answer is", "Answer:" or "####" on its line or on the
                 next; the last line
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from silva.errors import RecordError
from silva.rewards.text import group_end, tagged_answer, unframed
from silva.thoughts import OPEN
from silva.types import plain_number

if TYPE_CHECKING:
    from silva.protocols import Attempt

Extract = Literal["auto", "answer_tag", "boxed", "last_line", "whole"]

MAX_ANSWER = 10_000  # characters; longer ones are no answers
TAIL = 20_000  # characters at the end of a reply in which a last line or a marker is searched
# Possessive, so that no run of spaces is read twice.
_MARKER = re.compile(
    r"(?:\bfinal answer\s*+(?:is\b|:|\*\*)|\bthe answer is\b|\banswer\s*+:|####)[\s:*]*+", re.I
)
# Without U+200C and U+200D, which some scripts and emoji need.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
)


def find_answer(reply: str, how: Extract = "auto") -> str | None:
    r"""The final answer, without $...$ or \text{...} around all of it; None if there is none.

    One that is too long or has invisible characters is none.
    """
    answer = FINDERS[how](reply.partition(OPEN)[0])  # what never closes is a thought too
    if answer is None or not (answer := answer.strip()):
        return None
    return None if len(answer) > MAX_ANSWER or _UNSEEN.search(answer) else unframed(answer)


def references(answer: Any) -> list[str]:
    """The right answers of a task as texts: its answer, or each of a list; true is also "yes", false "no".

    Raises:
        RecordError: there is none, or one is neither text nor a number: the task cannot be graded.
    """
    given = answer
    if isinstance(answer, Mapping) and [*answer] == ["target"]:  # Search-R1's
        given = answer["target"]
    every = given if isinstance(given, list | tuple) else [given]
    found = [text for each in every for text in _texts(each)]
    if not found or not all(text.strip() for text in found):
        raise RecordError(
            f"answer of the task: got {answer!r:.200}, expected text that is not empty, a number, true or "
            "false, or a list of these"
        )
    return found


class GradesByAnswer:
    """Base of rewards that compare with the task's answer. `check`: see `silva.protocols.ChecksTasks`."""

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        references(answer)


def _texts(answer: Any) -> list[str]:
    answer = plain_number(answer)
    if isinstance(answer, bool):
        return ["true", "yes"] if answer else ["false", "no"]
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        return [str(int(answer))]  # 72.0 is written 72
    return [str(answer)] if isinstance(answer, str | int | float) else [""]


def question(attempt: Attempt) -> str:
    """The column `question` of the task, otherwise the first message of the user."""
    column = attempt.data.get("question")
    if isinstance(column, str):
        return column
    return next((m.content for m in attempt.messages if m.role == "user"), "")


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, or the token after a last \boxed without braces."""
    start, length = max((text.rfind(command), len(command)) for command in ("\\boxed", "\\fbox"))
    if start < 0:
        return None
    rest = text[start + length : start + length + 2 * MAX_ANSWER].lstrip()
    if not rest.startswith("{"):
        return rest.split(maxsplit=1)[0].rstrip("$.") if rest else ""
    end = group_end(rest, 0)
    return "" if end is None else rest[1:end]  # it may never close


def last_line(text: str) -> str:
    lines = text[-TAIL:].rstrip().splitlines()
    return lines[-1] if lines else ""


def _auto(reply: str) -> str | None:
    tagged = tagged_answer(reply)
    if tagged is not None:
        inner = boxed(tagged)
        return tagged if inner is None else inner
    found = boxed(reply)
    return _marked(reply) if found is None else found


def _marked(reply: str) -> str:
    tail = reply[-TAIL:]
    ends = [found.end() for found in _MARKER.finditer(tail)]
    if not ends:
        return last_line(reply)
    line = tail[ends[-1] :].partition("\n")[0].strip()
    return f"**{line}" if line.count("**") % 2 else line  # the marker has taken the first of **42**


FINDERS: Mapping[str, Callable[[str], str | None]] = {
    "auto": _auto,
    "answer_tag": tagged_answer,
    "boxed": boxed,
    "last_line": last_line,
    "whole": str,
}

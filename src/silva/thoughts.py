"""Thoughts apart from the answer: what stands between <think> and </think>, or between the marks of another
family of models.

`split_reasoning` reads a whole reply, as the renderer and the APIs do. `answer_of` is for graders: in the
content of a message the end of a thought can still stand, if nothing in it opened the thought. Both read the
marks of all families; what Silva writes has <think>, unless the chat template has others (`marks_of`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Marks(NamedTuple):
    """What opens and closes a thought, and what opens an answer without one."""

    open: str
    close: str
    answer: str = ""


THINK = Marks("<think>", "</think>")
FINAL = "<|channel|>final<|message|>"
FAMILIES = (
    THINK,
    Marks("[THINK]", "[/THINK]"),  # Magistral
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Marks("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{FINAL}", FINAL),  # gpt-oss
)
OPEN, CLOSE = THINK.open, THINK.close
TAGS = tuple(tag for marks in FAMILIES for tag in marks if tag)
_CLOSES = {marks.open: marks.close for marks in FAMILIES}


def _any(tags: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


_OPEN, _CLOSE, _TAG = _any([*_CLOSES]), _any([*_CLOSES.values()]), _any([*_CLOSES, *_CLOSES.values()])
_AGAIN = re.compile(rf"\A\s*(?:{_OPEN.pattern})")
_HIDDEN = "\ufdd4"  # a non-character


def marks_of(template: str) -> Marks:
    """The marks in the source of a chat template."""
    return next((marks for marks in FAMILIES if marks.open in template), THINK)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Split a reply into its thoughts and the rest.

    Args:
        text: the reply.
        opened: the reply starts inside a thought, because the prompt ended with an open <think>.

    Returns:
        (reasoning, content). `reasoning` is None where there is no thought at all; several thoughts are
        joined by newlines. A thought that is never closed runs to the end. Content is left as it is
        when there is no thought, and `trimmed` otherwise.
    """
    thoughts, rest = list[str](), text
    content = [""] if opened else []  # before the first thought
    while True:
        if opened:  # by the prompt
            close = next(iter(_CLOSE.findall(rest)), CLOSE)
        elif tag := _OPEN.search(rest):
            content.append(rest[: tag.start()])
            rest, close = rest[tag.end() :], _CLOSES[tag[0]]
        else:
            content.append(rest)
            break
        thought, closed, rest = rest.partition(close)
        # A prompt may already hold the tag that the model writes once more.
        thoughts.append(_AGAIN.sub("", thought).strip())
        opened = False
        if not closed:
            break
    if not thoughts:
        return None, text.removeprefix(FINAL)
    return "\n".join(thoughts), trimmed(content)


def answer_of(text: str) -> str:
    """What follows the last thought that ends in `text`."""
    return _CLOSE.split(text)[-1]


def trimmed(parts: Sequence[str]) -> str:
    """Text around markup, without the whitespace between them at its ends.

    If text stands before the markup, it keeps its beginning: a reader may have it already.
    """
    text = "".join(parts).rstrip()
    return text if parts[0].strip() else text.lstrip()


def join_reasoning(reasoning: str | None, content: str, marks: Marks = THINK) -> str:
    """The inverse: one text with the thought in front, in the whitespace reasoning models are trained on."""
    if reasoning is None:
        return marks.answer + content
    if marks.answer:
        return f"{marks.open}{reasoning}{marks.close}{content}"
    return f"{marks.open}\n{reasoning}\n{marks.close}\n\n{content}"


def ends_in_thought(text: str, *, opened: bool = False) -> bool:
    """Whether `text` leaves a thought open: its own mark closes it. `opened`: it starts inside one."""
    closes = {*_CLOSES.values()} if opened else set[str]()
    for tag in _TAG.findall(text):
        if tag in (closes or _CLOSES):
            closes = set() if closes else {_CLOSES[tag]}
    return bool(closes)


def starts_in_thought(text: str) -> bool:
    """Whether `text` (a reply) goes on with a thought: it closes one before it opens any."""
    return next(iter(_TAG.findall(text)), OPEN) not in _CLOSES


def hide_tags(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """`text` whose tags inside `spans` open and close no thought; `show_tags` undoes it."""
    pieces, at = list[str](), 0
    for begin, end in spans:
        pieces += [text[at:begin], _TAG.sub(lambda tag: tag[0][0] + _HIDDEN + tag[0][1:], text[begin:end])]
        at = end
    return "".join([*pieces, text[at:]])


def show_tags(text: str) -> str:
    return text.replace(_HIDDEN, "")

"""Thoughts apart from the answer: what stands between <think> and </think>.

`split_reasoning` reads a whole reply, as the renderer and the APIs do. `answer_of` is for graders: in the
content of a message the end of a thought can still stand, if nothing in it opened the thought.
"""

from __future__ import annotations

from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"
_HIDDEN = "\ufdd4"  # a non-character


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
    thoughts, rest = [], text
    content = [""] if opened else []  # before the first thought
    while True:
        if not opened:
            before, tag, rest = rest.partition(OPEN)
            content.append(before)
            if not tag:
                break
        thought, tag, rest = rest.partition(CLOSE)
        # A prompt may already hold the tag that the model writes once more.
        thoughts.append(thought.strip().removeprefix(OPEN).strip())
        opened = False
        if not tag:
            break
    if not thoughts:
        return None, text
    return "\n".join(thoughts), trimmed(content)


def answer_of(text: str) -> str:
    """What follows the last thought that ends in `text`."""
    return text.rpartition(CLOSE)[2]


def trimmed(parts: Sequence[str]) -> str:
    """Text around markup, without the whitespace between them at its ends.

    If text stands before the markup, it keeps its beginning: a reader may have it already.
    """
    text = "".join(parts).rstrip()
    return text if parts[0].strip() else text.lstrip()


def join_reasoning(reasoning: str | None, content: str) -> str:
    """The inverse: one text with the thought in front, in the whitespace reasoning models are trained on."""
    return content if reasoning is None else f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{content}"


def ends_in_thought(text: str) -> bool:
    """Whether `text` (the end of a prompt) leaves a thought open."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def hide_tags(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """`text` whose tags inside `spans` open and close no thought; `show_tags` undoes it."""
    pieces, at = list[str](), 0
    for begin, end in spans:
        inside = text[begin:end]
        for tag in (OPEN, CLOSE):
            inside = inside.replace(tag, _HIDDEN + tag[1:])
        pieces += [text[at:begin], inside]
        at = end
    return "".join([*pieces, text[at:]])


def show_tags(text: str) -> str:
    return text.replace(_HIDDEN, "<")

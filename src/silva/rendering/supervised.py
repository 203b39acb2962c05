"""Recorded dialogues as rows to train on: the tokens that inference would see, and who wrote each of them.

    system, user ──context──> prompt     reply ──script──> as a policy would have sampled it
    tool, user   ──extend───> prompt     reply ──script──> ...                                  one row

Where the chat template rewrites earlier turns (`Renderer.rebuilds_context`), every prompt is a context of its
own. One that goes on from the row before it stays in that row; otherwise it begins the next one. A reply is
trained where a policy would have sampled it, and nowhere else.

Who wrote a token is known from rendering, and the text is not searched: what `script` makes of a reply is the
assistant's, its stop token included. The words of other roles are found by rendering once more with marks
around them, which no content holds. Headers and other glue of the template belong to no role.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from silva.errors import RenderingError
from silva.rendering.dialogue import Dialogue, reply_text
from silva.rendering.renderer import Renderer
from silva.rendering.tool_calls import write_calls
from silva.types import Message, Role, ToolSpec

if TYPE_CHECKING:
    import numpy as np

_MARKS = [chr(0xFDD5 + i) for i in range(27)]  # Unicode non-characters


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """One row to train on.

    Attributes:
        tokens: int64 [T].
        trained: for each role, bool [T]: its tokens that count in the loss. No token counts for two roles.
        where, weight: as in `Dialogue`.
    """

    tokens: np.ndarray
    trained: Mapping[Role, np.ndarray]
    where: str = ""
    weight: float = 1.0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def count(self) -> int:
        """Trained tokens."""
        return sum(int(mask.sum()) for mask in self.trained.values())

    def first(self, count: int) -> SupervisedRow:
        """Its first tokens."""
        trained = {role: mask[:count] for role, mask in self.trained.items()}
        return replace(self, tokens=self.tokens[:count], trained=trained)


def supervised_rows(
    renderer: Renderer,
    dialogue: Dialogue,
    *,
    roles: Sequence[Role] = ("assistant",),
    turns: Literal["all", "last"] = "all",
) -> list[SupervisedRow]:
    """The rows of a dialogue, each with a trained token: one, or more if the template rewrites earlier turns.

    Args:
        roles: the roles that are trained.
        turns: all of them, or the last reply only (of other roles: what it answers).

    Raises:
        RenderingError: the template refuses the dialogue, or does not show the words of a role as they are.
    """
    steps = list(_steps(dialogue.messages))
    replies = [i for i, (_, reply) in enumerate(steps) if reply is not None]
    first = replies[-1] if turns == "last" and replies else 0
    others: set[Role] = {role for role in roles if role != "assistant"}
    marks = _free_marks(dialogue.messages) if others else ("", "")
    row = _Growing(renderer, dialogue.tools, roles, marks)
    rows, history = list[_Growing](), list[Message]()
    for number, (added, reply) in enumerate(steps):
        if reply is None and not any(message.role in others for message in added):
            break  # nobody answers it, and nothing of it is trained
        wanted = others if number >= first else set[Role]()
        row = row.prompted(history, added, wanted)
        if not rows or rows[-1] is not row:
            rows.append(row)
        history += added
        if reply is not None:
            offered = dialogue.tools or [ToolSpec(call.name, "", {}) for call in reply.tool_calls]
            ids = _sampled(renderer, reply, row.tokens, offered)
            if renderer.rebuilds_context:  # with the message that inference would have
                history.append(renderer.parse(ids, prompt=row.tokens, tools=offered))
            row.add(ids, "assistant" if number >= first else None)
    found = [row.finished(dialogue.where, dialogue.weight) for row in rows]
    return [row for row in found if row.count]


def trained_text(renderer: Renderer, row: SupervisedRow, between: int | None = None) -> str:
    """The text of a row for people, with what is trained between ⟦ and ⟧.

    Args:
        between: the most characters of a stretch that is not trained: its two ends; None: all.
    """
    trained = [any(mask[i] for mask in row.trained.values()) for i in range(len(row))]
    cuts = [0, *(i for i in range(1, len(row)) if trained[i] != trained[i - 1]), len(row)]
    pieces = []
    for begin, end in pairwise(cuts):
        text = renderer.decode(row.tokens[begin:end].tolist())
        if not trained[begin] and between is not None and len(text) > between:
            text = f"{text[: between // 2]} ... {text[-between // 2 :]}"
        pieces.append(f"⟦{text}⟧" if trained[begin] else text)
    return "".join(pieces)


def _steps(messages: Sequence[Message]) -> Iterator[tuple[list[Message], Message | None]]:
    """Each reply with the new messages before it; at the end, those that nobody answers."""
    added: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            yield added, message
            added = []
        else:
            added.append(message)
    if added:
        yield added, None


class _Growing:
    """A row while it grows: `spans` are the trained ones, as (begin, end, role)."""

    def __init__(
        self, renderer: Renderer, tools: Sequence[ToolSpec], roles: Sequence[Role], marks: tuple[str, str]
    ) -> None:
        self.renderer, self.tools, self.roles, self.marks = renderer, tools, roles, marks
        self.tokens, self.last, self.spans = list[int](), list[int](), list[tuple[int, int, Role]]()

    def prompted(self, history: Sequence[Message], added: Sequence[Message], wanted: set[Role]) -> _Growing:
        """This row with the prompt of the next reply; a new one if the prompt does not go on from it."""
        begins = self.renderer.rebuilds_context or not self.tokens

        def render(new: Sequence[Message]) -> list[int]:
            if begins:
                return self.renderer.context([*history, *new], self.tools)
            return self.renderer.extend(self.last, new)

        row, prompt, at = self, render(added), 0 if begins else len(self.tokens)
        if begins and prompt[: len(self.tokens)] != self.tokens:
            row = _Growing(self.renderer, self.tools, self.roles, self.marks)
        words = _words(self.renderer, prompt, added, render, wanted, self.marks)
        row.tokens = [*row.tokens[:at], *prompt]
        row.spans += [(at + begin, at + end, role) for begin, end, role in words]
        return row

    def add(self, reply: Sequence[int], role: Role | None) -> None:
        if role in self.roles and role is not None:
            self.spans.append((len(self.tokens), len(self.tokens) + len(reply), role))
        self.tokens += reply
        self.last = list(reply)

    def finished(self, where: str, weight: float) -> SupervisedRow:
        import numpy as np

        trained = {role: np.zeros(len(self.tokens), dtype=bool) for role in self.roles}
        for begin, end, role in self.spans:
            trained[role][max(begin, 1) : end] = True  # nothing predicts the first token
        return SupervisedRow(np.array(self.tokens, dtype=np.int64), trained, where, weight)


def _sampled(
    renderer: Renderer, reply: Message, prompt: Sequence[int], tools: Sequence[ToolSpec]
) -> list[int]:
    """What a policy would have sampled."""
    ids = renderer.script(reply_text(reply), prompt)
    tags = renderer.stop_strings(tools) if reply.tool_calls else ()
    return ids[:-1] if tags and renderer.decode(ids[:-1]).endswith(tags) else ids  # sampling stops at a tag


def _words(
    renderer: Renderer,
    prompt: Sequence[int],
    added: Sequence[Message],
    render: Callable[[Sequence[Message]], list[int]],
    roles: set[Role],
    marks: tuple[str, str],
) -> list[tuple[int, int, Role]]:
    """Where in `prompt` the words of new messages stand, as (begin, end, role).

    Whitespace around them, and tokens that they share with the template, are left out.
    """
    found: list[tuple[int, int, Role]] = []
    for role in sorted({m.role for m in added if m.role in roles and m.content.strip()}):
        marked = [_marked(m, *marks) if m.role == role else m for m in added]
        whole = b"".join(_bytes(renderer, render(marked)))
        pieces = _bytes(renderer, prompt)
        ends = list(accumulate(map(len, pieces)))
        spans, text = _spans(whole, *marks)
        if text != b"".join(pieces) or len(spans) != sum(
            m is not n for m, n in zip(marked, added, strict=True)
        ):
            raise RenderingError(
                f"the chat template does not show what role {role} says as it is, so it is not known which "
                f"tokens are its words; leave {role!r} out of `roles`"
            )
        for first, last in spans:
            inside = [i for i, piece in enumerate(pieces) if first <= ends[i] - len(piece) < ends[i] <= last]
            if inside:
                found.append((inside[0], inside[-1] + 1, role))
    return found


def _free_marks(messages: Sequence[Message]) -> tuple[str, str]:
    """Two characters that nobody wrote."""
    used = "".join(f"{m.content}{m.reasoning}{write_calls(m.tool_calls)}" for m in messages)
    begin, end, *_ = (mark for mark in _MARKS if mark not in used)
    return begin, end


def _marked(message: Message, begin: str, end: str) -> Message:
    core = message.content.strip()
    if not core:
        return message
    before, _, after = message.content.partition(core)
    return replace(message, content=f"{before}{begin}{core}{end}{after}")


def _bytes(renderer: Renderer, tokens: Sequence[int]) -> list[bytes]:
    return [renderer.bytes_of(token, tokens[max(i - 1, 0) : i]) for i, token in enumerate(tokens)]


def _spans(whole: bytes, begin: str, end: str) -> tuple[list[tuple[int, int]], bytes]:
    """What stands between marks, as places in the text without them, and that text."""
    parts = re.split(f"{begin}|{end}".encode(), whole)
    places = [0, *accumulate(map(len, parts))]
    return list(zip(places[1:-1:2], places[2:-1:2], strict=False)), b"".join(parts)

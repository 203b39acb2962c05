"""What a chat template does not allow, and what it does to earlier turns, in words for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from silva.rendering.entries import Entries
from silva.rendering.template import ChatTemplate, Features
from silva.thoughts import ends_in_thought, join_reasoning
from silva.types import Message, ToolCall

_USER, _ANSWER = Message("user", "qxuser"), Message("assistant", "qxanswer")


def limits(has: Features) -> list[str]:
    notes = []
    if not has.system:
        notes.append(
            "The chat template shows no system message: it is sent as part of the first user message."
        )
    elif not has.later_system:
        notes.append(
            "The chat template shows system messages only at the start: later ones are sent as user."
        )
    if has.alternates:
        notes.append(
            "The chat template refuses two user messages in a row: they are joined, also across results."
        )
    if has.clock:
        notes.append("The chat template prints the date: pinned, so that a run can be repeated.")
    return notes


def tool_limits(has: Features, form: str, result: str | None) -> list[str]:
    """Args:
    form: how calls are written.
    result: how results are shown inside the reply; None if they are not.
    """
    notes = []
    if result is not None:
        notes.append("Results of tools follow their call in the same reply (rendering.result).")
    elif not has.tool_role:
        notes.append("The chat template does not know tool results: sent as user, inside <tool_response>.")
    if not has.tools:
        notes.append("The chat template does not describe tools: the system message describes them.")
    elif has.form != form:
        wanted = f"it writes calls in the form {has.form}" if has.form else "it writes calls in no known form"
        notes.append(
            f"The chat template's own tools are not used ({wanted}, rendering.tools asks for {form}): the "
            "system message describes them."
        )
    return notes


def earlier_turns(template: ChatTemplate, entries: Entries) -> list[str]:
    """What the template does to earlier turns, found by rendering dialogues whole and piece by piece."""
    tool, calls = Message("tool", "qxresult", name="qxtool"), (ToolCall("qxtool", {}),)
    asks = Message("assistant", "", tool_calls=calls) if entries.takes(calls) else _ANSWER
    thought = Message("assistant", "qxanswer", reasoning="qxthought")
    if ends_in_thought(template.opening):
        return ["opens a thought for the last reply only"]
    if not _agrees(template, entries, [_USER, asks, tool, _ANSWER, _USER]):
        return ["writes earlier turns differently from the last one"]
    changes = []
    for follower, where in ((tool, "before a tool result"), (_USER, "before a user message")):
        if not _agrees(template, entries, [_USER, thought, follower]):
            whole = template.render(entries.of([_USER, thought, follower], start=True))
            verb = "rewrites" if "qxthought" in whole else "drops"
            changes.append(f"{verb} the thoughts of earlier turns {where}")
    return changes


def ruling(change: str, *, rebuilds: bool) -> str:
    """Args:
    rebuilds: the template may change earlier turns.
    """
    if rebuilds:
        return f"The chat template {change}: every turn is rendered again (history = 'template')."
    return f"The chat template {change}: overruled, earlier turns stay as sampled (history = 'keep')."


def trims(template: ChatTemplate, entries: Entries) -> bool:
    """Whether it takes the whitespace around a reply, and changes nothing else."""
    padded = Message("assistant", " \nqxanswer\n ")
    plain, changed = ([_USER, reply, _USER] for reply in (_ANSWER, padded))
    return _agrees(template, entries, plain) and not _agrees(template, entries, changed)


def _agrees(template: ChatTemplate, entries: Entries, messages: Sequence[Message]) -> bool:
    """Whether a whole dialogue, rendered at once, is the text of its turns put together."""
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    pieces = [template.render(entries.of(messages[: replies[0]], start=True))]
    for reply, following in pairwise([*replies, len(messages)]):
        said = messages[reply]
        words = entries.written("", said.tool_calls) if said.tool_calls else said.content
        words = join_reasoning(said.reasoning, words, template.features.marks)
        pieces += [words, template.after_reply(entries.of(messages[reply + 1 : following]))]
    return "".join(pieces) == template.render(entries.of(messages, start=True))

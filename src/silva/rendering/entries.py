"""Messages as a chat template takes them: roles that it lacks made up for, calls in the form in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from silva.errors import RenderingError
from silva.rendering.call_forms import FORMS
from silva.rendering.codec import TokenCodec
from silva.rendering.template import ChatTemplate, call_entry, tool_entry
from silva.thoughts import join_reasoning, split_reasoning
from silva.types import Message, ToolCall, ToolSpec


class Entries:
    """Writes the entries of a dialogue, their contents escaped.

    Args:
        form: how calls are written, a key of FORMS.
        system: used where the messages hold no system message.
    """

    def __init__(self, template: ChatTemplate, codec: TokenCodec, form: str, system: str | None) -> None:
        self._template, self._codec, self._system = template, codec, system
        self._has, self._calls = template.features, FORMS[form]
        self._native = self._has.form == form

    def with_system(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """Puts in the system message: the configured one, our description of tools, or none."""
        native = self._native and self._has.tools
        described = self._calls.describe(tools) if tools and not native else ""
        given = messages[0].content if messages and messages[0].role == "system" else None
        text = given
        if text is None and all(m.role != "system" for m in messages):
            text = self._system
        if text is None and described:
            text = self._has.default_system
        if text is None:
            return messages
        text = "\n\n".join(part for part in (text, described) if part)
        return [Message("system", text), *messages[given is not None :]]

    def of(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        start: bool = False,
        ids: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """Args:
        start: the dialogue begins here.
        ids: of the calls that results before a first reply answer; empty for those that have none.
        """
        entries: list[dict[str, Any]] = []
        wrapped = False  # the last entry holds tool results as a user message
        waits = False  # a user is not answered: Mistral's templates count no calls and results
        results = 0  # since the last reply
        for position, message in enumerate(messages):
            ids = () if message.role == "assistant" else ids
            own = next(iter(ids[results : results + 1]), "")
            entry = self._entry(message, tools, results, own, first=start and position == 0)
            results = results + 1 if message.role == "tool" else 0
            wraps = message.role == "tool" and entry["role"] == "user"
            user = entry["role"] == "user"
            if user and ((self._has.alternates and waits) or (wraps and wrapped)):
                between = "\n" if wraps and wrapped else "\n\n"
                entries[-1]["content"] += between + entry["content"]
            else:
                entries.append(entry)
            wrapped = wraps
            waits = user or (waits and (entry["role"] == "tool" or "tool_calls" in entry))
        return entries

    def _entry(
        self, message: Message, tools: Sequence[ToolSpec], results: int, id: str, *, first: bool
    ) -> dict[str, Any]:
        escape = self._codec.escape
        if message.role == "assistant":
            return self.reply(message, tools)
        role: str = message.role
        content = escape(message.content)
        if role == "system" and not (self._has.system if first else self._has.later_system):
            role = "user"
        if role == "tool" and not self._has.tool_role:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if role == "tool":
            name = None if message.name is None else escape(message.name)
            return tool_entry(content, name, escape(id) or self._calls.call_id(name or "", results))
        return {"role": role, "content": content}

    def reply(self, message: Message, tools: Sequence[ToolSpec]) -> dict[str, Any]:
        """A reply rendered as text: from its parts; from its raw text if malformed and not edited since."""
        escape, content = self._codec.escape, message.content
        if message.errors and message.raw is not None:
            answer = split_reasoning(message.raw)[1]
            content = answer if self._calls.parse(answer, tools).content == content else content
            calls: Sequence[ToolCall] = ()
        else:
            calls = message.tool_calls
        entry: dict[str, Any] = {"role": "assistant", "content": escape(content)}
        if calls:
            shown = self._shown(content, calls)
            entry = shown[0] if shown else {**entry, "content": self._written(content, calls)}
        if message.reasoning is None:
            return entry
        if self._has.reasoning:
            return {**entry, "reasoning_content": escape(message.reasoning)}
        if escape(self._has.marks.open) != self._has.marks.open:  # control tokens, which stand in no content
            return entry
        content = join_reasoning(escape(message.reasoning), entry["content"] or "", self._has.marks)
        return {**entry, "content": content}

    def takes(self, calls: Sequence[ToolCall]) -> bool:
        """Whether the template writes these calls."""
        return self._native and (len(calls) == 1 or self._has.several_calls)

    def _call_entry(self, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        has, safe = self._has, self._safe(calls)
        ids = [self._calls.call_id(call.name, i) for i, call in enumerate(safe)]
        as_text, as_none = has.arguments_as_text, has.content_as_none
        return call_entry(self._codec.escape(content), safe, ids, as_text=as_text, as_none=as_none)

    def written(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Escaped text of a reply with calls: as the template writes it, if it writes all of it."""
        shown = self._shown(content, calls)
        if shown and shown[2] == self._codec.escape(content).strip():
            return shown[1]
        return self._written(content, calls)

    def _shown(self, content: str, calls: Sequence[ToolCall]) -> tuple[dict[str, Any], str, str] | None:
        """The template's entry, its text and the content in it; None if the calls cannot be read there.

        Some templates write no calls beside a content, or texts without the escapes that they need.
        """
        if not self.takes(calls):
            return None
        entry = self._call_entry(content, calls)
        try:
            text = self._template.said(entry)
        except RenderingError:
            return None
        safe = self._safe(calls)
        found = self._calls.parse(text, [_spec(call) for call in safe])
        read, meant = ([(c.name, dict(c.arguments)) for c in each] for each in (found.calls, safe))
        return None if found.errors or read != meant else (entry, text, found.content.strip())

    def _written(self, content: str, calls: Sequence[ToolCall]) -> str:
        written, content = self._calls.write(self._safe(calls)), self._codec.escape(content)
        return f"{content}{self._calls.between}{written}" if content else written

    def _safe(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        escape = self._codec.escape
        return [ToolCall(escape(call.name), escape(call.arguments)) for call in calls]


def _spec(call: ToolCall) -> ToolSpec:
    """A tool whose texts are texts in forms that leave types to the schema."""
    texts = {key: {"type": "string"} for key, value in call.arguments.items() if isinstance(value, str)}
    return ToolSpec(call.name, "", {"properties": texts})

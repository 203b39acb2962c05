"""What a chat template can do, found out by rendering marked dialogues: no code per model.

`ChatTemplate` renders (through the sandbox of transformers) and knows its `Features`; it does not
decide what to do about them, which is the renderer's part.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from silva.errors import RenderingError
from silva.rendering import openai
from silva.rendering.call_forms import FORMS, CallForm
from silva.rendering.codec import MARK
from silva.thoughts import Marks, marks_of
from silva.types import ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Entry = Mapping[str, Any]  # one message as templates see it

# What templates throw at dialogues they do not like.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_TODAY = datetime.date(2024, 7, 26)  # the date Llama's templates fall back to
_TOOL = "qxtool"
_SPEC = ToolSpec(_TOOL, "d", {"type": "object", "properties": {"qxarg": {"type": "string"}}})
_ROLE = "qxrole"  # no template knows it
_USER: Entry = {"role": "user", "content": "qxuser"}
_REPLY: Entry = {"role": "assistant", "content": MARK}


@dataclass(frozen=True, slots=True)
class Features:
    """What the template does with the parts of a dialogue."""

    system: bool  # shows a system message at the start
    later_system: bool  # shows one in the middle
    default_system: str  # what it says where no system message is given
    ids: bool  # shows which call a result answers
    tool_role: bool  # has a way of its own to show tool results
    alternates: bool  # refuses two user messages in a row
    tools: bool  # describes tools given to it
    form: str  # a key of FORMS: how it writes calls; empty if in no known form
    arguments_as_text: bool  # takes the arguments of a call as JSON text
    several_calls: bool  # takes several calls in a reply
    content_as_none: bool  # takes a reply that only calls as one without content
    reasoning: bool  # takes thoughts in a field of their own
    clock: bool  # prints the date
    marks: Marks  # of thoughts


class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
        opening: text that opens the assistant's turn.

    Raises:
        RenderingError: no chat template, or one that cannot show a reply in the middle of a dialogue.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise RenderingError(
                "the tokenizer has no chat template: use an instruction-tuned model, or set "
                "`chat_template` in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._no_tools: list[dict] | None = None
        if self._try([_USER]) is None:  # some templates go through the tools without asking for them
            self._no_tools = []
        self._last = ""  # what ends a whole dialogue, and no turn
        self.opening = self._probe_opening()
        self.features = self._probe()

    def render(self, messages: Sequence[Entry], tools: Sequence[dict] = (), *, open: bool = True) -> str:
        """Text of a dialogue; with `open` it ends where the assistant is to speak. Contents are escaped.

        The date is pinned: a prompt that changes overnight is no longer the same task.

        Raises:
            RenderingError: the template refuses the dialogue.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or self._no_tools,
                add_generation_prompt=open,
                tokenize=False,
                strftime_now=_TODAY.strftime,
            )
        except _REFUSALS as error:
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise RenderingError(
                f"the chat template refuses a dialogue of roles [{roles}]: {error}"
            ) from error
        if not isinstance(text, str):
            raise RenderingError(f"the chat template gave {type(text).__name__}, expected one text")
        return text if open else text.removesuffix(self._last)

    def after_reply(self, messages: Sequence[Entry]) -> str:
        """Text that follows the assistant's words: the close of its turn, `messages`, the next opening."""
        text = self.render([_USER, _REPLY, *messages])
        if text.count(MARK) != 1:
            raise RenderingError(
                f"the chat template shows an earlier reply {text.count(MARK)} times, expected once: "
                "dialogues of several turns are impossible; use a template that shows all turns"
            )
        return text.partition(MARK)[2]

    def said(self, reply: Entry) -> str:
        """What the template writes as the words of a last reply: without its header and its end."""
        before, _, after = self.render([_USER, _REPLY], open=False).partition(MARK)
        text = self.render([_USER, reply], open=False)
        return text[len(_common_prefix(text, before)) :].removesuffix(after)

    def _probe_opening(self) -> str:
        text, prompt = self.render([_USER], open=False), self.render([_USER])
        if not prompt.startswith(text):  # Phi-3 ends a dialogue that does not go on
            self._last = self._tokenizer.eos_token or ""
            text = text.removesuffix(self._last)
        if not prompt.startswith(text):
            raise RenderingError(
                "the chat template changes earlier text when it opens the assistant's turn "
                "(add_generation_prompt): the opening cannot be derived; use another template"
            )
        return prompt[len(text) :]

    def _probe(self) -> Features:
        system = self._shows([{"role": "system", "content": "qxcontent"}, _USER])
        later = self._shows([_USER, {"role": "assistant", "content": "a"},
                             {"role": "system", "content": "qxcontent"}, _USER])  # fmt: skip
        plain, with_tools = self._try([_USER]), self._try([_USER], [openai.as_function(_SPEC)])
        tools = with_tools is not None and with_tools != plain and _TOOL in with_tools
        form, as_text, as_none = self._form()
        thought = [_USER, {"role": "assistant", "content": "a", "reasoning_content": "qxcontent"}]
        source = json.dumps(self._tokenizer.chat_template)
        return Features(
            system=system,
            later_system=later,
            default_system=self._default_system() if system else "",
            ids=bool(form) and self._shows_ids(FORMS[form]),
            tool_role=self._knows_tool_role(tools, form, as_text, as_none),
            alternates=self._try([_USER, _USER]) is None,
            tools=tools,
            form=form,
            arguments_as_text=as_text,
            several_calls=bool(form) and self._takes_several(form, as_text, as_none),
            content_as_none=as_none,
            reasoning=self._shows(thought, open=False),
            clock="strftime_now" in source,
            marks=marks_of(source),
        )

    def _try(self, messages: Sequence[Entry], tools: Sequence[dict] = (), *, open: bool = True) -> str | None:
        try:
            return self.render(messages, tools, open=open)
        except RenderingError:
            return None

    def _shows(self, messages: Sequence[Entry], *, open: bool = True) -> bool:
        return "qxcontent" in (self._try(messages, open=open) or "")

    def _default_system(self) -> str:
        given, bare = self.render([{"role": "system", "content": MARK}, _USER]), self.render([_USER])
        before, _, after = given.partition(MARK)
        if bare.startswith(before) and bare.endswith(after) and len(bare) > len(before) + len(after):
            return bare[len(before) : len(bare) - len(after)]
        return ""

    def _form(self) -> tuple[str, bool, bool]:
        """How it writes a call, and what it takes for that: arguments as text, None as content."""
        call = ToolCall(_TOOL, {"qxarg": "é\n"})
        ids = dict.fromkeys(form.call_id(_TOOL, 0) for form in FORMS.values())
        for id, as_text, as_none in itertools.product(ids, (False, True), (False, True)):
            try:
                said = self.said(call_entry("", [call], [id], as_text=as_text, as_none=as_none))
            except RenderingError:
                continue
            for name, form in FORMS.items():
                found = form.parse(said, [_SPEC])
                calls = [(c.name, c.arguments) for c in found.calls]
                if calls == [(call.name, call.arguments)] and not found.errors and not found.content.strip():
                    return name, as_text, as_none
        return "", False, False

    def _shows_ids(self, form: CallForm) -> bool:
        first, second = (
            self._try(
                [_USER, {"role": "assistant", "content": "a"}, tool_entry("a", _TOOL, form.call_id(_TOOL, i))]
            )
            for i in (0, 1)
        )
        return first != second

    def _takes_several(self, form: str, as_text: bool, as_none: bool) -> bool:
        reply = _calling(2, form, as_text, as_none)
        return (self._try([_USER, reply], open=False) or "").count(_TOOL) >= 2

    def _knows_tool_role(self, tools: bool, form: str, as_text: bool, as_none: bool) -> bool:
        """Whether `tool` is more to the template than a word it copies, as any other, into a header. A
        template that describes tools (LFM2, Granite) means it.
        """
        reply = _calling(1, form, as_text, as_none) if form else {"role": "assistant", "content": "a"}
        id = FORMS[form or "hermes"].call_id(_TOOL, 0)
        dialogue = [_USER, reply, tool_entry("qxcontent", _TOOL, id)]
        plain = [_USER, {"role": "assistant", "content": "a"}, dialogue[-1]]
        if not (self._shows(dialogue) and self._shows(plain)):
            return False
        if not form and not self.render(plain).endswith(self.opening):
            return False  # it shows results as part of calls that we do not write
        if tools:
            return True
        made_up = self._try([*plain[:-1], {**dialogue[-1], "role": _ROLE}])
        return made_up is None or made_up.replace(_ROLE, "tool") != self._try(plain)


def _calling(count: int, form: str, as_text: bool, as_none: bool) -> Entry:
    calls, ids = [ToolCall(_TOOL, {})] * count, [FORMS[form].call_id(_TOOL, i) for i in range(count)]
    return call_entry("", calls, ids, as_text=as_text, as_none=as_none)


def call_entry(
    content: str, calls: Sequence[ToolCall], ids: Sequence[str], *, as_text: bool, as_none: bool
) -> dict[str, Any]:
    """A reply that calls tools."""
    return {
        "role": "assistant",
        "content": None if as_none and not content else content,
        "tool_calls": [openai.call_entry(*each, as_text=as_text) for each in zip(calls, ids, strict=True)],
    }


def tool_entry(content: str, name: str | None, id: str) -> dict[str, Any]:
    entry = {"role": "tool", "content": content, "tool_call_id": id}
    return entry if name is None else {**entry, "name": name}


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]

"""Messages to tokens and back, so that what was sampled is never tokenised a second time.

    context(m1)           -> [system ... user ... opening]                    shown by the environment
    sampled                                               [reply ... stop]    the policy's own ids
    extend(sampled, m2)   ->                                                [close  m2  opening]

The glue comes from the chat template itself: a new turn is what the template writes after an assistant's
words. `context(..., sampled=...)` puts the same pieces together, so both ways give the same tokens.
Where the template would rewrite earlier turns (Qwen3 drops old thoughts), `history` says who wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Literal

from silva.errors import RenderingError
from silva.rendering.call_forms import FORMS, MARKERS, foreign
from silva.rendering.codec import CACHED_CHARACTERS, TokenCodec
from silva.rendering.entries import Entries
from silva.rendering.growing import GrowingText
from silva.rendering.notes import earlier_turns, limits, ruling, tool_limits, trims
from silva.rendering.openai import as_function
from silva.rendering.template import ChatTemplate
from silva.rendering.tool_calls import parse_hermes
from silva.thoughts import (
    CLOSE,
    OPEN,
    answer_of,
    ends_in_thought,
    hide_tags,
    join_reasoning,
    show_tags,
    split_reasoning,
)
from silva.types import Message, Role, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Renderer:
    """Renders dialogues for one tokenizer; safe to share between episodes.

    Attributes:
        opening: text that opens an assistant's turn.
        vocabulary: how many tokens there are.
        stop_token_ids: the tokens that end a turn before a user message and before a result, then the
            tokenizer's own end of sequence, then `stops`.
        rebuilds_context: earlier turns change, so every turn needs a `context` of its own (`extend`
            would not show what the template wants).
        notes: what was overruled or made up for, for people to read.
        tool_notes: the same where an environment has tools.
        marks: of thoughts, as the chat template writes them.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        history: `keep` leaves earlier turns as sampled, `template` lets the template rewrite them.
        tools: how calls are written: a key of FORMS; `auto` is as the template does it, or `hermes`.
        system: used where the messages hold no system message; None leaves it to the template.
        result: how a result stands in the reply that called, in the place of {}; None gives it a turn of
            its own.
        stops: other tokens that end a reply, as the model's generation_config.json names them.

    Raises:
        RenderingError: the template cannot show a dialogue of several turns, or nothing ends a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: Literal["keep", "template"] = "keep",
        tools: str = "auto",
        system: str | None = None,
        result: str | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        self._template = ChatTemplate(tokenizer)
        self._codec = TokenCodec(tokenizer)
        self.vocabulary = len(tokenizer)
        self._features = self._template.features
        self._form = (self._features.form or "hermes") if tools == "auto" else tools
        self._calls = FORMS[self._form]
        self._entries = Entries(self._template, self._codec, self._form, system)
        self.marks = self._features.marks
        ids, control = self._codec.ids, self._codec.control
        in_marks = {name for name, id in ids.items() if id in control and name in "".join(self.marks)}
        self._markup = (MARKERS | in_marks) & ids.keys()
        self._silent = control - {ids[name] for name in self._markup}
        self._result = result
        self._cached_tail = lru_cache(1024)(self._short_tail)
        self.opening = self._template.opening
        self._bare_opening = control.isdisjoint(self._codec.encode_escaped(self.opening))
        # Some templates end a turn that calls tools with another token (GLM: <|observation|>).
        end, self._end_of_call = self._end_before("user"), self._end_before("tool")
        not_ends = {None, *(ids[name] for name in in_marks)}  # gpt-oss ends a thought as it ends a turn
        ends = dict.fromkeys([end, self._end_of_call, tokenizer.eos_token_id, *stops])
        self.stop_token_ids: tuple[int, ...] = tuple(token for token in ends if token not in not_ends)
        if not self.stop_token_ids:
            raise RenderingError(
                "nothing ends an assistant's turn: the chat template closes it with no special token and "
                "the tokenizer has no eos_token; set one of the two"
            )
        changes = earlier_turns(self._template, self._entries)
        self.rebuilds_context = history == "template" and bool(changes)
        self.notes = (
            *limits(self._features),
            *(ruling(change, rebuilds=self.rebuilds_context) for change in changes),
            *self._tolerated(tokenizer),
        )
        self.tool_notes = tuple(tool_limits(self._features, self._form, result))

    def context(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        sampled: Mapping[str, Sequence[int]] | None = None,
        prefill: str = "",
    ) -> list[int]:
        """Tokens of a whole context, ending where the assistant is to speak.

        Args:
            messages: the dialogue.
            tools: what is on offer, described at the start.
            sampled: by message id, the tokens of assistant turns to keep as they are: everything after
                the opening, a prefill included (`encode(prefill)` + the sampled ids). All other messages
                are rendered again. Ignored where `rebuilds_context`.
            prefill: beginning of the next answer.

        Raises:
            RenderingError: the template refuses the dialogue.
        """
        messages = self._entries.with_system(messages, tools)
        kept = self._kept(messages, {} if self.rebuilds_context or sampled is None else sampled)
        cuts = list(kept)
        first = cuts[0] if cuts else len(messages)
        described = self._features.tools and self._features.form == self._form
        functions = [self._codec.escape(as_function(tool)) for tool in tools] if described else []
        head = self._template.render(self._entries.of(messages[:first], tools, start=True), functions)
        tokens = self._codec.encode_escaped(head, first=True)
        for cut, following in pairwise([*cuts, len(messages)]):
            ids = kept[cut]
            if ids is None:
                ids = self._rendered(messages[cut], tools, tokens, messages[cut + 1 : following])
            tokens += [*ids, *self._tail(ids, messages[cut + 1 : following])]
        return tokens + self.encode(prefill)

    def extend(self, last: Sequence[int], messages: Sequence[Message], *, prefill: str = "") -> list[int]:
        """Tokens to append after a sampled turn: what closes it, `messages`, the next opening, `prefill`.

        Args:
            last: the sampled ids of that turn. Where they do not end with the stop token (cut by
                length, or by a stop string) the missing close is added.
        """
        return [*self._tail(last, messages), *self.encode(prefill)]

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text (a prefill, say); never a control token."""
        return self._codec.encode(text) if text else []

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say, control tokens included."""
        return self._codec.decode(list(tokens))

    def words(self, tokens: Sequence[int]) -> list[int]:
        """The tokens without control tokens that are no part of calls or of the marks of thoughts."""
        return [token for token in tokens if token not in self._silent]

    def growing(self) -> GrowingText:
        """For tokens that come one after the other."""
        return GrowingText(self._codec)

    def bytes_of(self, token: int, before: Sequence[int] = ()) -> bytes:
        """UTF-8 of a token after others, or its part of a character."""
        return self._codec.bytes_of(token, before)

    def encode_marks(self, text: str) -> list[int]:
        """Tokens of `marks`, which may be control tokens."""
        return self._codec.encode_escaped(text)

    def encode_reply(self, text: str) -> list[int]:
        """What a policy would have sampled to say `text`: its tokens and the stop token."""
        return [*self.encode(text), self.stop_token_ids[0]]

    def script(self, text: str, prompt: Sequence[int]) -> list[int]:
        """What a policy would have sampled after `prompt` to say what an environment wrote as a reply
        (thoughts in <think>, calls as JSON in <tool_call>): both as the model writes them, and a thought that
        the prompt opened closed.
        """
        marks, thoughts, tag, answer = self.marks, "", "", text
        if CLOSE in parse_hermes(text).content:
            thoughts, tag, answer = text.rpartition(CLOSE)
        said = parse_hermes(answer)
        thoughts = self._codec.escape(thoughts).replace(OPEN, marks.open)
        head = self._continued(thoughts + marks.close if tag else marks.answer, prompt)
        if self._form == "hermes" or not said.calls:
            written = self._codec.escape(answer)
        else:
            if tag:
                head += answer[: len(answer) - len(answer.lstrip())]
            written = self._entries.written(said.content.strip(), said.calls)
        stop = self._end_of_call if said.calls else None
        stop = stop if stop in self.stop_token_ids else self.stop_token_ids[0]
        return [*self._codec.encode_escaped(head + written), stop]

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a reply to `prompt` begins inside a thought that the template, or a prefill, opened.

        Asked of the text of the reply's own turn: after the last control token, which no content can hold.
        """
        control = self._codec.control
        last = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in control), -1)
        words = self._codec.decode(prompt[last + 1 :])
        marks = [self.opening] if self._bare_opening else []
        marks += [self._result.rpartition("{}")[2]] if self._result else []
        for mark in filter(str.strip, marks):  # what stands before them is not the reply's
            words = words[max(words.rfind(mark), 0) :]
        return ends_in_thought(words)

    def parse(
        self,
        tokens: Sequence[int],
        *,
        prompt: Sequence[int] | None = None,
        prefill: str = "",
        stop: Sequence[str] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Message:
        """The message that sampled tokens say. Never raises on what a model samples.

        Args:
            tokens: sampled ids, without the prefill.
            prompt: what they answer, the prefill included; None: a first user message.
            prefill: given beginning of the answer: part of `content` and `reasoning`, not of `raw`.
            stop: stop strings; the text ends after the first of them.
            tools: on offer (plain tags are calls only where the tool is; they end the text too).

        Returns:
            `raw` is the text as sampled, without the stop token at its end; `content` is free of
            thoughts, calls and control tokens; `errors` tell of malformed calls.
        """
        ids = list(tokens)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        if prompt is None:
            opened = ends_in_thought(self.opening)
        else:
            opened = self.opens_thought(prompt[: len(prompt) - len(self.encode(prefill))])
        inside = ends_in_thought(prefill, opened=opened)
        raw = self._cut(self._codec.decode(ids), stop, tools, inside)
        words = self.words(ids)
        text = raw if len(words) == len(ids) else self._cut(self._codec.decode(words), stop, tools, inside)
        text = prefill + text
        calls = [(b, e) for b, e, found in self._calls.scan(text, tools) if isinstance(found, ToolCall)]
        reasoning, answer = split_reasoning(hide_tags(text, calls), opened=opened)
        answer = show_tags(answer)
        parsed = self._calls.parse(answer, tools)
        errors, content = parsed.errors, parsed.content
        if not (parsed.calls or errors) and (other := foreign(answer, tools, self._form)):
            errors = (other,)
        for marker in self._markup:
            content = content.replace(marker, "")
        thoughts = reasoning and show_tags(reasoning)
        return Message("assistant", content, thoughts, tool_calls=parsed.calls, raw=raw, errors=errors)

    def thinks_on(
        self, prompt: Sequence[int], tokens: Sequence[int], stop: Sequence[str], tools: Sequence[ToolSpec]
    ) -> bool:
        """Whether a reply that stopped at a string stopped at a plain tag inside a thought: no call."""
        text = self._codec.decode(list(tokens))
        if not self.stop_strings(tools) or any(s in text for s in stop):
            return False
        return ends_in_thought(text, opened=self.opens_thought(prompt))

    def call_marks(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Before the first of these, a reply is text, unless it `may_be_call`."""
        tags = tuple(f"<{tool.name}>" for tool in tools) if self._form == "tags" else ()
        return (*tags, *self._calls.marks, *MARKERS)

    def may_be_call(self, text: str) -> bool:
        """Whether a reply that begins like this may turn out to be a call as a whole."""
        begin, whole = text.lstrip()[:1], self._calls.whole
        return bool(whole) and begin in ("", whole)

    def stop_strings(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Strings at which sampling is to stop: the closing tags where calls are plain tags."""
        return tuple(f"</{tool.name}>" for tool in tools) if self._form == "tags" else ()

    def _cut(self, text: str, stop: Sequence[str], tools: Sequence[ToolSpec], inside: bool) -> str:
        """`text` up to the end of the stop string that ends first, as sampling would have met it. The tags of
        calls stop it outside of thoughts."""
        ends = [text.find(s) + len(s) for s in stop if s and s in text]
        for tag in self.stop_strings(tools):
            found = (m.end() for m in re.finditer(re.escape(tag), text))
            ends += [end for end in found if not ends_in_thought(text[:end], opened=inside)][:1]
        return text[: min(ends)] if ends else text

    # --- tokens after a reply

    def _end_before(self, role: Role) -> int | None:
        """The token that ends a reply before such a message."""
        try:
            text = self._template.after_reply(self._entries.of([Message(role, "u", name="u")]))
        except RenderingError:
            if role == "user":
                raise
            return None
        end = self._codec.leading_special(text)
        return end[0] if end else None

    def _kept(
        self, messages: Sequence[Message], sampled: Mapping[str, Sequence[int]]
    ) -> dict[int, Sequence[int] | None]:
        """By position, the tokens of replies that are not left to the template. If results stand inside
        replies, these are all of them; None for those that are to be rendered."""
        kept: dict[int, Sequence[int] | None] = {
            i: sampled[m.id] for i, m in enumerate(messages) if m.role == "assistant" and m.id in sampled
        }
        called = [m.role == "assistant" and after.role == "tool" for m, after in pairwise(messages)]
        if self._result is None or not any(called):
            return kept
        return {i: kept.get(i) for i, m in enumerate(messages) if m.role == "assistant"}

    def _rendered(
        self, message: Message, tools: Sequence[ToolSpec], prompt: Sequence[int], following: Sequence[Message]
    ) -> list[int]:
        """Tokens of a reply in the turn of which results may follow."""
        entry = self._entries.reply(message, tools)
        text = join_reasoning(entry.get("reasoning_content"), entry["content"], self.marks)
        words = self._codec.encode_escaped(self._continued(text, prompt))
        inside = bool(following) and following[0].role == "tool"
        return words if inside else [*words, self.stop_token_ids[0]]

    def _continued(self, text: str, prompt: Sequence[int]) -> str:
        """`text` of a reply to `prompt`: without the mark of a thought that the prompt opened."""
        if not self.opens_thought(prompt):
            return text
        if self.marks.close not in text:
            return f"\n{self.marks.close}\n\n{text}"
        return text.lstrip().removeprefix(self.marks.open).lstrip("\n")

    def _tail(self, last: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        end = last[-1] if len(last) and last[-1] in self.stop_token_ids else None
        if self._result is not None and end is None:
            results = list(takewhile(lambda m: m.role == "tool", messages))
            if results:
                inside = self.encode("".join(self._result.replace("{}", m.content) for m in results))
                others = messages[len(results) :]
                return [*inside, *self._tail((), others)] if others else inside
        ids: tuple[str, ...] = ()  # of the calls, as the model wrote them
        if self._features.ids and messages and messages[0].role == "tool":
            answer = answer_of(self._codec.decode(self.words(last)))
            ids = tuple(call.id for call in self._calls.parse(answer).calls)
        plain = all(m.role != "assistant" for m in messages)
        if plain and sum(len(m.content) for m in messages) <= CACHED_CHARACTERS:
            return self._cached_tail(end, tuple((m.role, m.content, m.name) for m in messages), ids)
        return self._new_tail(end, messages, ids)

    def _short_tail(
        self, end: int | None, messages: tuple[tuple[Role, str, str | None], ...], ids: tuple[str, ...]
    ) -> tuple[int, ...]:
        whole = [Message(role, content, name=name) for role, content, name in messages]
        return tuple(self._new_tail(end, whole, ids))

    def _new_tail(self, end: int | None, messages: Sequence[Message], ids: Sequence[str]) -> list[int]:
        """Args:
        end: the stop token that was sampled. Any other than the template's leaves the turn open.
        ids: of the calls that results answer.
        """
        try:
            text = self._template.after_reply(self._entries.of(messages, ids=ids))
        except RenderingError:  # Mistral's take no ids but those of nine characters
            if not any(ids):
                raise
            text = self._template.after_reply(self._entries.of(messages))
        close = self._codec.leading_special(text) if end is not None else None
        return self._codec.encode_escaped(close[1] if close and close[0] == end else text)

    def _tolerated(self, tokenizer: PreTrainedTokenizerFast) -> list[str]:
        notes = []
        if trims(self._template, self._entries):
            notes.append("The chat template trims replies: sampled ones keep their whitespace.")
        hello = Message("user", "Hello, how are you?")
        text = self._template.render(self._entries.of([hello], start=True))
        whole = list(tokenizer.encode(text, add_special_tokens=False))
        if whole != self._codec.encode_escaped(text, first=True):
            notes.append(
                "The tokenizer splits whole dialogues differently from their parts; the parts count."
            )
        return notes

"""Messages to tokens and back, so that what was sampled is never tokenised a second time.

    context(m1)           -> [system ... user ... opening]                    shown by the environment
    sampled                                               [reply ... stop]    the policy's own ids
    extend(sampled, m2)   ->                                                [close  m2  opening]

The glue comes from the chat template itself: a new turn is what the template writes after an assistant's
words. `context(..., sampled=...)` puts the same pieces together, so both ways give the same tokens.
Where the template would rewrite earlier turns (Qwen3 drops old thoughts), `history` says who wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from silva.errors import RenderingError
from silva.rendering.codec import CACHED_CHARACTERS, Codec
from silva.rendering.reasoning import ends_in_thought, join_reasoning, split_reasoning
from silva.rendering.template import ChatTemplate
from silva.rendering.tool_calls import PARSERS, as_function, describe_tools, parse_hermes, write_calls
from silva.types import Message, Role, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Renderer:
    """Renders dialogues for one tokenizer; safe to share between episodes.

    Attributes:
        opening, closing: text around an assistant's turn.
        vocabulary: how many tokens there are.
        stop_token_ids: the token that ends the turn, then the tokenizer's own end of sequence.
        rebuilds_context: earlier turns change, so every turn needs a `context` of its own (`extend`
            would not show what the template wants).
        notes: what was overruled or made up for, for people to read.
        tool_notes: the same where an environment has tools.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        history: `keep` leaves earlier turns as sampled, `template` lets the template rewrite them.
        tools: how calls are written; `auto` is `hermes`.
        system: used where the messages hold no system message; None leaves it to the template.

    Raises:
        RenderingError: the template cannot show a dialogue of several turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        history: Literal["keep", "template"] = "keep",
        tools: Literal["auto", "hermes", "tags"] = "auto",
        system: str | None = None,
    ) -> None:
        self._template = ChatTemplate(tokenizer)
        self._codec = Codec(tokenizer)
        self.vocabulary = len(tokenizer)
        self._features = self._template.features
        self._form = "tags" if tools == "tags" else "hermes"
        self._native = self._features.hermes and self._form == "hermes"
        self._system = system
        self._cached_tail = lru_cache(1024)(self._short_tail)
        self.opening, self.closing = self._template.opening, self._template.closing
        end = self._codec.leading_special(self._template.after_reply([{"role": "user", "content": "u"}]))
        self._end = end[0] if end else None
        eos: Any = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(t for t in (self._end, eos) if t is not None)
        )
        if not self.stop_token_ids:
            raise RenderingError(
                "nothing ends an assistant's turn: the chat template closes it with no special token and "
                "the tokenizer has no eos_token; set one of the two"
            )
        changes = self._changes()
        self.rebuilds_context = history == "template" and bool(changes)
        self.notes = (
            *self._limits(),
            *(self._ruling(change) for change in changes),
            *self._tolerated(tokenizer),
        )
        self.tool_notes = tuple(self._tool_limits())

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
        kept = {} if self.rebuilds_context or sampled is None else sampled
        messages = self._with_system(messages, tools)
        cuts = [i for i, m in enumerate(messages) if m.role == "assistant" and m.id and m.id in kept]
        first = cuts[0] if cuts else len(messages)
        functions = [self._codec.escape(as_function(tool)) for tool in tools] if self._native else []
        head = self._template.render(self._entries(messages[:first], tools, start=True), functions)
        tokens = self._codec.encode_escaped(head)
        for cut, following in pairwise([*cuts, len(messages)]):
            ids = kept[messages[cut].id]
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

    def encode_reply(self, text: str) -> list[int]:
        """What a policy would have sampled to say `text`: its tokens and the stop token."""
        return [*self.encode(text), self.stop_token_ids[0]]

    def scripted(self, text: str) -> str:
        """A reply written by an environment (its calls are JSON in <tool_call>), converted to the format in
        use."""
        parsed = parse_hermes(text)
        if self._form == "hermes" or not parsed.calls:
            return text
        return "\n".join(part for part in (parsed.content, write_calls(parsed.calls, self._form)) if part)

    def parse(
        self,
        tokens: Sequence[int],
        *,
        prefill: str = "",
        stop: Sequence[str] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Message:
        """The message that sampled tokens say. Never raises on what a model samples.

        Args:
            tokens: sampled ids, without the prefill.
            prefill: given beginning of the answer: part of `content` and `reasoning`, not of `raw`.
            stop: stop strings; the text ends after the first of them.
            tools: on offer (plain tags are calls only where the tool is).

        Returns:
            `raw` is the text as sampled, without the stop token at its end; `content` is free of
            thoughts, calls and control tokens; `errors` tell of malformed calls.
        """
        ids = list(tokens)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        raw = _cut(self._codec.decode(ids), stop)
        words = [t for t in ids if t not in self._codec.control]
        text = prefill + (raw if len(words) == len(ids) else _cut(self._codec.decode(words), stop))
        reasoning, answer = split_reasoning(text, opened=ends_in_thought(self.opening))
        parsed = PARSERS[self._form](answer, tools)
        return Message(
            role="assistant",
            content=parsed.content,
            reasoning=reasoning,
            tool_calls=parsed.calls,
            raw=raw,
            errors=parsed.errors,
        )

    def stop_strings(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Strings at which sampling is to stop: the closing tags where calls are plain tags."""
        return tuple(f"</{tool.name}>" for tool in tools) if self._form == "tags" else ()

    # --- tokens after a reply

    def _tail(self, last: Sequence[int], messages: Sequence[Message]) -> Sequence[int]:
        closed = self._end is not None and len(last) > 0 and last[-1] == self._end
        plain = all(m.role != "assistant" for m in messages)
        if plain and sum(len(m.content) for m in messages) <= CACHED_CHARACTERS:
            return self._cached_tail(closed, tuple((m.role, m.content, m.name) for m in messages))
        return self._new_tail(closed, messages)

    def _short_tail(
        self, closed: bool, messages: tuple[tuple[Role, str, str | None], ...]
    ) -> tuple[int, ...]:
        return tuple(
            self._new_tail(closed, [Message(r, content, name=name) for r, content, name in messages])
        )

    def _new_tail(self, closed: bool, messages: Sequence[Message]) -> list[int]:
        text = self._template.after_reply(self._entries(messages))
        if closed:
            end = self._codec.leading_special(text)
            if end is None or end[0] != self._end:
                roles = ", ".join(m.role for m in messages)
                raise RenderingError(
                    f"the chat template ends the assistant's turn differently before [{roles}]"
                )
            text = end[1]
        return self._codec.encode_escaped(text)

    # --- messages as the template sees them

    def _with_system(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """Puts in the system message: the configured one, our description of tools, or none."""
        described = describe_tools(tools, self._form) if tools and not self._native else ""
        given = messages[0].content if messages and messages[0].role == "system" else None
        text = given
        if text is None and all(m.role != "system" for m in messages):
            text = self._system
        if text is None and described:
            text = self._features.default_system
        if text is None:
            return messages
        text = "\n\n".join(part for part in (text, described) if part)
        return [Message("system", text), *messages[given is not None :]]

    def _entries(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, start: bool = False
    ) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        wrapped = False  # the last entry holds tool results as a user message
        for position, message in enumerate(messages):
            entry = self._entry(message, tools, first=start and position == 0)
            wraps = message.role == "tool" and entry["role"] == "user"
            both_users = bool(entries) and entry["role"] == entries[-1]["role"] == "user"
            if both_users and (self._features.alternates or (wraps and wrapped)):
                between = "\n" if wraps and wrapped else "\n\n"
                entries[-1]["content"] += between + entry["content"]
            else:
                entries.append(entry)
            wrapped = wraps
        return entries

    def _entry(self, message: Message, tools: Sequence[ToolSpec], *, first: bool) -> dict[str, Any]:
        escape = self._codec.escape
        if message.role == "assistant":
            return self._assistant(message, tools)
        role: str = message.role
        content = escape(message.content)
        if role == "system" and not (self._features.system if first else self._features.later_system):
            role = "user"
        if role == "tool" and not self._features.tool_role:
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if role == "tool" and message.name is not None:
            return {"role": role, "content": content, "name": escape(message.name)}
        return {"role": role, "content": content}

    def _assistant(self, message: Message, tools: Sequence[ToolSpec]) -> dict[str, Any]:
        """A reply rendered as text: from its parts; from its raw text if malformed and not edited since."""
        escape, content = self._codec.escape, message.content
        if message.errors and message.raw is not None:
            answer = split_reasoning(message.raw)[1]
            content = answer if PARSERS[self._form](answer, tools).content == content else content
            calls: Sequence = ()
        else:
            calls = message.tool_calls
        entry: dict[str, Any] = {"role": "assistant"}
        if calls and not self._native:
            content = "\n".join(part for part in (content, write_calls(calls, self._form)) if part)
        elif calls:
            functions = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
            entry["tool_calls"] = [
                {"type": "function", "function": escape(function)} for function in functions
            ]
        if self._features.reasoning and message.reasoning is not None:
            entry["reasoning_content"] = escape(message.reasoning)
        else:
            content = join_reasoning(message.reasoning, content)
        return {**entry, "content": escape(content)}

    # --- what the template allows, checked at construction

    def _limits(self) -> list[str]:
        has, notes = self._features, []
        if not has.system:
            notes.append(
                "The chat template shows no system message: it is sent as part of the first user message."
            )
        elif not has.later_system:
            notes.append(
                "The chat template shows system messages only at the start: later ones are sent as user."
            )
        if has.alternates:
            notes.append("The chat template refuses two user messages in a row: they are joined.")
        if has.clock:
            notes.append("The chat template prints the date: pinned, so that a run can be repeated.")
        return notes

    def _tool_limits(self) -> list[str]:
        has, notes = self._features, []
        if not has.tool_role:
            notes.append(
                "The chat template does not know tool results: sent as user, inside <tool_response>."
            )
        if not has.tools:
            notes.append("The chat template does not describe tools: the system message describes them.")
        elif not self._native:
            kind = "calls are plain tags" if self._form == "tags" else "its calls are not JSON in <tool_call>"
            notes.append(
                f"The chat template's own tools are not used ({kind}): the system message describes them."
            )
        return notes

    def _changes(self) -> list[str]:
        """What the template does to earlier turns, found by rendering dialogues whole and piece by piece."""
        user, tool, answer = (
            Message("user", "qxuser"),
            Message("tool", "qxresult"),
            Message("assistant", "qxanswer"),
        )
        thought = Message("assistant", "qxanswer", reasoning="qxthought")
        if ends_in_thought(self.opening):
            return ["opens a thought for the last reply only"]
        if not self._agrees([user, answer, tool, answer, user]):
            return ["writes earlier turns differently from the last one"]
        changes = []
        for follower, where in ((tool, "before a tool result"), (user, "before a user message")):
            if not self._agrees([user, thought, follower]):
                whole = self._template.render(self._entries([user, thought, follower], start=True))
                verb = "rewrites" if "qxthought" in whole else "drops"
                changes.append(f"{verb} the thoughts of earlier turns {where}")
        return changes

    def _ruling(self, change: str) -> str:
        if self.rebuilds_context:
            return f"The chat template {change}: every turn is rendered again (history = 'template')."
        return f"The chat template {change}: overruled, earlier turns stay as sampled (history = 'keep')."

    def _tolerated(self, tokenizer: PreTrainedTokenizerFast) -> list[str]:
        notes = []
        user, plain = Message("user", "Hello, how are you?"), Message("assistant", "qxanswer")
        padded = Message("assistant", " \nqxanswer\n ")
        if self._agrees([user, plain, user]) and not self._agrees([user, padded, user]):
            notes.append("The chat template trims replies: sampled ones keep their whitespace.")
        text = self._template.render(self._entries([user], start=True))
        if list(tokenizer.encode(text, add_special_tokens=False)) != self._codec.encode_escaped(text):
            notes.append(
                "The tokenizer splits whole dialogues differently from their parts; the parts count."
            )
        return notes

    def _agrees(self, messages: Sequence[Message]) -> bool:
        """Whether a whole dialogue, rendered at once, is the text of its turns put together."""
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        pieces = [self._template.render(self._entries(messages[: replies[0]], start=True))]
        for reply, following in pairwise([*replies, len(messages)]):
            words = join_reasoning(messages[reply].reasoning, messages[reply].content)
            tail = self._template.after_reply(self._entries(messages[reply + 1 : following]))
            pieces += [words, tail]
        return "".join(pieces) == self._template.render(self._entries(messages, start=True))


def _cut(text: str, stop: Sequence[str]) -> str:
    """`text` up to the end of the stop string that ends first, as sampling would have met it."""
    ends = [text.find(s) + len(s) for s in stop if s and s in text]
    return text[: min(ends)] if ends else text

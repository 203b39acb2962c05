"""What a model is shown of its dialogue: a pure function of the dialogue, see `ContextSettings`.

    task   reply, observation   reply, observation   ...   reply, newest observation
    stays  └── an earlier turn: left out, hidden, or written as text ──┘   stays

Where this is not what was shown before plus what was said since, the context is rewritten: see state.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from silva.config.sections import ContextSettings, FullContext, HideObservations, LastTurns, SingleTurn
from silva.rendering.tool_calls import write_calls
from silva.thoughts import join_reasoning, split_reasoning, starts_in_thought
from silva.types import Message

FULL = FullContext()
HIDDEN = "..."


def shows_all(settings: ContextSettings) -> bool:
    """Whether the model is shown every message as it is, as long as no turn was dropped."""
    return isinstance(settings, FullContext) and not settings.strip_thoughts


@dataclass(frozen=True, slots=True)
class TurnsSoFar:
    """A dialogue by turns: `replies[i]` answers `observations[i]`; the first observation is the task."""

    observations: tuple[tuple[Message, ...], ...]
    replies: tuple[Message, ...]

    @staticmethod
    def of(messages: Sequence[Message], replies: Collection[str]) -> TurnsSoFar:
        """`replies`: ids of the policy's own: examples in a task, say, are none."""
        observations, said = [list[Message]()], list[Message]()
        for message in messages:
            if message.role == "assistant" and message.id in replies:
                said.append(message)
                observations.append([])
            else:
                observations[-1].append(message)
        return TurnsSoFar(tuple(map(tuple, observations)), tuple(said))

    def shown(self, settings: ContextSettings, dropped: int = 0) -> tuple[Message, ...]:
        """The messages that the model is shown.

        Args:
            dropped: so many of the oldest turns are gone.
        """
        if not self.replies:
            return self.observations[0]
        dialogue = self._hidden(settings) if isinstance(settings, HideObservations) else self
        return dialogue._last(self._count(settings, dropped), settings)

    def drop_oldest(self, settings: ContextSettings, dropped: int) -> int | None:
        """The next `dropped` that shows less; None if the task and the newest observation are all that is
        left."""
        count = self._count(settings, dropped)
        fewer = len(self.replies) - count + 1
        return fewer if count and self._count(settings, fewer) < count else None

    def _count(self, settings: ContextSettings, dropped: int) -> int:
        """How many of the last replies are shown."""
        count = len(self.replies) - dropped
        if isinstance(settings, LastTurns | SingleTurn):
            count = min(count, settings.turns)
        called = any(message.role == "tool" for message in self.observations[-1])
        return min(max(count, int(called)), len(self.replies))  # no result is shown without its call

    def _last(self, count: int, settings: ContextSettings) -> tuple[Message, ...]:
        start, newest = len(self.replies) - count, len(self.replies)
        earlier: list[Message] = []
        for i in range(start, newest):
            if i == start > 0:
                earlier += [message for message in self.observations[i] if message.role != "tool"]
            elif i > start:
                earlier += self.observations[i]
            reply = self.replies[i]
            earlier.append(replace(reply, reasoning=None) if settings.strip_thoughts else reply)
        if isinstance(settings, SingleTurn):
            return _one_message(self.observations[0], earlier, self.observations[-1])
        return (*self.observations[0], *earlier, *self.observations[-1])

    def _hidden(self, settings: HideObservations) -> TurnsSoFar:
        shown = {*range(settings.first), *range(len(self.observations))[-settings.last :]}

        def hidden(i: int, message: Message) -> Message:
            hides = i not in shown and message.role in settings.roles
            return replace(message, content=HIDDEN) if hides else message

        observations = tuple(
            tuple(hidden(i, message) for message in observation)
            for i, observation in enumerate(self.observations)
        )
        return replace(self, observations=observations)


def _one_message(
    task: Sequence[Message], earlier: Sequence[Message], newest: Sequence[Message]
) -> tuple[Message, ...]:
    """The task with its last user message going on to the newest observation."""
    *before, last = task or (Message("user", ""),)
    if last.role != "user":
        before, last = [*before, last], Message("user", "")
    parts = [last.content] if last.content else []
    if earlier:
        parts.append("Earlier turns:")
        parts += [f"You: {_text(m)}" if m.role == "assistant" else m.content for m in earlier]
    parts += ["Now:", *(message.content for message in newest)]
    return (*before, replace(last, content="\n\n".join(parts)))


def _text(reply: Message) -> str:
    """A reply as text: with its calls as they were written, and its thoughts unless they were stripped."""
    text = reply.content
    if (reply.tool_calls or reply.errors) and reply.raw is not None:
        text = split_reasoning(reply.raw, opened=starts_in_thought(reply.raw))[1]
    elif reply.tool_calls:
        text = "\n".join(part for part in (text, write_calls(reply.tool_calls)) if part)
    return join_reasoning(reply.reasoning, text)

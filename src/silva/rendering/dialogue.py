"""A whole dialogue as it was recorded, and a recorded reply as one text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from silva.rendering.tool_calls import write_calls
from silva.thoughts import join_reasoning
from silva.types import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was said, the replies included, and the tools that were on offer. `where` names the row, such as
    "train.jsonl:12"; `weight` is that of its loss in training."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    where: str = ""
    weight: float = 1.0

    @property
    def content(self) -> str:
        """Equal for dialogues that say the same. Ids of calls do not count: servers draw them at random."""
        said = [
            replace(each, tool_calls=tuple(replace(call, id="") for call in each.tool_calls))
            for each in self.messages
        ]
        return repr((said, self.tools))


def reply_text(message: Message) -> str:
    """A reply as one text, as environments write it: thoughts in <think>, calls as JSON in <tool_call>."""
    calls = write_calls(message.tool_calls)
    return join_reasoning(message.reasoning, "\n".join(part for part in (message.content, calls) if part))

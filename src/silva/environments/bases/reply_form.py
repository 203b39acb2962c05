"""The form of a reply: thoughts, then the answer in tags. It is asked for, written and read here.

ReplyForm().say("go north")              <think>Next: go north.</think><answer>go north</answer>
ReplyForm(think=False).ask("look")       Reply in this form: <answer>look</answer>
"""

from __future__ import annotations

import re
from typing import NamedTuple

from silva.thoughts import CLOSE, OPEN, answer_of
from silva.types import Message


class ReplyForm(NamedTuple):
    """`begun`: the first tag is given to the policy, as a prefill. `strict`: nothing else is read."""

    think: bool = True
    tags: bool = True
    begun: bool = False
    strict: bool = False

    @property
    def prefill(self) -> str:
        """With which a reply is begun for the policy; "" if it begins itself."""
        tag = OPEN if self.think else "<answer>" if self.tags else ""
        return tag if self.begun else ""

    def ask(self, example: str, what: str = "Reply") -> str:
        """The sentence that asks for this form."""
        thought = f"{OPEN}your thoughts{CLOSE}" if self.think else ""
        return f"{what} in this form: {thought}{self._tagged(example)}"

    def say(self, answer: str, name: str = "") -> str:
        """A reply in this form, as sampled (after the prefill, if there is one).

        Args:
            name: what the thoughts call the answer; the answer itself if empty.
        """
        thought = f"{OPEN}Next: {name or answer}.{CLOSE}" if self.think else ""
        return f"{thought}{self._tagged(answer)}".removeprefix(self.prefill)

    def read(self, message: Message) -> str | None:
        """The text of the answer in a reply; None if there is none.

        Lenient: the first <answer> after the thoughts, closed or not (a stop string may have cut the end),
        else the whole reply. Strict: nothing but the format. Thoughts may still stand in the content or
        have been parsed apart into `message.reasoning`.
        """
        text = message.content
        if not text.lstrip().startswith(self.prefill) and message.reasoning is None:
            text = self.prefill + text
        if self.strict:
            found = _STRICT[self.think and message.reasoning is None, self.tags].fullmatch(text)
            return found[1] if found else None
        body = answer_of(text)
        _, tag, answer = body.partition("<answer>")
        return (answer if tag else body).partition("</answer>")[0]

    def _tagged(self, answer: str) -> str:
        return f"<answer>{answer}</answer>" if self.tags else answer


_STRICT = {
    (think, tags): re.compile(
        (rf"\s*{OPEN}.*?{CLOSE}\s*" if think else r"\s*")
        + (r"<answer>((?:(?!<answer>).)*?)</answer>\s*" if tags else r"((?:(?!<).)*)"),
        re.DOTALL,
    )
    for think in (True, False)
    for tags in (True, False)
}

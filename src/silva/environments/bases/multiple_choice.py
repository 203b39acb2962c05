"""Questions with choices (or with a text as answer) about documents that are read with tools.

A reply ends the episode with `Final Answer: B` (where else an answer may stand: silva/rewards/answers.py). It
names one choice by its letter, its text, or both. Anything else, such as "A B C D" or "A or B", names none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.protocols import Toolset
from silva.rewards.answers import find_answer
from silva.rewards.text import normalise, same_answer
from silva.thoughts import answer_of
from silva.types import Message, Step, Task, ToolCall

LETTERS = "ABCDEFGHIJ"
FINAL = "Final Answer:"
_ALONE = re.compile(r"\W*([A-Z])\W*", re.ASCII | re.IGNORECASE)
_BOTH = re.compile(r"[\s(\[*]*([A-J])[)\].:*]+\s*(\S.*)", re.IGNORECASE | re.DOTALL)


class MultipleChoice(ToolDialogue):
    """`task.data` holds `question` and `choices` (texts), `task.answer` the letter of the right one.

    If there are no choices, the answer is a text. A subclass says with which tools the documents are
    read, what is said of them, and what an expert calls.
    """

    settings: ToolDialogueSettings
    instructions = ""  # if the settings have none

    def __init__(self, settings: Any, task: Task, toolsets: Sequence[Toolset]) -> None:
        super().__init__(settings, task, toolsets)
        self.choices: list[str] = task.data["choices"]

    def about(self) -> str:
        """What stands between the instructions and the question."""
        return ""

    def expert_calls(self) -> Sequence[ToolCall]:
        """One a turn, before the answer."""
        return ()

    def opening(self) -> Sequence[Message]:
        kind = "letter of the right choice" if self.choices else "answer, as short as it can be"
        listed = [f"{letter}. {text}" for letter, text in zip(LETTERS, self.choices, strict=False)]
        example = f"{FINAL} B" if self.choices else f"{FINAL} Paris"
        parts = [
            self.settings.instructions or self.instructions,
            self.about(),
            f"Question: {self.task.data['question']}",
            "\n".join(listed),
            f"End with the {kind}, in this form: {example}",
        ]
        return [self.say("\n".join(part for part in parts if part))]

    async def answered(self, message: Message) -> Step:
        given = find_answer(answer_of(message.content)) or ""
        if self.choices:
            named = named_choice(given, self.choices)
            return self._final(solved=named == self.task.answer, valid=named is not None)
        return self._final(solved=same_answer(given, self.task.answer), valid=bool(given))

    async def out_of_calls(self, message: Message) -> Step:
        return self._final(solved=False, valid=False, truncated=True)

    def expert_reply(self) -> str:
        return self.next_of(self.expert_calls(), f"{FINAL} {self.task.answer}")

    def random_reply(self, seed: int) -> str:
        """Any choice; without choices, letters of about the right length."""
        rng = random.Random(f"{seed}/{self.calls.left}")
        if self.choices:
            return f"{FINAL} {rng.choice(LETTERS[: len(self.choices)])}"
        return f"{FINAL} {''.join(rng.choice('abcdefghij') for _ in self.task.answer)}"

    def _final(self, *, solved: bool, valid: bool, truncated: bool = False) -> Step:
        self._end()
        used = self.settings.max_tool_calls - self.calls.left
        return Step(
            rewards={"correct": float(solved)},
            terminated=not truncated,
            truncated=truncated,
            metrics={"success": float(solved), "action_is_valid": float(valid), "calls": float(used)},
        )


def named_choice(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the choice that an answer names by letter, text or both; None if it says other things."""
    letters = LETTERS[: len(choices)]
    texts = dict(zip(letters, map(normalise, choices), strict=True))
    if alone := _ALONE.fullmatch(answer):
        return alone[1].upper() if alone[1].upper() in texts else None
    if (both := _BOTH.fullmatch(answer)) and (letter := both[1].upper()) in texts:
        return letter if texts[letter] == normalise(both[2]) else None
    same = [letter for letter, text in texts.items() if text == normalise(answer)]
    return same[0] if len(same) == 1 else None

"""Write a short text backwards. Reward 1 for the exact text; `partial` credit stays at or below 0.5.

The words are made of syllables, so that there is no end of them. Texts that read the same both ways are
left out: copying them would pay.
"""

from __future__ import annotations

import random
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.rewards.text import extract_answer, similarity
from silva.types import Task

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


class ReverseText(EnvironmentSettings):
    bounds: ClassVar = ("letters",)
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["reverse_text"] = "reverse_text"
    style: Literal["full", "compact"] = "full"
    """`full` asks in words; `compact` shows the text alone (small models trained from scratch)."""
    min_letters: Annotated[int, Field(ge=2)] = 3
    """Shortest word."""
    max_letters: Positive = 5
    """Longest word."""
    words: Positive = 1
    """Words of a text."""
    partial: bool = False
    """Credit for what is nearly right: half the similarity to the right text."""

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: ReverseEpisode(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        text = ""
        while text == text[::-1]:
            lengths = [rng.randint(self.min_letters, self.max_letters) for _ in range(self.words)]
            text = " ".join(_word(rng, length) for length in lengths)
        return Draft({"text": text}, text[::-1])


class ReverseEpisode(Attempts):
    settings: ReverseText

    def __init__(self, settings: ReverseText, task: Task) -> None:
        super().__init__(settings, task)
        self.partial_weight = 0.5 if settings.partial else 0.0

    def prompt(self) -> str:
        text = self.task.data["text"]
        if self.settings.style == "compact":
            return text
        return f"Write this text backwards, letter by letter. Reply with the result only.\n{text}"

    def judge(self, reply: str) -> Verdict:
        answer = extract_answer(reply).strip("\"'`.")
        if answer == self.task.answer:
            return Verdict(solved=True)
        near = similarity(answer[: 2 * len(self.task.answer)], self.task.answer)
        return Verdict(solved=False, partial=near, valid=bool(answer))

    def expert_reply(self) -> str:
        return self.task.answer

    def random_reply(self, seed: int) -> str:
        letters = list(self.task.answer)
        random.Random(seed).shuffle(letters)
        return "".join(letters)


def _word(rng: random.Random, length: int) -> str:
    start = rng.randrange(2)
    return "".join(rng.choice(_VOWELS if (start + i) % 2 else _CONSONANTS) for i in range(length))

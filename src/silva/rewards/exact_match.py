"""1 for an answer that is the same as a reference, else 0."""

from __future__ import annotations

from typing import Literal

from silva.protocols import Attempt, Reward, Score
from silva.rewards import gaia, squad, text
from silva.rewards.answers import Extract, GradesByAnswer, find_answer, references
from silva.rewards.settings import RewardSettings


class ExactMatch(RewardSettings):
    """1 for an answer that is the same as a reference, else 0."""

    type: Literal["exact_match"] = "exact_match"
    extract: Extract = "auto"
    """Where the final answer stands: a tag, a box, the last line, the whole reply."""
    rules: Literal["plain", "squad", "gaia"] = "plain"
    """What does not matter. `plain`: case, spaces, quotes around it, a full stop at its end; numbers are
    compared as numbers. `squad`: case, spaces, all punctuation, the words a, an, the. `gaia`: case, spaces,
    punctuation, signs of currency and percent; lists are compared item by item."""

    def build(self) -> Reward:
        return ExactMatchReward(self)


RULES = {"plain": text.exact_match, "squad": squad.same, "gaia": gaia.same}


class ExactMatchReward(GradesByAnswer):
    def __init__(self, settings: ExactMatch) -> None:
        self.settings = settings
        self._same = RULES[settings.rules]

    async def score(self, attempt: Attempt) -> Score:
        expected, answer = references(attempt.answer), find_answer(attempt.reply, self.settings.extract)
        solved = answer is not None and any(self._same(answer, each) for each in expected)
        return Score(float(solved), solved, {"answered": float(answer is not None)})

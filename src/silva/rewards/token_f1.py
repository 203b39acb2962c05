"""Overlap of words between the answer and the nearest reference, as SQuAD measures it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from silva.config.sections import Fraction
from silva.protocols import Attempt, Reward, Score
from silva.rewards import squad
from silva.rewards.answers import Extract, GradesByAnswer, find_answer, references
from silva.rewards.settings import RewardSettings


class TokenF1(RewardSettings):
    """Overlap of words between the answer and the nearest reference, as SQuAD measures it."""

    type: Literal["token_f1"] = "token_f1"
    extract: Extract = "auto"
    """Where the final answer stands: a tag, a box, the last line, the whole reply."""
    solved_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """F1 from which an attempt is solved."""
    least: Fraction = 0.0
    """F1 below which the reward is 0: no credit for a common word or two."""

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def build(self) -> Reward:
        return TokenF1Reward(self)


class TokenF1Reward(GradesByAnswer):
    def __init__(self, settings: TokenF1) -> None:
        self.settings = settings

    async def score(self, attempt: Attempt) -> Score:
        expected, answer = references(attempt.answer), find_answer(attempt.reply, self.settings.extract)
        f1 = 0.0 if answer is None else max(squad.f1(answer, each) for each in expected)
        exact = answer is not None and any(squad.same(answer, each) for each in expected)
        solved = f1 >= self.settings.solved_at
        metrics = {"f1": f1, "exact_match": float(exact), "answered": float(answer is not None)}
        return Score(f1 if solved or f1 >= self.settings.least else 0.0, solved, metrics)

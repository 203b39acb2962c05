"""Arithmetic questions with a calculator to call, or without one (`tool = false`).

    What is 12 + 7 - 3?                     the last number of the reply is the answer
    Multiply your result by 4.              with `chain` = 2: asked after a right answer to the first

Reward 1 if all questions are answered rightly, else 0. Held-out questions do not occur in training, not
even with their numbers in another order. This applies to each question of a chain: 19 * 4 in the second line
is a question as 19 * 4 in the first would be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.tool_qa import Question, ToolEpisode, ToolQA, draft
from silva.environments.tasks import Draft, Tasks, generated, held_out
from silva.tools.calculator import calculator, evaluate, show
from silva.types import Task, ToolCall

_CHAINED = {
    "+": "Add {} to your result.",
    "-": "Subtract {} from your result.",
    "*": "Multiply your result by {}.",
}
TRIES = 100  # for a follow-up question that belongs to the split of the first


class Calculator(ToolQA):
    type: Literal["calculator"] = "calculator"
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of all questions that is held out; high, because there are few one-digit sums."""
    style: Literal["full", "compact"] = "full"
    """`full` asks in words; `compact` shows the bare expression (small models trained from scratch)."""
    tool: bool = True
    """Offer the calculator; false: answers are worked out in the reply."""
    tool_required: bool = True
    """An answer without a tool call since the question was asked is sent back (only with `tool`)."""
    terms: Annotated[int, Field(ge=2, le=8)] = 2
    """Numbers in the first question."""
    digits: Annotated[int, Field(ge=1, le=9)] = 2
    """Digits of the largest number (numbers start at 1)."""
    operators: Annotated[str, Field(pattern=r"^[-+*]+$")] = "+-"
    """Drawn from: any of + - *, as in "+-"."""
    chain: Positive = 1
    """Questions of an episode; each further one continues with the result."""

    def taskset(self) -> Tasks:
        return generated(self, self._draw, self.builder())

    def tools(self) -> list[Callable[..., Any]]:
        return [calculator] if self.tool else []

    def builder(self) -> Callable[[Task], ToolEpisode]:
        settings = self.model_copy(
            update={
                "tool_required": self.tool and self.tool_required,
                "instructions": self.instructions or self._instructions(),
            }
        )
        return super(Calculator, settings).builder()

    def _instructions(self) -> str:
        if self.style == "compact" or not self.tool:
            return ""
        if self.tool_required:
            return "Use the calculator before you answer, then reply with the number only."
        return "You may use the calculator. Reply with the number only."

    def _draw(self, rng: random.Random) -> Draft:
        numbers = [self._number(rng) for _ in range(self.terms)]
        operators = [rng.choice(self.operators) for _ in numbers[1:]]
        pairs = zip(operators, numbers[1:], strict=True)
        first = str(numbers[0]) + "".join(f" {operator} {number}" for operator, number in pairs)
        text = first.replace(" ", "") if self.style == "compact" else f"What is {first}?"
        questions, keys = [_question(text, first)], [_key(operators, numbers)]
        for _ in range(self.chain - 1):
            result = int(questions[-1].answer)
            operator, number = self._follow_up(rng, result, held_out(keys[0], self.eval_share))
            text = f"{operator}{number}" if self.style == "compact" else _CHAINED[operator].format(number)
            questions.append(_question(text, f"{result} {operator} {number}"))
            keys.append(_key([operator], [result, number]))
        return draft(questions, keys)

    def _number(self, rng: random.Random) -> int:
        return rng.randint(1, 10**self.digits - 1)

    def _follow_up(self, rng: random.Random, result: int, wanted: bool) -> tuple[str, int]:
        """An operator and a number to apply to the result: held out if `wanted`; after TRIES tries, any."""
        for _ in range(TRIES):
            operator, number = rng.choice(self.operators), self._number(rng)
            if held_out(_key([operator], [result, number]), self.eval_share) == wanted:
                break
        return operator, number


def _question(text: str, expression: str) -> Question:
    call = ToolCall("calculator", {"expression": expression})
    return Question(text, show(evaluate(expression)), [call])


def _key(operators: list[str], numbers: list[int]) -> list[Any]:
    return [sorted(operators), sorted(numbers)]

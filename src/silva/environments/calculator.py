"""Arithmetic questions with a calculator to call, or without one (`tool = false`).

    What is 12 + 7 - 3?                     the last number of the reply is the answer
    Multiply your result by 4.              with `chain` = 2: asked after a right answer to the first

Reward 1 if all questions are answered rightly, else 0. Held-out questions do not occur in training, not
even with their numbers in another order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.grading import same_number
from silva.environments.tasks import Draft, generated
from silva.environments.tool_qa import Question, ToolEpisode, ToolQA, draft
from silva.tools.calculator import calculator, evaluate, show
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

_CHAINED = {
    "+": "Add {} to your result.",
    "-": "Subtract {} from your result.",
    "*": "Multiply your result by {}.",
}


class Calculator(ToolQA):
    type: Literal["calculator"] = "calculator"
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

    def taskset(self) -> TaskSet:
        # Half of the contents: one-digit sums are few, and 100 of them should be there for evaluation.
        return generated(self, self._draw, self.builder(), eval_share=0.5)

    def tools(self) -> list[Callable[..., Any]]:
        return [calculator] if self.tool else []

    def grade(self, reply: str, answer: str) -> bool:
        return same_number(reply, answer)

    def builder(self) -> Callable[[Task], ToolEpisode]:
        tools = self.wrapped_tools()
        settings = self.model_copy(
            update={
                "tool_required": self.tool and self.tool_required,
                "instructions": self.instructions or self._instructions(),
            }
        )
        return lambda task: CalculatorEpisode(settings, task, tools)

    def _instructions(self) -> str:
        if self.style == "compact" or not self.tool:
            return ""
        if self.tool_required:
            return "Use the calculator before you answer, then reply with the number only."
        return "You may use the calculator. Reply with the number only."

    def _draw(self, rng: random.Random) -> Draft:
        numbers = [rng.randint(1, 10**self.digits - 1) for _ in range(self.terms + self.chain - 1)]
        operators = [rng.choice(self.operators) for _ in numbers[1:]]
        first = str(numbers[0])
        for operator, number in zip(operators[: self.terms - 1], numbers[1:], strict=False):
            first += f" {operator} {number}"
        expressions, texts = [first], [self._ask(first)]
        result = evaluate(first)
        answers = [show(result)]
        for operator, number in zip(operators[self.terms - 1 :], numbers[self.terms :], strict=True):
            expressions.append(f"{answers[-1]} {operator} {number}")
            compact = self.style == "compact"
            texts.append(f"{operator}{number}" if compact else _CHAINED[operator].format(number))
            answers.append(show(evaluate(expressions[-1])))
        entry = draft([Question(*pair) for pair in zip(texts, answers, strict=True)])
        data = {**entry.data, "expressions": expressions}
        return Draft(data, entry.answer, key=[sorted(operators), sorted(numbers)])

    def _ask(self, expression: str) -> str:
        return expression.replace(" ", "") if self.style == "compact" else f"What is {expression}?"


class CalculatorEpisode(ToolEpisode):
    """Can play itself; tool calls are written as JSON in <tool_call> (Hermes)."""

    def expert_reply(self) -> str:
        if not self.tools or self.called:
            return self.task.answer[self.question]
        call = {
            "name": "calculator",
            "arguments": {"expression": self.task.data["expressions"][self.question]},
        }
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def random_reply(self, seed: int) -> str:
        """A number of about the right length."""
        length = len(self.task.answer[self.question].lstrip("-"))
        return str(random.Random(f"{seed}/{self.question}").randrange(10**length))

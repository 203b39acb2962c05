"""Make a number from a few others: 3, 5 and 7 give 16 as 3 * 7 - 5.

Reward 1 if the expression has exactly the target as its value and uses each number once (`use = "some"`: at
most once). An expression of the right numbers with another value earns `partial`, at the last attempt only.
Targets are values of random expressions, so every problem has a solution.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.errors import ConfigError
from silva.rewards.text import extract_answer
from silva.tools.calculator import evaluate, show
from silva.tools.function import ToolError
from silva.types import Task

TRIES = 10_000  # to draw numbers and a target that fits the settings
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_POWER = re.compile(r"\*\*|//")


class Countdown(EnvironmentSettings):
    bounds: ClassVar = ("numbers",)
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["countdown"] = "countdown"
    style: Literal["full", "compact"] = "full"
    """`full` asks in words; `compact` shows numbers and target alone (small models trained from scratch)."""
    min_numbers: Annotated[int, Field(ge=2, le=5)] = 3
    """Fewest numbers of a problem."""
    max_numbers: Annotated[int, Field(ge=2, le=5)] = 4
    """Most numbers of a problem."""
    largest: Annotated[int, Field(ge=2, le=1000)] = 100
    """Largest of the numbers (they start at 1)."""
    max_target: Positive = 100
    """Largest target (targets start at 1)."""
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/"
    """Allowed in an expression, and drawn from: any of + - * /."""
    use: Literal["all", "some"] = "all"
    """`all` numbers exactly once, or `some` of them, at most once each."""
    attempts: Positive = 1
    """Turns of one episode; a wrong expression is answered with its value."""
    partial: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Reward of the right numbers with a wrong value."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a turn without an expression that can be read."""

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: CountdownEpisode(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        for _ in range(TRIES):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.largest) for _ in range(count)]
            value = _value(_random_expression(numbers, self.operators, rng))
            given = self.use == "some" and value in numbers  # a number alone would be a solution
            if value is not None and value.denominator == 1 and 1 <= value <= self.max_target and not given:
                target = int(value)
                return Draft({"numbers": numbers, "target": target}, keys=[[sorted(numbers), target]])
        raise ConfigError(
            f"environment {self.label}: {TRIES} draws gave no problem: no value of numbers up to "
            f"{self.largest} with {self.operators} is an integer from 1 to max_target = {self.max_target}"
        )


class CountdownEpisode(Attempts):
    settings: Countdown

    def __init__(self, settings: Countdown, task: Task) -> None:
        super().__init__(settings, task)
        self.attempts = settings.attempts
        self.partial_weight = settings.partial
        self.format_penalty = settings.format_penalty
        self.numbers: list[int] = task.data["numbers"]
        self.target: int = task.data["target"]

    def prompt(self) -> str:
        if self.settings.style == "compact":
            return f"{' '.join(map(str, self.numbers))}={self.target}"
        numbers, signs = ", ".join(map(str, self.numbers)), " ".join(self._signs())
        return (
            f"Write an expression with the value {self.target}. Use {self._rule()}: {numbers}. Allowed are "
            f"{signs} and parentheses. Reply with the expression only, in this form: "
            "<answer>(1 + 2) * 3</answer>"
        )

    def judge(self, reply: str) -> Verdict:
        text = extract_answer(reply).partition("=")[0].translate(_SIGNS).strip().removesuffix(".")
        problem = self._unreadable(text)
        value = None if problem else _value(text)
        if value is None:
            return Verdict(False, self._say(problem or "This is no expression with a value."), valid=False)
        if not self._right_numbers(text):
            return Verdict(False, self._say(f"Use {self._rule()}."))
        if value == self.target:
            return Verdict(True)
        return Verdict(False, self._say(f"The value is {show(value)}, not {self.target}.", show(value)), 1.0)

    def expert_reply(self) -> str:
        solution = solve(self.numbers, self.target, self.settings.operators, some=self.settings.use == "some")
        assert solution is not None, f"task {self.task.id} has no solution"
        return self._reply(solution)

    def random_reply(self, seed: int) -> str:
        """All numbers, in any order, with any operators."""
        rng = random.Random(f"{seed}/{self.attempt}")
        return self._reply(_random_expression(self.numbers, self.settings.operators, rng))

    def _reply(self, expression: str) -> str:
        if self.settings.style == "compact":
            return expression.replace(" ", "")
        return f"<answer>{expression}</answer>"

    def _unreadable(self, text: str) -> str:
        if not _EXPRESSION.fullmatch(text) or _POWER.search(text):
            return f"Write numbers, {' '.join(self._signs())} and parentheses only."
        wrong = sorted({sign for sign in text if sign in "+-*/"} - set(self.settings.operators))
        return f"{wrong[0]} is not allowed." if wrong else ""

    def _right_numbers(self, text: str) -> bool:
        used, given = Counter(map(int, re.findall("[0-9]+", text))), Counter(self.numbers)
        return used == given if self.settings.use == "all" else used <= given

    def _signs(self) -> list[str]:
        return [sign for sign in "+-*/" if sign in self.settings.operators]

    def _rule(self) -> str:
        return "each number exactly once" if self.settings.use == "all" else "each number at most once"

    def _say(self, full: str, compact: str = "?") -> str:
        return compact if self.settings.style == "compact" else f"{full} Try again."


def solve(numbers: Sequence[int], target: int, operators: str = "+-*/", *, some: bool = False) -> str | None:
    """An expression with this value that uses each number once (`some`: at most once); None if there is none.

    Exhaustive: all ways to join two parts are tried, with exact fractions in between.
    """
    known: dict[tuple[int, ...], dict[Fraction, str]] = {}
    for size in range(1 if some else len(numbers), len(numbers) + 1):
        for chosen in sorted(set(itertools.combinations(sorted(numbers), size))):
            if found := _reachable(chosen, operators, known).get(Fraction(target)):
                return _bare(found)
    return None


def _reachable(
    numbers: tuple[int, ...], operators: str, known: dict[tuple[int, ...], dict[Fraction, str]]
) -> dict[Fraction, str]:
    """All values of expressions of all these numbers, each with one expression; kept in `known`."""
    if numbers not in known:
        values = {Fraction(numbers[0]): str(numbers[0])} if len(numbers) == 1 else {}
        for left, right in _divisions(numbers):
            parts = (_reachable(part, operators, known).items() for part in (left, right))
            for (a, first), (b, second) in itertools.product(*parts):
                for value, text in _joined(a, first, b, second, operators):
                    values.setdefault(value, text)
        known[numbers] = values
    return known[numbers]


def _divisions(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to divide them in two parts; which part comes first does not matter."""
    first, rest = numbers[0], numbers[1:]
    for size in range(len(rest)):
        for chosen in itertools.combinations(range(len(rest)), size):
            yield (
                (first, *(rest[i] for i in chosen)),
                tuple(number for i, number in enumerate(rest) if i not in chosen),
            )


def _joined(
    a: Fraction, first: str, b: Fraction, second: str, operators: str
) -> Iterator[tuple[Fraction, str]]:
    if "+" in operators:
        yield a + b, f"({first} + {second})"
    if "-" in operators:
        yield a - b, f"({first} - {second})"
        yield b - a, f"({second} - {first})"
    if "*" in operators:
        yield a * b, f"({first} * {second})"
    if "/" in operators and b:
        yield a / b, f"({first} / {second})"
    if "/" in operators and a:
        yield b / a, f"({second} / {first})"


def _random_expression(numbers: Sequence[int], operators: str, rng: random.Random) -> str:
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        first, second = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(f"({first} {rng.choice(operators)} {second})")
    return _bare(parts[0])


def _bare(expression: str) -> str:
    return expression[1:-1] if expression.startswith("(") else expression


def _value(expression: str) -> Fraction | None:
    try:
        return evaluate(expression)
    except ToolError:
        return None

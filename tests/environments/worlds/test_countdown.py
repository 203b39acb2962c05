"""Expressions are read exactly, every problem has a solution, and no other way earns the reward."""

from __future__ import annotations

import itertools
import operator
from fractions import Fraction

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.countdown import Countdown, solve
from silva.errors import ConfigError
from silva.types import Task

TASK = Task("c", "countdown", 0, {"numbers": [3, 5, 7], "target": 16})
TWELVE = Task("c", "countdown", 0, {"numbers": [3, 5, 7], "target": 12})


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("3*7-5", 1),
        ("<think>3*5=15</think><answer>3 * 7 - 5</answer>", 1),
        ("<answer>(7*3)-5 = 16</answer>", 1),
        ("7 × 3 − 5", 1),
        ("-5 + 3 * 7", 1),
        ("(3 * 7) - (5)", 1),
        ("3 * 7 - 5.", 1),
        ("<answer>3 * 7 - 5.</answer>", 1),
        ("3 + 5 + 7", 0.1),  # the right numbers, another value
        ("16", 0),
        ("9 + 7", 0),
        ("3 * 7 - 5 + 5 - 5", 0),  # a number more than once
        ("3 * 7 - 5 * 1", 0),
        ("35 - 7 * 3", 0),  # digits put together
        ("3 5 + 7", 0),
        ("3 * 7 - 5 # 3", 0),
        ("3 ** 7 - 5", 0),
        ("7 // 3 + 5", 0),
        ("3 / (5 - 5) + 7", 0),
        ("7_5 - 3", 0),
        ("3 * 7 - 5.0", 0),
        ("= 16", 0),
        ("5 - 3 = 16, 7", 0),
        ("3+5+7, 3*7-5", 0),  # a list of guesses is no expression
        ("__import__('os')", 0),
        ("(" * 5000 + "3" + ")" * 5000, 0),
        ("", 0),
    ],
)
def test_only_a_solution_earns_one(reply: str, reward: float, replies_to) -> None:
    (step,) = replies_to(Countdown(), TASK, [reply])
    assert step.terminated and step.metrics["success"] == float(reward == 1)
    assert step.rewards == {"correct": reward}
    assert replies_to(Countdown(partial=0.0), TASK, [reply])[0].rewards == {"correct": float(reward == 1)}


@pytest.mark.parametrize(
    ("task", "keys", "reply", "reward"),
    [
        (TWELVE, {"use": "some"}, "5 + 7", 1),
        (TWELVE, {}, "5 + 7", 0),
        (TWELVE, {"use": "some"}, "7 + 5 + 3 - 3", 0),
        (TASK, {"operators": "+-"}, "3 * 7 - 5", 0),
        (TASK, {"operators": "+-"}, "5 + 7 - 3", 0.1),
    ],
)
def test_what_is_allowed(task: Task, keys: dict, reply: str, reward: float, replies_to) -> None:
    assert replies_to(Countdown(**keys), task, [reply])[0].rewards == {"correct": reward}


def test_several_attempts_word_by_word(replies_to) -> None:
    steps = replies_to(Countdown(attempts=4), TASK, ["help", "3+5+7", "3 + 5", "3*7-5"])
    assert list(map(said, steps[:-1])) == [
        "Write numbers, + - * / and parentheses only. Try again.",
        "The value is 15, not 16. Try again.",
        "Use each number exactly once. Try again.",
    ]
    assert [step.rewards["correct"] for step in steps] == [0, 0, 0, 1]  # partial credit at the end only
    assert [step.shaped["format"] for step in steps] == [-0.1, 0, 0, 0]
    assert steps[-1].metrics == {"action_is_valid": 1, "success": 1, "attempts": 4}
    compact = replies_to(Countdown(attempts=3, style="compact"), TASK, ["help", "3/5+7", "3+5+7"])
    assert list(map(said, compact[:-1])) == ["?", "7.6"]
    assert [step.rewards["correct"] for step in compact] == [0, 0, 0.1]


def test_prompts(first) -> None:
    assert first(Countdown(style="compact"), TASK) == "3 5 7=16"
    assert first(Countdown(operators="-+", use="some"), TASK) == (
        "Write an expression with the value 16. Use each number at most once: 3, 5, 7. Allowed are + - and "
        "parentheses. Reply with the expression only, in this form: <answer>(1 + 2) * 3</answer>"
    )


def brute_force(numbers: tuple[int, ...]) -> set[Fraction]:
    """Values by reducing any two of a list to one, in another way than the solver."""
    found, waiting = set(), [tuple(map(Fraction, numbers))]
    while waiting:
        state = waiting.pop()
        if len(state) == 1:
            found.add(state[0])
        for i, j in itertools.permutations(range(len(state)), 2):
            rest = tuple(x for k, x in enumerate(state) if k not in (i, j))
            for act in (operator.add, operator.sub, operator.mul, operator.truediv):
                if act is not operator.truediv or state[j]:
                    waiting.append((*rest, act(state[i], state[j])))
    return found


@pytest.mark.parametrize("numbers", [(3, 5, 7), (1, 1, 8), (2, 4, 4)])
def test_the_solver_finds_a_solution_exactly_where_there_is_one(numbers: tuple[int, ...]) -> None:
    values = brute_force(numbers)
    for target in range(1, 150):
        assert (solve(numbers, target) is not None) == (Fraction(target) in values)


def test_known_hard_ones() -> None:
    """The only solutions of these pass through fractions."""
    assert solve([8, 8, 3, 3], 24) == "8 / (3 - (8 / 3))"
    assert solve([5, 5, 5, 1], 24) in ("(5 - (1 / 5)) * 5", "5 * (5 - (1 / 5))")
    assert solve([1, 1, 1, 1], 24) is None
    assert solve([9, 2], 2, some=True) == "2"


@pytest.mark.slow
def test_problems_fit_the_settings() -> None:
    keys = {"min_numbers": 2, "max_numbers": 3, "largest": 9, "max_target": 20, "eval_size": 60}
    for use in ("all", "some"):
        for task in Countdown(**keys, use=use).taskset().tasks("eval"):
            numbers, target = task.data["numbers"], task.data["target"]
            assert 2 <= len(numbers) <= 3 and all(1 <= number <= 9 for number in numbers)
            assert 1 <= target <= 20 and (use == "all" or target not in numbers)
    with pytest.raises(ConfigError, match="gave no problem"):
        Countdown(operators="+", max_target=2).taskset().tasks("eval")

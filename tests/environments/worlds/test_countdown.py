"""Expressions are read exactly, every problem has a solution, and no other way earns the reward."""

from __future__ import annotations

import asyncio
import itertools
import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.countdown import Countdown, CountdownEpisode, solve
from silva.errors import ConfigError
from silva.types import Message, Task

TASK = Task("c", "countdown", 0, {"numbers": [3, 5, 7], "target": 16})


def reward(reply: str, **changes) -> float:
    async def run() -> float:
        episode = CountdownEpisode(Countdown(**changes), TASK)
        await episode.reset()
        step = await episode.step(Message("assistant", reply))
        assert step.terminated and step.metrics["success"] == float(step.rewards["correct"] == 1.0)
        return step.rewards["correct"]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "reply",
    [
        "3*7-5",
        "<think>3*5=15</think><answer>3 * 7 - 5</answer>",
        "<answer>(7*3)-5 = 16</answer>",
        "7 × 3 − 5",
        "-5 + 3 * 7",
        "(3 * 7) - (5)",
        "3 * 7 - 5.",
        "<answer>3 * 7 - 5.</answer>",
    ],
)
def test_a_solution_earns_one(reply: str) -> None:
    assert reward(reply) == 1.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("3 + 5 + 7", 0.1),  # the right numbers, another value
        ("16", 0.0),
        ("9 + 7", 0.0),
        ("3 * 7 - 5 + 5 - 5", 0.0),  # a number more than once
        ("3 * 7 - 5 * 1", 0.0),
        ("35 - 7 * 3", 0.0),  # digits put together
        ("3 5 + 7", 0.0),
        ("3 * 7 - 5 # 3", 0.0),
        ("3 ** 7 - 5", 0.0),
        ("7 // 3 + 5", 0.0),
        ("3 / (5 - 5) + 7", 0.0),
        ("7_5 - 3", 0.0),
        ("3 * 7 - 5.0", 0.0),
        ("= 16", 0.0),
        ("5 - 3 = 16, 7", 0.0),
        ("3+5+7, 3*7-5", 0.0),  # a list of guesses is no expression
        ("__import__('os')", 0.0),
        ("(" * 5000 + "3" + ")" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_everything_else_earns_less(reply: str, expected: float) -> None:
    assert reward(reply) == expected
    assert reward(reply, partial=0.0) == 0.0


def test_at_most_once_needs_no_further_number() -> None:
    some = Task("c", "countdown", 0, {"numbers": [3, 5, 7], "target": 12})

    def success(reply: str, use: str) -> float:
        async def run() -> float:
            episode = CountdownEpisode(Countdown(use=use), some)
            await episode.reset()
            return (await episode.step(Message("assistant", reply))).metrics["success"]

        return asyncio.run(run())

    assert (success("5 + 7", "some"), success("5 + 7", "all")) == (1.0, 0.0)
    assert success("7 + 5 + 3 - 3", "some") == 0.0


def test_operators_that_are_not_allowed_are_refused() -> None:
    assert reward("3 * 7 - 5", operators="+-") == 0.0
    assert reward("5 + 7 - 3", operators="+-") == 0.1


def test_several_attempts_word_by_word(replies_to) -> None:
    steps = replies_to(Countdown(attempts=4), TASK, ["help", "3+5+7", "3 + 5", "3*7-5"])
    assert [step.observation.messages[0].content for step in steps[:-1]] == [
        "Write numbers, + - * / and parentheses only. Try again.",
        "The value is 15, not 16. Try again.",
        "Use each number exactly once. Try again.",
    ]
    assert [step.rewards["correct"] for step in steps] == [0, 0, 0, 1]  # partial credit at the end only
    assert [step.shaped["format"] for step in steps] == [-0.1, 0, 0, 0]
    assert steps[-1].metrics == {"action_is_valid": 1, "success": 1, "attempts": 4}
    compact = replies_to(Countdown(attempts=3, style="compact"), TASK, ["help", "3/5+7", "3+5+7"])
    assert [step.observation.messages[0].content for step in compact[:-1]] == ["?", "7.6"]
    assert [step.rewards["correct"] for step in compact] == [0, 0, 0.1]


def test_prompts() -> None:
    def prompt(**changes) -> str:
        return asyncio.run(CountdownEpisode(Countdown(**changes), TASK).reset()).messages[0].content

    assert prompt(style="compact") == "3 5 7=16"
    assert prompt(operators="-+", use="some") == (
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


def test_problems_fit_the_settings_and_splits_share_none_in_any_order() -> None:
    taskset = Countdown(min_numbers=2, max_numbers=3, largest=9, max_target=20, eval_size=60).taskset()
    held_out, training = taskset.tasks("eval"), taskset.tasks("train")[:400]
    for task in (*held_out, *training):
        assert 2 <= len(task.data["numbers"]) <= 3 and 1 <= task.data["target"] <= 20
        assert all(1 <= number <= 9 for number in task.data["numbers"])
    problems = [
        {(*sorted(t.data["numbers"]), "=", t.data["target"]) for t in s} for s in (held_out, training)
    ]
    assert not problems[0] & problems[1]
    alone = Countdown(use="some", largest=9, eval_size=60).taskset().tasks("eval")
    assert all(task.data["target"] not in task.data["numbers"] for task in alone)


def test_impossible_settings_are_named() -> None:
    with pytest.raises(ValidationError, match="max_numbers = 2: expected min_numbers = 3 or more"):
        Countdown(max_numbers=2)
    with pytest.raises(ConfigError, match="gave no problem"):
        Countdown(operators="+", max_target=2).taskset().tasks("eval")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    reply=st.text("357+-*/()= 16", max_size=16),
    partial=st.floats(0, 0.5),
)
def test_no_partial_credit_reaches_a_solution(reply: str, partial: float) -> None:
    got = reward(reply, partial=partial)
    assert got == 1.0 or got in (0.0, partial)
    if got == 1.0:
        left = reply.partition("=")[0]
        assert sorted(c for c in left if c.isdigit()) == ["3", "5", "7"]

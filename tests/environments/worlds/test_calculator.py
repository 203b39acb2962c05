"""Arithmetic with and without a tool; chains; nothing but the right number is rewarded."""

from __future__ import annotations

import re

import pytest
from tests.environments.conftest import call, said

from silva.environments.worlds.calculator import Calculator
from silva.types import Task

CALL = {"name": "calculator", "arguments": {"expression": "3 + 7"}}
SUM = Task("c", "calculator", 0, {"questions": ["What is 3 + 7?"], "calls": [[CALL]]}, ["10"])


def expressions(task: Task) -> list[str]:
    """What the expert of each question computes."""
    return [call["arguments"]["expression"] for (call,) in task.data["calls"]]


def test_prompts_of_the_three_forms(first) -> None:
    assert first(Calculator(tool=False), SUM) == "What is 3 + 7?"
    assert first(Calculator(), SUM) == (
        "Use the calculator before you answer, then reply with the number only.\nWhat is 3 + 7?"
    )
    assert first(Calculator(tool_required=False), SUM).startswith("You may use the calculator.")
    assert first(Calculator(instructions="Go."), SUM) == "Go.\nWhat is 3 + 7?"
    task = Calculator(style="compact", tool=False, chain=2, digits=1).taskset().tasks("train")[0]
    assert task.data["questions"][0] == expressions(task)[0].replace(" ", "")
    assert len(task.data["questions"][1]) == 2


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("10", 1), ("3 + 7 = 10.", 1), ("<think>11</think> 10", 1), ("10 or 11", 0), ("3 + 7", 0), ("ten", 0),
     ("9 10 11", 0), ("20/2", 0), ("5+5", 0), ("1e1", 0), ("10.0", 1)],
)  # fmt: skip
def test_the_last_number_is_the_answer(reply: str, reward: float, replies_to) -> None:
    step = replies_to(Calculator(tool=False), SUM, [reply])[0]
    assert step.terminated and step.rewards == {"correct": reward} and step.metrics["success"] == reward


@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize("operators", ["*", "+-", "+-*"])
def test_a_copied_question_is_no_answer(style, operators: str) -> None:
    settings = Calculator(style=style, tool=False, digits=1, operators=operators, chain=1 + (style == "full"))
    for task in settings.taskset().tasks("train")[:60]:
        for text, answer in zip(task.data["questions"], task.answer, strict=True):
            assert not settings.grade(text, answer) and settings.grade(answer, answer)
            assert not settings.grade(f"<answer>{text}</answer>", answer)


def test_with_the_tool(replies_to) -> None:
    steps = replies_to(Calculator(), SUM, ["10", call("calculator", expression="3 + 7"), "10"])
    assert list(map(said, steps[:2])) == ["Call a tool before you answer.", "10"]
    assert steps[-1].rewards == {"correct": 1.0}
    assert replies_to(Calculator(tool_required=False), SUM, ["10"])[0].rewards == {"correct": 1.0}
    (wrong,) = replies_to(Calculator(), SUM, [call("calculator", expression="3 +")])
    assert said(wrong) == "Error: not an arithmetic expression: '3 +'"


@pytest.mark.parametrize("operators", ["+-", "*", "+-*"])
def test_answers_are_right_and_chains_follow_on(operators: str) -> None:
    for task in Calculator(terms=3, chain=3, operators=operators, eval_size=60).taskset().tasks("eval"):
        first, second, third = expressions(task)
        assert len(task.answer) == len(task.data["questions"]) == 3
        assert second.startswith(f"{task.answer[0]} ") and third.startswith(f"{task.answer[1]} ")
        for expression, answer in zip((first, second, third), task.answer, strict=True):
            assert re.fullmatch(r"[-+* \d]+", expression) and eval(expression) == int(answer)
        assert task.data["questions"][1].endswith((" your result.", f"by {second.split()[-1]}."))


def test_a_chain_without_a_follow_up_on_its_side_is_not_asked_at_all() -> None:
    """Of 9 follow-ups to a result often none is held out where a fifth of all questions is."""
    keys = {"chain": 2, "digits": 1, "operators": "-", "eval_share": 0.2, "eval_size": 10, "train_size": 300}
    taskset = Calculator(**keys).taskset()
    train, held_out = (
        {tuple(sorted(e.split())) for task in taskset.tasks(split) for e in expressions(task)}
        for split in ("train", "eval")
    )
    assert len(held_out) >= 10 and not train & held_out

"""Arithmetic with and without a tool; chains; nothing but the right number is rewarded."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.calculator import Calculator
from silva.types import Message, Task, ToolCall

CALL = {"name": "calculator", "arguments": {"expression": "3 + 7"}}
SUM = Task("c", "calculator", 0, {"questions": ["What is 3 + 7?"], "calls": [[CALL]]}, ["10"])


def expressions(task: Task) -> list[str]:
    """What the expert of each question computes."""
    return [call["arguments"]["expression"] for (call,) in task.data["calls"]]


def key(expression: str) -> tuple[str, ...]:
    """An expression whatever the order of its numbers."""
    return tuple(sorted(expression.split()))


def first_prompt(settings: Calculator) -> str:
    return asyncio.run(settings.taskset().environment(SUM).reset()).messages[0].content


def test_prompts_of_the_three_forms() -> None:
    assert first_prompt(Calculator(tool=False)) == "What is 3 + 7?"
    assert first_prompt(Calculator()) == (
        "Use the calculator before you answer, then reply with the number only.\nWhat is 3 + 7?"
    )
    assert first_prompt(Calculator(tool_required=False)).startswith("You may use the calculator.")
    assert first_prompt(Calculator(instructions="Go.")) == "Go.\nWhat is 3 + 7?"
    compact = Calculator(style="compact", tool=False, chain=2, digits=1, eval_size=4).taskset()
    task = compact.tasks("train")[0]
    assert task.data["questions"][0] == expressions(task)[0].replace(" ", "")
    assert len(task.data["questions"][1]) == 2


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("10", 1), ("3 + 7 = 10.", 1), ("<think>11</think> 10", 1), ("10 or 11", 0), ("3 + 7", 0), ("ten", 0)],
)
def test_the_last_number_is_the_answer(reply: str, reward: float, replies_to) -> None:
    step = replies_to(Calculator(tool=False), SUM, [reply])[0]
    assert step.terminated and step.rewards == {"correct": reward} and step.metrics["success"] == reward


@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize("operators", ["*", "+-", "+-*"])
def test_a_copied_question_is_no_answer(style, operators: str) -> None:
    settings = Calculator(style=style, tool=False, digits=1, operators=operators, chain=1 + (style == "full"))
    for task in settings.taskset().tasks("train")[:150]:
        for text, answer in zip(task.data["questions"], task.answer, strict=True):
            assert not settings.grade(text, answer) and settings.grade(answer, answer)
            assert not settings.grade(f"<answer>{text}</answer>", answer)


def test_with_the_tool(replies_to) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "3 + 7"}),))
    steps = replies_to(Calculator(), SUM, ["10", call, "10"])
    shown = [step.observation.messages[0].content for step in steps[:2]]
    assert shown == ["Call a tool before you answer.", "10"]
    assert steps[-1].rewards == {"correct": 1.0}
    assert replies_to(Calculator(tool_required=False), SUM, ["10"])[0].rewards == {"correct": 1.0}
    wrong = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "3 +"}),))
    problem = replies_to(Calculator(), SUM, [wrong])[0].observation.messages[0]
    assert problem.content == "Error: not an arithmetic expression: '3 +'" and problem.name == "calculator"


@pytest.mark.parametrize("operators", ["+-", "*", "+-*"])
def test_answers_are_right_and_chains_follow_on(operators: str) -> None:
    tasks = Calculator(terms=3, chain=3, operators=operators, eval_size=100).taskset().tasks("eval")
    for task in tasks:
        first, second, third = expressions(task)
        assert len(task.answer) == len(task.data["questions"]) == 3
        assert second.startswith(f"{task.answer[0]} ") and third.startswith(f"{task.answer[1]} ")
        for expression, answer in zip((first, second, third), task.answer, strict=True):
            assert _left_to_right_with_products_first(expression) == int(answer)
    assert (
        tasks[0]
        .data["questions"][1]
        .endswith((" your result.", f"by {expressions(tasks[0])[1].split()[-1]}."))
    )


def _left_to_right_with_products_first(expression: str) -> int:
    tokens = expression.split()
    terms, sign = [], 1
    value = int(tokens[0])
    for operator, number in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator == "*":
            value *= int(number)
        else:
            terms.append(sign * value)
            sign, value = (1 if operator == "+" else -1), int(number)
    return sum(terms) + sign * value


def test_the_expert_writes_calls() -> None:
    episode = Calculator().taskset().environment(SUM)
    assert episode.expert_reply() == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 7"}}\n</tool_call>'
    )
    assert len(episode.random_reply(1)) <= 2


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    reply=st.text("0123456789+-*/=., ", max_size=16)
    | st.sampled_from(["9 10 11", "20/2", "5+5", "1e1", "10.0"])
)
def test_no_other_reply_earns_the_reward(reply: str, replies_to) -> None:
    reward = replies_to(Calculator(tool=False), SUM, [reply])[0].rewards["correct"]
    last = reply.replace("/", " ").rstrip("+-*/=., ").rpartition(" ")[2]
    assert reward in (0.0, 1.0)
    assert reward == 0.0 or "10" in last


def test_one_digit_sums_leave_a_hundred_for_evaluation_with_three_operators() -> None:
    tasks = Calculator(tool=False, digits=1, operators="+-*", eval_size=100, train_size=1000).taskset()
    assert len(tasks.tasks("eval")) == 100
    assert len({task.content() for task in tasks.tasks("train")}) > 60


@pytest.mark.parametrize(
    "keys",
    [{"chain": 2}, {"chain": 4, "operators": "+-*"}, {"chain": 2, "digits": 1}, {"chain": 3, "terms": 3}],
)
def test_no_question_of_a_held_out_chain_is_asked_in_training(keys: dict) -> None:
    taskset = Calculator(eval_size=100, train_size=3000, **keys).taskset()
    asked = {s: {key(e) for task in taskset.tasks(s) for e in expressions(task)} for s in ("train", "eval")}
    assert len(asked["eval"]) > 80 and not asked["train"] & asked["eval"]
    # Nor is one that any other seed or size would hold out.
    other = Calculator(eval_size=500, train_size=1, seed=9, **keys).taskset()
    held_out = {key(e) for task in other.tasks("eval") for e in expressions(task)}
    assert len(held_out - asked["eval"]) > 50 and not asked["train"] & held_out


def test_a_chain_without_a_follow_up_on_its_side_is_not_asked_at_all() -> None:
    """Of 9 follow-ups to a result often none is held out where a fifth of all questions is."""
    taskset = Calculator(
        chain=2, digits=1, operators="-", eval_share=0.2, eval_size=10, train_size=300
    ).taskset()
    asked = {s: {key(e) for task in taskset.tasks(s) for e in expressions(task)} for s in ("train", "eval")}
    assert len(asked["eval"]) >= 10 and not asked["train"] & asked["eval"]


def test_operators_are_checked() -> None:
    with pytest.raises(ValidationError, match="operators"):
        Calculator(operators="+/")

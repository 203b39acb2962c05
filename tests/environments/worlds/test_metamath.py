"""Attempts and what they earn; rows of a file; word problems worked by hand."""

from __future__ import annotations

import re

import pytest
from tests.environments.conftest import said
from tests.real_rows import DATA

from silva.environments.worlds.metamath import NAMES, TEMPLATES, THINGS, MetaMath
from silva.errors import ConfigError
from silva.tools.calculator import evaluate
from silva.types import Task

TASK = Task("m", "metamath", 0, {"question": "What is 6 times 7?"}, "42")


def test_attempts_earn_half_as_much_each(replies_to) -> None:
    wrong = "<answer>41</answer>"
    for failures, expected in enumerate([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]):
        steps = replies_to(MetaMath(), TASK, [wrong] * failures + ["<answer>42</answer>"])
        assert [step.rewards["correct"] for step in steps] == [0] * failures + [expected]
        assert steps[-1].terminated and steps[-1].metrics["attempts"] == failures + 1
    steps = replies_to(MetaMath(), TASK, [wrong] * 9)
    assert len(steps) == 5 and steps[-1].metrics["success"] == 0
    assert sum(step.rewards["correct"] for step in steps) == 0


def test_words_and_penalties(first, replies_to) -> None:
    assert (
        first(MetaMath(), TASK)
        == "What is 6 times 7?\nReply with the answer in this form: <answer>5</answer>"
    )
    steps = replies_to(MetaMath(attempts=3), TASK, ["", "41", "It is 42."])
    assert list(map(said, steps[:-1])) == ["That is not right. Try again."] * 2
    assert [step.shaped["format"] for step in steps] == [-0.1, 0, 0]
    assert steps[-1].rewards == {"correct": 0.25}
    compact = replies_to(MetaMath(style="compact", decay=0.9), TASK, ["41", "42"])
    assert said(compact[0]) == "no" and compact[1].rewards == {"correct": 0.9}


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("6 * 7 = 42", "42", True),
        ("<answer>42 or 41</answer>", "42", False),
        ("<answer>7 pm</answer>", "7 PM", True),
        ("<answer>7 pm 8 pm</answer>", "7 pm", False),
    ],
)
def test_answers_are_compared_as_numbers_or_texts(reply: str, answer: str, right: bool, replies_to) -> None:
    """As `silva.rewards.text.is_right` has it."""
    task = Task("m", "metamath", 0, {"question": "?"}, answer)
    assert replies_to(MetaMath(), task, [reply])[0].rewards == {"correct": float(right)}


ROWS = [
    {
        "query": f"Question {number}, version {version}: {number} + 1?",
        "original_question": f"Question {number}?",
        "response": f"We add.\n#### {number + 1}\nThe answer is: {number + 1}",
    }
    for number in range(100)
    for version in range(3)
]


def test_rows_of_metamathqa_and_versions_of_a_question_stay_together(rows_file) -> None:
    path = rows_file(ROWS)
    taskset = MetaMath(path=path, eval_size=40, train_size=500).taskset()
    train, held_out = (
        {task.data["question"].partition(",")[0] for task in taskset.tasks(s)} for s in ("train", "eval")
    )
    assert train and held_out and not train & held_out
    for task in taskset.tasks("eval"):
        assert int(task.answer) == int(task.data["question"].split()[1].rstrip(",")) + 1
    assert len(MetaMath(path=path, rows=9, eval_size=1).taskset().tasks("train")) < 9


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [*ROWS[:4], {"query": "q", "response": "We add."}],
            ":5: response: got 'We add\\.', expected text with",
        ),
        ([{"query": "q", "answer": ["5"]}], r":1: answer: got \['5'\], expected text or a number"),
        ([{"query": "q", "level": "5"}], ":1: expected a table with a question and an answer"),
    ],
)
def test_wrong_rows_are_named(rows_file, rows: list[dict], message: str) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl" + message):
        MetaMath(path=rows_file(rows)).taskset()


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
def test_a_plain_table_works_too(expert_rate) -> None:
    world = MetaMath(path=str(DATA / "gsm8k_test.jsonl"))
    assert expert_rate(world, 100) == (1.0, 1.0)
    assert expert_rate(MetaMath(path=str(DATA / "math500_test.jsonl"), eval_size=100), 100) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("number", "values", "expected"),
    [
        (0, {"a": 3, "b": 4}, 7),
        (1, {"a": 9, "b": 4}, 5),
        (2, {"a": 6, "b": 7}, 42),
        (3, {"a": 12, "b": 4}, 3),
        (4, {"a": 3, "b": 2, "c": 10}, 4),
        (5, {"a": 10, "b": 3, "c": 4}, 34),
        (6, {"a": 2, "b": 5, "c": 3, "d": 4}, 22),
        (7, {"a": 8, "b": 3}, 32),
        (8, {"a": 5, "b": 2, "c": 9}, 6),
        (9, {"a": 4, "b": 6, "c": 5}, 19),
        (10, {"a": 10, "b": 8, "c": 5}, 400),
        (11, {"a": 12, "b": 6, "c": 5}, 10),
        (12, {"a": 7, "b": 6, "c": 5}, 4),
    ],
)
def test_word_problems_worked_by_hand(number: int, values: dict[str, int], expected: int) -> None:
    text, expression = TEMPLATES[number]
    assert {*re.findall(r"\{(\w)\}", text)} == {*values}
    assert evaluate(expression.format(**values)) == expected


def test_every_template_is_tested_and_the_same_numbers_with_other_names_are_the_same_problem() -> None:
    assert len(TEMPLATES) == 13
    taskset = MetaMath(largest=5, eval_size=60, train_size=400).taskset()
    train, held_out = (
        [re.sub("|".join((*NAMES, *THINGS)), "_", task.data["question"]) for task in taskset.tasks(split)]
        for split in ("train", "eval")
    )
    assert not {*train} & {*held_out} and len({*held_out}) < len(held_out)
    assert all(int(task.answer) > 0 and "{" not in task.data["question"] for task in taskset.tasks("eval"))

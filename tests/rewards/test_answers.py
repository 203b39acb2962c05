"""Which answer of a reply counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.attempts import attempt

from silva.errors import RecordError
from silva.protocols import Attempt
from silva.rewards.answers import FINDERS, MAX_ANSWER, find_answer, question, references
from silva.types import Message


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("42", "42"),
        ("It is\n  42  \n\n", "42"),
        ("<answer> 42 </answer>", "42"),
        ("<answer>42", "42"),
        ("<answer>41</answer> no <answer>42</answer>", "42"),
        ("<answer>So \\boxed{42}.</answer>", "42"),
        ("\\boxed{41} <answer>42</answer>", "42"),
        ("\\boxed{41}, or rather \\boxed{42}.", "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\fbox{42} and then", "42"),
        ("$\\boxed 42$", "42"),
        ("<answer>\\boxed{\\text{Paris}}</answer>", "Paris"),
        ("<answer>$\\mathbf{1990}$</answer>", "1990"),
        ("\\boxed{\\text{a} \\text{b}}", "\\text{a} \\text{b}"),
        ("Final Answer: 42\nI hope it is correct.", "42"),
        ("The answer is 41. The answer is 42.", "42."),
        ("**Answer:** 42", "42"),
        ("The answer is **42**.", "**42**."),
        ("**Final Answer: 42**", "**42**"),
        ("Answer:\n42\nmore", "42"),
        ("12 * 8 = 96\n#### 96", "96"),
        ("answer : 4\nlater", "4"),
        ("answers vary\n7", "7"),
        # Empty places are not made up for by others.
        ("42 <answer></answer>", None),
        ("\\boxed{42} <answer> </answer>", None),
        ("42 \\boxed{}", None),
        ("\\boxed{42", None),
        ("\\boxed", None),
        ("", None),
        (" \n\t ", None),
        # What nobody sees.
        ("\x00", None),
        ("4\u200b2", None),
        ("\u202e24", None),
        ("<answer>4\u00ad2</answer>", None),
        # Thoughts that never close.
        ("41\n<think>42", "41"),
        ("<think>\\boxed{42}", None),
    ],
)
def test_the_answer_is_found(reply: str, answer: str | None) -> None:
    assert find_answer(reply) == answer


PLACES = "<answer>a \\boxed{b}</answer>\nAnswer: d\ne"


@pytest.mark.parametrize(
    ("how", "answer"),
    [("answer_tag", "a \\boxed{b}"), ("boxed", "b"), ("last_line", "e"), ("whole", PLACES), ("auto", "b")],
)
def test_each_place(how, answer: str) -> None:
    assert find_answer(PLACES, how) == answer


def test_a_box_around_all_of_a_place_is_dress() -> None:
    assert find_answer("<answer>\\boxed{\\textbf{Paris}}</answer>", "answer_tag") == "Paris"
    assert find_answer("\\(x\\)", "whole") == "x"


def test_no_other_place_is_tried() -> None:
    assert find_answer("\\boxed{5}", "answer_tag") is None
    assert find_answer("<answer>5</answer>", "boxed") is None


def test_letters_that_join_others_are_seen() -> None:
    persian = "می\u200cخواهم"
    assert find_answer(persian) == persian


def test_thoughts_tools_and_earlier_turns_are_not_read() -> None:
    said = Attempt(
        (
            Message("user", "q <answer>1</answer>"),
            Message("assistant", "<answer>2</answer>"),
            Message("tool", "<answer>3</answer>", name="search"),
            Message("assistant", "<think><answer>4</answer></think>none", reasoning="<answer>5</answer>"),
        )
    )
    assert find_answer(said.reply) == "none"


@pytest.mark.parametrize("how", FINDERS)
@pytest.mark.parametrize(
    "reply",
    ["<answer>" * 50_000, "\\boxed{" * 50_000, "answer :" * 50_000, "#" * 400_000, " " * 400_000,
     "\n" * 400_000, "x" * 400_000, "\\boxed" + " " * 400_000, "final answer" + " " * 400_000],
)  # fmt: skip
def test_endless_replies_have_no_answer(how, reply: str) -> None:
    answer = find_answer(reply, how)
    assert answer is None or len(answer) <= MAX_ANSWER


@given(st.text("<>/answer\\boxed{} :#\n\x00ab", max_size=80), st.sampled_from(sorted(FINDERS)))
def test_an_answer_is_a_part_of_the_reply(reply: str, how) -> None:
    answer = find_answer(reply, how)
    assert answer is None or (answer and answer == answer.strip() and answer in reply)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a", ["a"]),
        (5, ["5"]),
        (0.5, ["0.5"]),
        (["a", 2], ["a", "2"]),
        (("a",), ["a"]),
        (72.0, ["72"]),
        (np.float64(72), ["72"]),
        (True, ["true", "yes"]),
        (np.bool_(False), ["false", "no"]),
        ({"target": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_references(answer, expected: list[str]) -> None:
    assert references(answer) == expected


@pytest.mark.parametrize("answer", [None, "", " ", [], ["a", ""], {"a": 1}, {"target": []}, [["a"]], [None]])
def test_a_task_without_a_reference_is_an_error(answer) -> None:
    with pytest.raises(RecordError, match="answer of the task: got"):
        references(answer)


def test_the_question() -> None:
    assert question(attempt("x", "y", question="Who?")) == "Who?"
    assert question(Attempt((Message("system", "s"), Message("user", "u"), Message("user", "v")))) == "u"
    assert question(Attempt((Message("user", "u"),), data={"question": "column"})) == "column"
    assert question(Attempt(())) == ""

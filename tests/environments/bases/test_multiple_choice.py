"""Which choice a reply names: one, or none. Listing them earns nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments.bases.multiple_choice import named_choice
from silva.rewards.answers import find_answer

TOWNS = ["Paris", "Rome", "A Coruna", "Berlin, Germany"]


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("Final Answer: B", "B"),
        ("It says so.\n**Final Answer:** (B).", "B"),
        ("final answer: b", "B"),
        ("<answer>B</answer>", "B"),
        ("<think>A or C</think>B", "B"),
        ("Final Answer: B. Rome", "B"),
        ("Final Answer: B) rome.", "B"),
        ("Final Answer: Rome", "B"),
        ("Final Answer: A Coruna", "C"),
        ("Final Answer: Berlin, Germany.", "D"),
        ("Final Answer: A\nNo. Final Answer: D", "D"),  # the last one, as in the end of a thought
        ("Final Answer:\nB", "B"),
        ("Final Answer: A B C D", None),
        ("Final Answer: A, B, C, D", None),
        ("Final Answer: A or B", None),
        ("Final Answer: ABCD", None),
        ("Final Answer: A/B", None),
        ("Final Answer: B. Paris", None),  # the text of another choice
        ("Final Answer: Rome or Paris", None),
        ("Final Answer: E", None),
        ("Final Answer:", None),
        ("<answer></answer>", None),
        ("<answer>A</answer><answer>B</answer>", "B"),  # the last answer counts
        ("I think it is B", None),
        ("It is B, not A", None),
        ("\\boxed{B}", "B"),
        ("\uff22", None),  # another B
        ("", None),
        ("B" * 10_000, None),
        ("( " * 4000 + "B", "B"),
        ("(" * 10_000 + "B" + "x", None),
    ],
)
def test_replies(reply: str, letter: str | None) -> None:
    answer = find_answer(reply.rpartition("</think>")[2])
    assert named_choice(answer or "", TOWNS) == letter


def test_choices_with_the_same_text_can_only_be_named_by_letter() -> None:
    assert named_choice("Rome", ["Rome", "rome."]) is None
    assert named_choice("B. Rome", ["Rome", "rome."]) == "B"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_list_of_letters_names_one(size: int) -> None:
    for letters in itertools.permutations("ABCD", size):
        for between in ("", " ", ", ", " or ", "/", "\n", ". ", ") (", "; "):
            assert named_choice(between.join(letters), TOWNS) is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    parts=st.lists(
        st.sampled_from(["A", "B", "C", "D", " ", ".", "(", ")", "Rome", "Paris", ":", "\n"]), max_size=8
    )
)
def test_whatever_is_named_stands_there_alone(parts: list[str]) -> None:
    letters = {part for part in parts if part in "ABCD" and part.strip()}
    texts = {{"Rome": "B", "Paris": "A"}[part] for part in parts if part in ("Rome", "Paris")}
    named = named_choice("".join(parts).strip(), TOWNS)
    assert named is None or letters | texts == {named}

"""Numbers and texts read from replies."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments.grading import (
    exact_match,
    extract_answer,
    integers,
    last_number,
    normalise,
    same_number,
    similarity,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 10.", 10),
        ("3 + 7 = 10", 10),
        ("12-5", 5),
        ("= -5", -5),
        ("−5", -5),
        ("1,234,567", 1234567),
        ("1,2", 2),
        ("0.5", Fraction(1, 2)),
        ("about 3.25 m", Fraction(13, 4)),
        ("**42**", 42),
        ("\\boxed{7}", 7),
        ("6/3", 3),
        ("10km", 10),
        ("007", 7),
        ("x2", None),
        ("none", None),
        ("9" * 61, None),
        ("9" * 10_000, None),
    ],
)
def test_last_number(text: str, number: int | Fraction | None) -> None:
    assert last_number(text) == number


def test_same_number_is_exact() -> None:
    assert same_number("it is 0.50", "0.5")
    assert not same_number("0.5000001", "0.5")
    assert not same_number("no number", "0.5")
    assert not same_number("5", "five")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(number=st.integers(-(10**20), 10**20), before=st.text("ab 1-,.=", max_size=10))
def test_a_number_written_last_is_read_back(number: int, before: str) -> None:
    assert last_number(f"{before} = {number}") == number
    assert last_number(f"{number:,}") == number


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=80) | st.text("0123456789.,-−/ ", max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    assert last_number(text) is None or isinstance(last_number(text), Fraction)
    assert all(isinstance(number, int) for number in integers(text))


def test_texts() -> None:
    assert integers("from -3 to 12") == [-3, 12]
    assert extract_answer("<think>no <answer>1</answer></think> so <answer> 2 </answer> 3") == "2"
    assert extract_answer("<answer>2") == "2"
    assert extract_answer(" plain ") == "plain"
    assert normalise('  "The  Cat." ') == "the cat"
    assert exact_match("PARIS!", "Paris") and not exact_match("not Paris", "Paris")
    assert similarity("abcd", "abcd") == 1.0 and similarity("abcd", "abce") == 0.75

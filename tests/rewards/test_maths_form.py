"""Which answers commit to one value that is worked out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.rewards.maths_form import commits, expression

WRITTEN = [
    "42", "-42", "+42", "42.0", "$42$", "$$42$$", "\\(42\\)", "x = 42", "$x = 42$", "42 apples",
    "42\\text{ km}", "\\$42", "42%", "42\\%", "42^\\circ", "42°", "4.2 \\times 10^1", "10^{3}", "1,234,567",
    "1{,}234",
    "11,\\! 111", "It is 42.", "It is $42$.", "the price is $42", "42 m^2", "\\left(42\\right)", "(42)",
]  # fmt: skip
OTHERS = [
    "41 or 42", "either 41 or 42", "41, 42", "$41$ or $42$", "41 43 42", "17 + 25", "$17 + 25$", "6 * 7",
    "84/2",
    "\\frac{84}{2}", "\\sqrt{1764}", "\\sum_{i=1}^{42} 1", "42!", "\\{42\\}", "{41, 42}", "\\pm 42",
    "x > 42", "[42, 42]", "41 = 42", "42 = 41", "2 of the 42", "", "x", "\\infty", "\\text{42}",
    "1 \\cup \\{42\\}", "2 \\cdot 21", "\\int_0^1 42 dx", "f(42)", "6(7)",
]  # fmt: skip


@pytest.mark.parametrize("answer", WRITTEN)
def test_a_written_number_commits(answer: str) -> None:
    assert commits(answer, "42")


@pytest.mark.parametrize("answer", OTHERS)
def test_several_numbers_and_work_that_is_left_do_not(answer: str) -> None:
    assert not commits(answer, "42")


@pytest.mark.parametrize(
    ("answer", "reference", "does"),
    [
        ("1/2", "0.5", True),
        ("\\frac12", "\\frac{1}{2}", True),
        ("0.5", "1/2", True),
        ("3 \\frac{1}{2}", "3.5", True),
        ("10^{-7}", "0.0000001", True),
        ("1/4", "25\\%", True),
        ("6/3", "2", False),
        ("\\int_0^1 x\\,dx", "\\frac{1}{2}", False),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("\\lim_{n \\to 2} \\sqrt{n}", "\\sqrt{2}", False),
        ("5!", "n!", True),
        ("\\binom{n}{k}", "\\frac{n!}{k!(n-k)!}", False),
        ("\\frac{d}{dx} x^2", "2x", False),
        ("\\frac{2}{x}", "2x^{-1}", True),
        ("$x = 1$, $y = 2$", "x = 1, y = 2", True),
        ("(1, 2)", "(1, 2)", True),
        ("Evelyn", "\\text{Evelyn}", True),
        ("\\minus 3", "x", True),  # \minus is not \min
    ],
)
def test_what_the_reference_asks_for(answer: str, reference: str, does: bool) -> None:
    assert commits(answer, reference) is does


def test_one_expression_of_an_answer() -> None:
    assert expression("So it is $x^2$, as said.") == "x^2"
    assert expression("For n = 5 it is $x^2$.") is None
    assert expression("That makes 18 dollars.") == "18"
    assert expression("18 of 20") is None
    assert expression("blue") == "blue"


@given(number=st.integers(-(10**9), 10**9), other=st.integers(-(10**9), 10**9))
def test_two_numbers_are_never_one(number: int, other: int) -> None:
    assert commits(str(number), str(number))
    for form in ("{0} or {1}", "{1}, or rather {0}", "{1}; {0}", "{1} + {0}"):
        assert not commits(form.format(number, other), str(number))


@given(
    st.text("0123456789+-*/^(){}\\ .,=<>xe%$frac", max_size=60),
    st.sampled_from(["42", "1/2", "x^2", "(1, 2)"]),
)
def test_no_text_raises(answer: str, reference: str) -> None:
    assert commits(answer, reference) in (True, False)


@pytest.mark.parametrize(
    "answer", ["\\frac{" * 400, "1 " * 800, "$" * 2000, "(" * 2000, "1,111" * 400, "a" * 2000]
)
def test_time_is_bounded(answer: str) -> None:
    assert not commits(answer, "42")

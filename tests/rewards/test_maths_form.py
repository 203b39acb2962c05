"""What answers say, and which of them are worked out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.rewards.maths_form import Tree, number, read, worked_out
from silva.rewards.maths_words import quantity

WRITTEN = [
    "42", "-42", "+42", "42.0", "$42$", "$$42$$", "\\(42\\)", "x = 42", "$x = 42$", "42 apples",
    "42\\text{ km}", "\\$42", "42%", "42\\%", "42^\\circ", "42°", "4.2 \\times 10^1", "10^{3}", "1,234,567",
    "1{,}234",
    "11,\\! 111", "It is 42.", "It is $42$.", "the price is $42", "42 m^2", "\\left(42\\right)", "(42)",
    "\\text{42}", "17 + 25 = 42",
]  # fmt: skip
OTHERS = [
    "41 or 42", "41, 42", "$41$ or $42$", "41 43 42", "17 + 25", "$17 + 25$", "6 * 7", "84/2",
    "\\frac{84}{2}", "\\sqrt{1764}", "\\sum_{i=1}^{42} 1", "42!", "\\{42\\}", "{41, 42}", "\\pm 42", "x > 42",
    "[42, 42]", "2 of the 42", "", "x", "\\infty", "1 \\cup \\{42\\}", "2 \\cdot 21", "\\int_0^1 42 dx",
    "f(42)", "6(7)", "42 squared", "half of 42", "at least 42", "42 is wrong", "42?", "not 42",
]  # fmt: skip


def commits(answer: str, reference: str) -> bool:
    said, right = read(answer).tree, read(reference)
    if said is None or said[0] in ("{}", "[]", "U"):
        return False
    return worked_out(said, right.tree, right.quantity.percent)


@pytest.mark.parametrize("answer", WRITTEN)
def test_a_written_number_commits(answer: str) -> None:
    assert commits(answer, "42")


@pytest.mark.parametrize("answer", OTHERS)
def test_several_numbers_and_work_that_is_left_do_not(answer: str) -> None:
    assert not commits(answer, "42") or isinstance(read(answer).tree, list)


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
        ("(1, 1 + 1)", "(1, 2)", False),
        ("\\minus 3", "x", True),  # \minus is not \min
    ],
)
def test_what_the_reference_asks_for(answer: str, reference: str, does: bool) -> None:
    assert commits(answer, reference) is does


@pytest.mark.parametrize(
    ("answer", "tree"),
    [
        ("So it is $x^2$.", "x^{2}"),
        ("So it is $x^2$, as said before.", None),
        ("For n = 5 it is $x^2$.", None),
        ("18 of 20", None),
        ("blue", None),
        ("f(2) = 18", ["=", "f(2)", "18"]),
        ("2x = 18", "2x = 18"),
        ("x = a = 3 + 2 = 5", ["=", "x", "5", "3 + 2"]),
        ("x = 2 \\text{ or } x = 3", ["=", "x", ["{}", "2", "3"]]),
        ("19, 46, and 82", ["{}", "19", "46", "82"]),
        ("1, =", ["{}", "1", "="]),
        ("1, =2", ["{}", "1", "=2"]),
        ("2 h 30 min", "150"),
        ("3 dollars and 50 cents", "350"),
        ("30 minutes 2 hours", None),
        ("5 hours 6 kg", None),
        ("two thousand one hundred and five", "2105"),
        ("Each of the 3 pays 5.", None),
        ("The baker sells 18 red balls.", "18"),
        ("18 more than that", None),
        ("1 \\pm \\sqrt{2}", ["{}", "1 + \\sqrt{2}", "1 - \\sqrt{2}"]),
        ("x ≥ 3", ["=", "x", ["[)", "3", "\\infty"]]),
        ("7 > x > -2", ["=", "x", ["()", "-2", "7"]]),
        ("x<2 or x>3", ["=", "x", ["U", ["()", "-\\infty", "2"], ["()", "3", "\\infty"]]]),
        ("x<2 and x>3", None),
        ("(0,9) \\cup (9,36)", ["U", ["()", "0", "9"], ["()", "9", "36"]]),
        ("2√3 + π²", "2\\sqrt{3} + \\pi ^{2}"),
        ("0.1\\overline{6}", "\\frac{1}{6}"),
        ("twenty-five", "25"),
        ("n must be 7", ["=", "n", "7"]),
        ("n must be at least 7", None),
        ("There are exactly twelve such integers.", "12"),
        ("7 such that x is positive", None),
        ("the empty set", "\\emptyset"),
        ("not the empty set", None),
        ("negative 5", "-5"),
        ("5 and a half", "\\frac{11}{2}"),
        ("2.5 million", "2500000"),
        ("4210 (base 7)", "4210_{7}"),
        ("4210_{\\text{seven}}", "4210_{7}"),
        ("10:15", None),
        ("2020-05-12", None),
        ("10-5", None),
    ],
)
def test_trees(answer: str, tree: Tree | None) -> None:
    assert read(answer).tree == tree


@pytest.mark.parametrize(
    ("words", "unit", "factor"),
    [
        ("cm", (("length", 1),), 0.01),
        ("square feet", (("length", 2),), 0.09290304),
        ("inches^3", (("length", 3),), 1.6387064e-05),
        ("gallons", (("length", 3),), 0.003785411784),
        ("miles per hour", (("length", 1), ("time", -1)), 0.44704),
        ("m/s^2", (("length", 1), ("time", -2)), 1),
        ("cents a day", (("money", 1), ("time", -1)), 0.01 / 86400),
        ("apples", (("apple", 1),), 1),
    ],
)
def test_units(words: str, unit: tuple[tuple[str, int], ...], factor: float) -> None:
    found = quantity(words)
    assert (
        found is not None and found.unit == unit and float(found.factor) == pytest.approx(factor, rel=1e-12)
    )


@given(value=st.integers(-(10**9), 10**9), other=st.integers(-(10**9), 10**9))
def test_two_numbers_are_never_one(value: int, other: int) -> None:
    assert number(str(read(str(value)).tree)) == value
    for form in ("{0} or {1}", "{1}, or rather {0}", "{1}; {0}", "{1} + {0}"):
        said = read(form.format(value, other)).tree
        assert said is None or isinstance(said, list) or number(said) is None


@given(
    st.text("0123456789+-*/^(){}\\ .,=<>xe%$frac", max_size=60) | st.text(max_size=40),
    st.sampled_from(["42", "1/2", "x^2", "(1, 2)"]),
)
def test_no_text_raises(answer: str, reference: str) -> None:
    said = read(answer).tree
    assert said is None or worked_out(said, read(reference).tree) in (True, False)


@pytest.mark.parametrize(
    "answer",
    ["\\frac{", "1 ", "$", "(", "1,111", "a", "9", "x=", "[(", "\\{", "1/", "**", "sqrt(", "(1,2)\\cup", "x<",
     "5 cm^2", "5 per ", "1e9", "1 and ", "\\text{ and }", "~", "f(1", "½", "²", "5 million ", "0.3", "{"],
)  # fmt: skip
def test_long_answers_are_read_at_once(answer: str) -> None:
    """A pattern that tries all ways to divide them would never end."""
    assert not commits((answer * 1000)[:1000], "42")


def test_a_ratio_in_words_is_that_ratio_and_no_other() -> None:
    assert read("3 to 5").text == read("3:5").text == read("three to five").text
    assert read("3 to 5").text not in {read(other).text for other in ("5 to 3", "3 to 15", "35", "3")}

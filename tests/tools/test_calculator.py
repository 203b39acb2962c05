"""Exact results, and that no expression is dangerous."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from silva.tools.calculator import calculator, evaluate, show
from silva.tools.function import ToolError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12 + 7) * 3", "57"),
        ("2 - 3 - 4", "-5"),
        ("-2 ** 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 4", "1.75"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ^ 10", "1024"),
        ("2 ** -2", "0.25"),
        ("6 × 7 − 2 ÷ 2", "41"),
        (" 1_000 ", "1000"),
        ("(1.5\n+2.5)", "4"),
        ("(1\n+2.5)", "3.5"),
        ("1\n+\t0.25\r\n*\u20034", "2"),
    ],
)
def test_results(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "not an arithmetic expression"),
        ("3 +", "not an arithmetic expression"),
        ("2, 3", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x", "only numbers"),
        ("True", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("1j", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 << 99", "only numbers"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "exponent 387420489: expected an integer"),
        ("2 ** 0.5", "exponent 0.5: expected an integer"),
        ("(10 ** 60) ** 2", "number too large"),
        ("1e999", "number too large"),
        ("1e-320", "too small"),
        ("9" * 150, "number too large"),
        ("1+" * 100 + "1", "expression too long: 201 characters"),
        ("(" * 199, "not an arithmetic expression"),
        ("1\0", "only numbers"),
        ("1 2", "not an arithmetic expression"),
        ("1\n2", "not an arithmetic expression"),
        ("1.\n5", "not an arithmetic expression"),
    ],
)
def test_what_is_refused_is_named(expression: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        evaluate(expression)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(expression=st.text("0123456789+-*/%().e ", max_size=200) | st.text(max_size=30))
def test_any_text_gives_a_result_or_a_tool_error(expression: str) -> None:
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(expression), Fraction)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(value=st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6))
def test_what_is_shown_is_exact(value: Fraction) -> None:
    assert Fraction(show(value)) == value
    assert evaluate(show(value)) == value


numerals = st.decimals(0, 1000, places=2).map(str) | st.integers(0, 1000).map(str)
spaces = st.text(" \n\t\r\f\u2003", max_size=3)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    first=numerals,
    rest=st.lists(st.tuples(st.sampled_from("+-*/"), numerals), min_size=1, max_size=4),
    spaces=st.lists(spaces, min_size=20, max_size=20),
)
def test_white_space_between_numbers_changes_nothing(first: str, rest: list, spaces: list[str]) -> None:
    """Against fractions, computed from left to right; line breaks are the hard part."""
    gap = iter(spaces)
    text, value = f"{next(gap)}{first}{next(gap)}", Fraction(first)
    for sign, numeral in rest:
        other = Fraction(numeral)
        assume(sign != "/" or other)
        text = f"({next(gap)}{text}{next(gap)}{sign}{next(gap)}{numeral}{next(gap)})"
        value = {"+": add, "-": sub, "*": mul, "/": truediv}[sign](value, other)
    assert evaluate(text) == value

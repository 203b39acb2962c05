"""Exact results, and that no expression is dangerous or slow."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
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
    ],
)
def test_what_is_refused_is_named(expression: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        evaluate(expression)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(expression=st.text("0123456789+-*/%().e ", max_size=200) | st.text(max_size=30))
def test_any_text_gives_a_result_or_a_tool_error_quickly(expression: str) -> None:
    start = time.perf_counter()
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(expression), Fraction)
    assert time.perf_counter() - start < 0.5


@settings(max_examples=100, deadline=None, derandomize=True)
@given(value=st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6))
def test_what_is_shown_is_exact(value: Fraction) -> None:
    assert Fraction(show(value)) == value
    assert evaluate(show(value)) == value

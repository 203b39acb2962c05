"""Exact arithmetic on short expressions. A parser of its own over `ast`: nothing is ever evaluated
as Python, and numbers, powers, length and nesting are bounded, so that no expression takes long."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from silva.tools.fixed import Fixed
from silva.tools.function import ToolError
from silva.tools.settings import ToolSettings

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 256  # of any numerator or denominator on the way
MAX_EXPONENT = 64
UNDERSTOOD = "only numbers, + - * / // % ** and parentheses are understood"

_CHARACTERS = re.compile(r"[0-9+\-*/%().eE_\s]*")  # no name can be written with these

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorSettings(ToolSettings):
    """A calculator."""

    type: Literal["calculator"] = "calculator"

    def build(self) -> Fixed:
        return Fixed([calculator])


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example (12 + 7) * 3."""
    return show(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / // % **, parentheses.

    Raises ToolError saying what is wrong with it.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"expression too long: {len(expression)} characters, at most {MAX_LENGTH}")
    text = expression.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    text = " ".join(text.split())  # on one line: `_value` finds numbers by their column
    if not _CHARACTERS.fullmatch(text):
        raise ToolError(UNDERSTOOD)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"not an arithmetic expression: {expression!r}") from None
    return _value(tree.body, text)


def show(value: Fraction) -> str:
    """An integer, a decimal where it is exact in at most 12 places, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**12
    if scaled.denominator == 1:
        sign, digits = "-" * (scaled < 0), str(abs(scaled.numerator)).rjust(13, "0")
        return f"{sign}{digits[:-12]}.{digits[-12:].rstrip('0')}"
    return f"{value.numerator}/{value.denominator}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(_number(node.value, text[node.col_offset : node.end_col_offset]))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            try:
                return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
            except ZeroDivisionError:
                raise ToolError("division by zero") from None
    raise ToolError(UNDERSTOOD)


def _number(value: int | float, written: str) -> Fraction:
    if isinstance(value, int):
        return Fraction(value)
    if value in (float("inf"), float("-inf")) or (value and abs(value) < 1e-30):
        raise ToolError("number too large or too small")
    return Fraction(written)  # 0.1 is a tenth, and no digit is lost


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ToolError(
            f"exponent {show(exponent)}: expected an integer from -{MAX_EXPONENT} to {MAX_EXPONENT}"
        )
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError(f"number too large: more than {MAX_BITS} bits")
    return value

"""Code against hidden tests: 1 if it passes all of them, else 0, or a share below 1.

The tests are the task's answer: a list of {"input", "output"}, or {"inputs", "outputs"} with, for functions,
"fn_name" (the form of APPS and TACO), as JSON or as text of it. Without a function the code is run as
`python file.py < input` is; input and output are text or lists of lines. With one, the code is imported as a
module is, and the function called with the items of the list that the input is. Or the tests are code, as in
HumanEval: {"check", "entry_point", "before"}, where `check` defines `check(candidate)`, which raises for a
function that is wrong, and `before` (imports, helpers, the head of the function) stands before the code.

The code runs in a sandbox of its own, apart from the one that the attempt used. What is expected never goes
into it: outputs are compared outside, as text that may say anything. Tests that are code run beside the code
that they test, which can see them; they are for evaluation.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.errors import RecordError
from silva.protocols import Attempt, Score
from silva.rewards.fences import find_code
from silva.rewards.settings import RewardSettings
from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, chosen
from silva.tools.function import cut

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_PRECISION, _NOISE = Decimal("1e-6"), Decimal("1e-9")


class CodeTests(RewardSettings, SandboxSettings):
    """1 for code that passes all hidden tests, else 0."""

    type: Literal["code_tests"] = "code_tests"
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Times the share of tests passed, for code that does not pass all."""
    max_tests: Positive = 32
    """Tests that are run, evenly spread over all of them."""

    @model_validator(mode="after")
    def _no_state(self) -> CodeTests:
        if self.keep_state:
            raise ValueError("keep_state: each test runs the code from its start. Leave it out")
        return self

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def build(self) -> CodeTestsReward:
        return CodeTestsReward(self, chosen(self))


class Case(NamedTuple):
    """`function` is empty for a program that reads `given` and prints. `wrapped`: each output of the task is
    a list of one item, in which APPS and TACO often put what the function returns. `check` is code that
    defines a function of this name, which is called with the tested one; `before` is run before the code."""

    given: Any
    expected: Any
    function: str = ""
    wrapped: bool = False
    check: str = ""
    before: str = ""


class CodeTestsReward:
    def __init__(self, settings: CodeTests, walls: Walls) -> None:
        self.settings, self.walls = settings, walls

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`."""
        read_cases(answer)

    async def score(self, attempt: Attempt) -> Score:
        cases = read_cases(attempt.answer)
        if len(cases) > self.settings.max_tests:
            last = self.settings.max_tests - 1 or 1
            cases = [cases[i * (len(cases) - 1) // last] for i in range(self.settings.max_tests)]
        code = find_code(attempt.reply, cases[0].function)
        if code is None:
            return Score(0.0, False, {"tests_passed": 0.0, "code_found": 0.0})
        sandbox, passed = Sandbox(self.settings, self.walls), 0
        try:
            for case in cases:
                fine = await self._passes(sandbox, code, case)
                passed += fine
                if not fine and not self.settings.partial:
                    break
        finally:
            await sandbox.close()
        share, solved = passed / len(cases), passed == len(cases)
        value = 1.0 if solved else self.settings.partial * share
        return Score(value, solved, {"tests_passed": share, "code_found": 1.0})

    async def _passes(self, sandbox: Sandbox, code: str, case: Case) -> bool:
        expected = case.expected if isinstance(case.expected, str) else json.dumps(case.expected)
        limit = max(self.settings.output_chars, 2 * len(expected))
        mark = secrets.token_hex(8)
        source, stdin = code, case.given
        if case.check:
            parts = [case.before, code, case.check]
            source, stdin = _CHECKING.format(parts=parts, function=case.function, mark=mark), ""
        elif case.function:
            given = json.dumps(case.given)
            source = _CALLING.format(code=code, function=case.function, given=given, mark=mark, names=_NAMES)
            stdin = ""
        result = await sandbox.run(source, stdin, program=True, output_chars=limit)
        if result.how != "ok" or result.cut:
            return False
        if case.check:
            return result.output.endswith(mark)
        if not case.function:
            return same_output(result.output, expected)
        try:
            returned = json.loads(result.output.rpartition(mark)[2])
        except (ValueError, RecursionError):
            return False
        wanted = [case.expected, *(case.expected if case.wrapped else [])]
        return any(same_value(returned, each) for each in wanted)


def read_cases(answer: Any) -> list[Case]:
    """The tests of a task.

    Raises:
        RecordError: there are none, or they have another form: the task cannot be graded.
    """
    try:
        tests = json.loads(answer) if isinstance(answer, str) else answer
        if isinstance(tests, Mapping) and "check" in tests:
            return [_checked(tests)]
        if isinstance(tests, Mapping):
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            tests = [{"input": i, "output": o, "fn_name": tests.get("fn_name")} for i, o in pairs]
        outputs = [test["output"] for test in tests]
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        cases = [_case(test, wrapped) for test in tests]
    except (AttributeError, KeyError, TypeError, ValueError):
        cases = []
    if not cases:
        raise RecordError(
            f"answer of the task: got {cut(str(answer), 100)}, expected tests: a list of "
            '{"input", "output"} that is not empty, or {"inputs", "outputs"} of equal length; text or lists '
            'of lines for a program, and for a function "fn_name" and lists of arguments; or {"check", '
            '"entry_point"} with code that defines check(candidate)'
        )
    return cases


def _case(test: Mapping[str, Any], wrapped: bool) -> Case:
    """Raises KeyError or TypeError for a test of another form."""
    function, given = test.get("fn_name") or "", test["input"]
    if not function:
        return Case(_lines(given), _lines(test["output"]), wrapped=wrapped)
    if not (isinstance(function, str) and function.isidentifier() and isinstance(given, list)):
        raise TypeError
    return Case(given, test["output"], function, wrapped)


def _checked(tests: Mapping[str, Any]) -> Case:
    """Raises KeyError or TypeError for tests of another form."""
    check, function, before = tests["check"], tests["entry_point"], tests.get("before", "")
    if not all(isinstance(each, str) for each in (check, function, before)) or not function.isidentifier():
        raise TypeError
    if "def check(" not in check:
        raise TypeError
    return Case("", "", function, check=check, before=before)


def _lines(text: Any) -> str:
    """Of a program's input or output: text, or a list of lines."""
    if not isinstance(text, str | list):
        raise TypeError
    return text if isinstance(text, str) else "\n".join(text)


def same_output(output: str, expected: str) -> bool:
    """The same words, line by line. Space at the ends of lines and of the text does not matter, nor do the
    last digits of decimal numbers."""
    lines, right = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    return [len(line) for line in lines] == [len(line) for line in right] and all(
        _same_word(word, wanted)
        for pair in zip(lines, right, strict=True)
        for word, wanted in zip(*pair, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    """Equal, or numbers of which one has a point or an exponent. A decimal number may be off by a millionth
    of itself, or by what rounding to its digits took away; an integer by the noise of floats alone."""
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)) or not math.isfinite(float(word)):
        return False
    integer = _INTEGER.fullmatch(expected)
    if integer and _INTEGER.fullmatch(word):
        return False  # to the last digit, and leading zeros count
    try:
        found, wanted = Decimal(word), Decimal(expected)
        rounding = min(_PRECISION, Decimal((0, (5,), int(wanted.as_tuple().exponent) - 1)))
        within = _NOISE if integer else max(abs(wanted) * _PRECISION, rounding)
        return abs(found - wanted) <= within
    except ArithmeticError:  # an exponent of twenty digits
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Equal as JSON: a tuple is a list, 1.0 is 1, true is not 1.

    Floats may differ in their last digits, integers may not: off by one in ten digits is a wrong answer.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        if returned == expected or (isinstance(returned, int) and isinstance(expected, int)):
            return returned == expected
        try:
            return math.isclose(returned, expected, rel_tol=1e-9)
        except OverflowError:  # an integer that no float can hold
            return False
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            same_value(returned[k], expected[k]) for k in returned
        )
    return type(returned) is type(expected) and bool(returned == expected)


# Calls the function of the code, or the method of its class Solution. Only that is tested: what the code does
# after its definitions may fail, such as reading input.
_CALLING = """\
import json, sys
dumps = json.JSONEncoder(default=lambda value: value.tolist()).encode
solution = type(sys)("solution")
sys.modules["solution"] = solution
exec({names!r}, solution.__dict__)
try:
    exec(compile({code!r}, "solution.py", "exec"), solution.__dict__)
except (Exception, SystemExit):
    if not {{{function!r}, "Solution"}} & set(solution.__dict__):
        raise
function = getattr(solution, {function!r}, None) or getattr(solution.Solution(), {function!r})
returned = dumps(function(*json.loads({given!r})))
sys.stdout.flush()
sys.stdout.write({mark!r} + returned)
"""
# One program, as in HumanEval: tests use helpers that stand before the function.
_CHECKING = """\
import sys
program = {{"__name__": "solution"}}
for part in {parts!r}:
    exec(compile(part, "solution.py", "exec"), program)
program["check"](program[{function!r}])
sys.stdout.flush()
sys.stdout.write({mark!r})
"""
# The imports that APPS' own tests put before each solution, which its solutions rely on.
_NAMES = """\
import bisect, collections, functools, heapq, itertools, math, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""

"""Code against hidden tests: 1 if it passes all of them, else 0, or a share below 1.

The tests are the task's answer: a list of {"input", "output"}, or {"inputs", "outputs"} with, for functions,
"fn_name" (the form of APPS and TACO), as JSON or as text of it. With "input" as text the program reads it and
prints; with a list the function is called with its items.

The code runs in a sandbox of its own, apart from the one that the attempt used. What is expected never goes
into it: outputs are compared outside, as text that may say anything.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from silva.config.sections import Positive
from silva.errors import RecordError
from silva.protocols import Attempt, Score
from silva.rewards.settings import RewardSettings
from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import Walls, chosen
from silva.tools.function import cut

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class CodeTests(RewardSettings, SandboxSettings):
    """1 for code that passes all hidden tests, else 0."""

    type: Literal["code_tests"] = "code_tests"
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Times the share of tests passed, for code that does not pass all."""
    max_tests: Positive = 32
    """Tests that are run, evenly spread over all of them."""

    def build(self) -> CodeTestsReward:
        return CodeTestsReward(self, chosen(self))


class Case(NamedTuple):
    """`function` is empty for a program that reads `given` and prints."""

    given: Any
    expected: Any
    function: str = ""


class CodeTestsReward:
    def __init__(self, settings: CodeTests, walls: Walls) -> None:
        self.settings, self.walls = settings, walls

    async def score(self, attempt: Attempt) -> Score:
        cases = read_cases(attempt.answer)
        if len(cases) > self.settings.max_tests:
            last = self.settings.max_tests - 1 or 1
            cases = [cases[i * (len(cases) - 1) // last] for i in range(self.settings.max_tests)]
        code = find_code(attempt.reply)
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
        if not case.function:
            result = await sandbox.run(code, case.given)
            return result.how == "ok" and not result.cut and same_output(result.output, case.expected)
        mark = secrets.token_hex(8)
        result = await sandbox.run(_calling(code, case, mark))
        if result.how != "ok" or result.cut:
            return False
        try:
            returned = json.loads(result.output.rpartition(mark)[2])
        except (ValueError, RecursionError):
            return False
        return same_value(returned, case.expected)


def find_code(reply: str) -> str | None:
    """The last block of code in a reply, or the whole reply if it is Python; None if there is no code."""
    blocks = _BLOCK.findall(reply)
    if blocks:
        return blocks[-1]
    if not reply.strip() or "```" in reply:
        return None
    try:
        ast.parse(reply)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return reply


def read_cases(answer: Any) -> list[Case]:
    """The tests of a task.

    Raises:
        RecordError: there are none, or they have another form: the task cannot be graded.
    """
    given = answer
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise _wrong(answer) from None
    name = ""
    if isinstance(given, Mapping) and "inputs" in given and "outputs" in given:
        name = given.get("fn_name") or ""
        inputs, outputs = given["inputs"], given["outputs"]
        if (
            not isinstance(inputs, Sequence)
            or not isinstance(outputs, Sequence)
            or len(inputs) != len(outputs)
        ):
            raise _wrong(answer)
        given = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise _wrong(answer)
    cases = []
    for entry in given:
        if not isinstance(entry, Mapping) or not {"input", "output"} <= set(entry):
            raise _wrong(answer)
        function = entry.get("fn_name") or name
        if not function and not (isinstance(entry["input"], str) and isinstance(entry["output"], str)):
            raise _wrong(answer)
        if function and not (isinstance(function, str) and function.isidentifier()):
            raise _wrong(answer)
        if function and not isinstance(entry["input"], list):
            raise _wrong(answer)
        cases.append(Case(entry["input"], entry["output"], function))
    return cases


def same_output(output: str, expected: str) -> bool:
    """The same words, line by line; space at the ends of lines and of the text does not matter."""
    lines = [line.split() for line in output.strip().splitlines()]
    return lines == [line.split() for line in expected.strip().splitlines()]


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


def _calling(code: str, case: Case, mark: str) -> str:
    """The code, and a call of its function (or of the method of its class Solution) at the end."""
    arguments = json.dumps(json.dumps(case.given))
    return (
        f"{code}\n\nimport json as _json, sys as _sys\n"
        f"_f = {case.function} if '{case.function}' in globals() else Solution().{case.function}\n"
        f"_v = _json.dumps(_f(*_json.loads({arguments})))\n"
        f"_sys.stdout.flush()\nprint('\\n{mark}' + _v)\n"
    )


def _wrong(answer: Any) -> RecordError:
    return RecordError(
        f"answer of the task: got {cut(str(answer), 100)}, expected tests: a list of "
        '{"input", "output"} that is not empty, or {"inputs", "outputs"} of equal length, with "fn_name" and '
        "lists of arguments for a function"
    )

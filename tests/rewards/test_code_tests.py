"""Code against hidden tests, honest and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from silva.errors import RecordError
from silva.protocols import Attempt, Score
from silva.rewards.code_tests import CodeTests, find_code, read_cases, same_output, same_value
from silva.sandbox.walls import _chosen
from silva.types import Message

AUTO = _chosen("auto")
needs_walls = pytest.mark.skipif(isinstance(AUTO, str), reason=str(AUTO))
DOUBLE = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(1, 5)]
ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


def score(code: str, tests: Any, **settings: Any) -> Score:
    reply = Message("assistant", f"Here it is:\n```python\n{code}\n```\nDone.")
    reward = CodeTests(**({"seconds": 2.0} | settings)).build()
    return asyncio.run(reward.score(Attempt((Message("user", "?"), reply), tests)))


@needs_walls
@pytest.mark.parametrize("tests", [DOUBLE, json.dumps(DOUBLE)], ids=["list", "text"])
def test_a_program_that_passes_all_tests_solves(tests: Any) -> None:
    assert score("print(2 * int(input()))", tests) == Score(
        1.0, True, {"tests_passed": 1.0, "code_found": 1.0}
    )


@needs_walls
def test_functions_and_methods_are_called() -> None:
    assert score("def add(a, b):\n    print('noise')\n    return a + b", ADD).solved
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", ADD).solved
    assert not score("def add(a, b):\n    return a - b", ADD).solved


@needs_walls
def test_one_failed_test_is_no_solution_and_credit_stays_below_one() -> None:
    code = "n = int(input())\nprint(2 * n if n < 4 else 0)"
    assert score(code, DOUBLE).value == 0.0
    partial = score(code, DOUBLE, partial=0.9)
    assert partial.value == pytest.approx(0.9 * 3 / 4) and not partial.solved


@needs_walls
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "class E(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return E(0)",
        "class D(dict):\n    pass\nimport json\njson.dumps = lambda v: '3'\ndef add(a, b): return 1",
        "import builtins\nbuiltins.print = lambda *a: None\ndef add(a, b): return 0",
        "def add(a, b):\n    while True: pass",
        "def add(a, b):\n    print('x' * 10**6)\n    return a + b",
        "def add(a, b): return '3'",
        "def add(a, b): return [a + b]",
        "raise SystemExit",
        "",
        "add = None",
        "print(3); print(7)",
    ],
)
def test_what_does_not_compute_the_answer_earns_nothing(code: str) -> None:
    found = score(code, ADD, seconds=0.5)
    assert found.value == 0.0 and not found.solved


@needs_walls
def test_the_expected_output_is_nowhere_inside() -> None:
    code = (
        "import gc, sys, glob\nfound = [o for o in gc.get_objects() if '424242' in repr(o)[:10000]]\n"
        "texts = [open(p).read() for p in glob.glob('/tmp/*')]\nprint(424242 if found or texts else 0)"
    )
    assert not score(code, [{"input": "", "output": "4242" + "42"}]).solved


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nor\n```py\nb\n```", "b\n"),
        ("x = 1\nprint(x)", "x = 1\nprint(x)"),
        ("I cannot do that.", None),
        ("```python\nunclosed", None),
        ("", None),
    ],
)
def test_the_last_block_is_the_code(reply: str, code: str | None) -> None:
    assert find_code(reply) == code


@pytest.mark.parametrize(
    "answer",
    [None, "", "{}", [], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": 2}],
     {"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, {"fn_name": "f", "inputs": ["1"], "outputs": [1]},
     5],
)  # fmt: skip
def test_tests_of_another_form_are_an_error(answer: Any) -> None:
    with pytest.raises(RecordError, match="expected tests"):
        read_cases(answer)


def test_outputs_are_compared_by_words_and_values_as_json() -> None:
    assert same_output("1 2 \n3\n\n", "1  2\n3") and not same_output("1\n2", "1 2")
    assert (
        same_value([1, [2.0]], [1.0, [2]]) and same_value(0.1 + 0.2, 0.3) and same_value({"a": 1}, {"a": 1})
    )
    assert not same_value(True, 1) and not same_value("1", 1) and not same_value([1], [1, 2])
    assert not same_value(1e-12, 0.0) and not same_value(None, 0)


def test_integers_are_compared_to_their_last_digit():
    """Many tasks ask for a number modulo 1,000,000,007."""
    assert same_value(10**18, 10**18) and same_value(1e9, 10**9)
    assert not same_value(1_000_000_008, 1_000_000_007) and not same_value(10**18 + 1, 10**18)


def test_a_number_too_large_for_a_float_is_a_wrong_answer_and_no_error():
    assert not same_value(10**400, 1.0) and not same_value(1.5, 10**400)

"""Code against hidden tests, honest and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.rewards.attempts import grade
from tests.rewards.programs import DOUBLE, RIGHT, WRONG, Code

from silva.errors import RecordError
from silva.protocols import Attempt, Score
from silva.rewards import code_tests
from silva.rewards.code_tests import CodeTests, same_output, same_value
from silva.sandbox.process import Result, Sandbox, SandboxFault
from silva.sandbox.walls import _chosen
from silva.types import Message

AUTO = _chosen("auto")
needs_walls = pytest.mark.skipif(isinstance(AUTO, str), reason=str(AUTO))


def attempt(code: str, tests: Any) -> Attempt:
    reply = Message("assistant", f"Here it is:\n```python\n{code}\n```\nDone.")
    return Attempt((Message("user", "?"), reply), tests)


def score(code: str, tests: Any, **settings: Any) -> Score:
    reward = CodeTests(**({"seconds": 20.0} | settings)).build()
    return asyncio.run(reward.score(attempt(code, tests)))


class Shared(Sandbox):
    """Serves one attempt after the other: a start of its own for each would be most of the tests' time."""

    async def close(self) -> None:
        pass


def scores(codes: Mapping[str, Code], **settings: Any) -> dict[str, Score]:
    reward = CodeTests(**settings).build()

    async def go() -> dict[str, Score]:
        shared = Shared(reward.settings, reward.walls)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(code_tests, "Sandbox", lambda *given: shared)
            found = {name: await reward.score(attempt(*code)) for name, code in codes.items()}
        await Sandbox.close(shared)
        return found

    return asyncio.run(go())


@pytest.fixture(scope="module")
def right() -> dict[str, Score]:
    return scores(RIGHT, seconds=30.0)


@pytest.fixture(scope="module")
def wrong() -> dict[str, Score]:
    return scores(WRONG, seconds=0.6)


@pytest.mark.slow
@needs_walls
@pytest.mark.parametrize("name", RIGHT)
def test_what_python_would_print_solves(name: str, right: dict[str, Score]) -> None:
    assert right[name] == Score(1.0, True, {"tests_passed": 1.0, "code_found": 1.0})


@needs_walls
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_compute_the_answer_earns_nothing(name: str, wrong: dict[str, Score]) -> None:
    assert wrong[name].value == 0.0 and not wrong[name].solved


@needs_walls
def test_tests_may_be_text() -> None:
    assert score("print(2 * int(input()))", json.dumps(DOUBLE)).solved


@needs_walls
def test_one_failed_test_is_no_solution_and_credit_stays_below_one() -> None:
    code = "n = int(input())\nprint(2 * n if n < 4 else 0)"
    assert score(code, DOUBLE).value == 0.0
    partial = score(code, DOUBLE, partial=0.9)
    assert partial.value == pytest.approx(0.9 / 2) and not partial.solved


@needs_walls
def test_the_expected_output_is_nowhere_inside() -> None:
    code = (
        "import gc, glob\nthree = 3\n"  # neither this text nor its names hold what it looks for
        "found = [o for o in gc.get_objects() if '42' * three in repr(o)[:10000]]\n"
        "texts = [open(p).read() for p in glob.glob('/tmp/*')]\nprint('42' * three if found or texts else 0)"
    )
    assert not score(code, [{"input": "", "output": "4242" + "42"}]).solved


@needs_walls
def test_input_that_the_sandbox_has_no_room_for_is_no_wrong_answer() -> None:
    with pytest.raises(SandboxFault, match="expected at most 1 MiB; raise file_mb"):
        score("print(len(input()))", [{"input": "x" * (1 << 21), "output": "1"}], file_mb=1)


class Answering:
    """A sandbox in which every program ends well with this result."""

    def __init__(self, result: Result) -> None:
        self.result = result

    async def run(self, *given: Any, **more: Any) -> Result:
        return self.result

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("result", "solved"),
    [
        (Result("ok", "6"), True),
        (Result("ok", "6", cut=True), False),  # what stood behind it could be anything
        (Result("ok", "[" * 100_000), False),  # deeper than json reads
    ],
)
@pytest.mark.parametrize("name", ["", "double"])
def test_of_output_all_is_read_or_nothing(
    monkeypatch: pytest.MonkeyPatch, result: Result, solved: bool, name: str
) -> None:
    monkeypatch.setattr(code_tests, "Sandbox", lambda *given: Answering(result))
    test = {"input": [3], "output": 6, "fn_name": name} if name else {"input": "3", "output": "6"}
    assert score("double = lambda n: 2 * n", [test], sandbox="none").solved is solved


def test_outputs_are_compared_by_words_and_values_as_json() -> None:
    assert same_output("1 2 \n3\n\n", "1  2\n3") and not same_output("1\n2", "1 2")
    assert (
        same_value([1, [2.0]], [1.0, [2]]) and same_value(0.1 + 0.2, 0.3) and same_value({"a": 1}, {"a": 1})
    )
    assert not same_value(True, 1) and not same_value("1", 1) and not same_value([1], [1, 2])
    assert not same_value(1e-12, 0.0) and not same_value(None, 0)
    assert not same_output("1", "1e99999999999999999999") and not same_output("1\n1", "1")


def test_integers_are_compared_to_their_last_digit():
    """Many tasks ask for a number modulo 1,000,000,007."""
    assert same_value(10**18, 10**18) and same_value(1e9, 10**9)
    assert not same_value(1_000_000_008, 1_000_000_007) and not same_value(10**18 + 1, 10**18)


def test_a_number_too_large_for_a_float_is_a_wrong_answer_and_no_error():
    assert not same_value(10**400, 1.0) and not same_value(1.5, 10**400)


CHECK = {"check": "def check(candidate):\n    assert candidate(2) == helper(2)\n", "entry_point": "double",
         "before": "def helper(x):\n    return x + x\ndef double(x):\n    '''Twice x.'''\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "solved"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", True),
        ("```python\ndef double(x):\n    return helper(x)\n```", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```python\ndef other(x):\n    return 2 * x\n```", False),  # the head alone returns None
        ("```python\ndef double(x):\n    raise SystemExit(0)\n```", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("no code at all", False),
    ],
)
def test_tests_may_be_code_that_is_called_with_the_function(reply: str, solved: bool) -> None:
    score = grade(CodeTests().build(), reply, CHECK)
    assert (score.value, score.solved) == (float(solved), solved)


@pytest.mark.parametrize("change", [{"check": "assert True"}, {"entry_point": "a b"}, {"before": 3}])
def test_code_that_defines_no_check_is_refused(change: dict) -> None:
    with pytest.raises(RecordError, match=r"(?s)got .*, expected tests"):
        grade(CodeTests().build(), "x = 1", {**CHECK, **change})

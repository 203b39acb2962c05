r"""Mathematical answers, compared by value: 1 for the right one, else 0.

    1/2 = 0.5 = \frac12 = \dfrac{1}{2}      x = 5 is 5      \{2, 1\} = \{1, 2\}      2x + 2 = 2(x + 1)

maths_form.py reads what an answer says: its dress (maths_text.py), the words around a number
(maths_words.py), and whether it is one value, a list, a point or an interval. Same texts and plain numbers
are compared here, exactly. The expressions in it are compared by math-verify (sympy) in processes of its own,
which are killed if an answer takes too long: what a model writes must not hold up the run, and `9^{9^{9^9}}`
is short. Such an answer is not solved, because it is the model's doing; a comparison that fails for another
reason is no result.

What has the right value must also be an answer: neither "41 or 42" nor the question's own "17 + 25" is 42.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from silva.config.sections import Above0, Positive
from silva.errors import ConfigError, RewardError
from silva.protocols import Attempt, Reward, Score
from silva.rewards.answers import Extract, GradesByAnswer, boxed, find_answer, references
from silva.rewards.maths_form import (
    AnswerForm,
    Tree,
    is_broken,
    is_decimal,
    multiplied,
    number,
    read,
    scaled,
    worked_out,
)
from silva.rewards.settings import RewardSettings

WORKER = Path(__file__).with_name("maths_worker.py")
MAX_CHARS = 1_000  # of an answer that is compared by value
Unit = tuple[tuple[str, int], ...]
DEGREES, RADIANS = (("angle", 1),), (("radian", 1),)
WAIT = 60.0  # seconds of real time beyond those of CPU time, after which the machine is at fault


class Math(RewardSettings):
    """Mathematical answers, compared by value."""

    type: Literal["math"] = "math"
    extract: Extract = "auto"
    """Where the final answer stands: a tag, a box, the last line, the whole reply."""
    worked_out: bool = True
    """An answer is one expression and worked out: neither "41 or 42" nor "17 + 25" is 42."""
    seconds: Above0 = 5.0
    """CPU time for one answer; one that needs more is not solved."""
    workers: Positive = 2
    """Processes that compare."""

    def build(self) -> Reward:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward math needs math-verify: pip install 'silva[math]'")
        return MathReward(self)


class MathReward(GradesByAnswer):
    def __init__(self, settings: Math) -> None:
        self.settings = settings
        self._pool = ThreadPoolExecutor(settings.workers, "silva-math")
        self._own = threading.local()  # each thread has a process

    async def score(self, attempt: Attempt) -> Score:
        expected, answer = references(attempt.answer), find_answer(attempt.reply, self.settings.extract)
        if answer is None:
            return _score(False, answered=False)
        if any(answer == each.strip() for each in expected):
            return _score(True)
        if len(answer) > MAX_CHARS or ("\n" in answer and "\\begin" not in answer):
            return _score(False)
        given, right = read(answer), [read(boxed(each) or each) for each in expected]
        if any(given.text in (each.text, each.digits) for each in right):
            return _score(True)
        if given.decimal and all(map(is_broken, right)):
            given = replace(given, tree=given.decimal)
        trees = [tree for each in right for tree in self._comparable(given, each)]
        if given.tree is None or not trees:
            return _score(False, answered=given.tree is not None)
        if given.tree in trees:
            return _score(True)
        if all(isinstance(each, str) and is_decimal(each) for each in (given.tree, *trees)):
            return _score(any(number(str(each)) == number(str(given.tree)) for each in trees))
        loop = asyncio.get_running_loop()
        solved = await loop.run_in_executor(self._pool, self._ask, given.tree, trees)
        return _score(bool(solved), too_hard=solved is None)

    def _comparable(self, given: AnswerForm, right: AnswerForm) -> list[Tree]:
        if given.tree is None or right.tree is None:
            return []
        percent = right.quantity.percent
        return [
            each
            for each in in_unit_of(given, right)
            if not self.settings.worked_out or worked_out(given.tree, each, percent)
        ]

    def _ask(self, answer: Tree, expected: Sequence[Tree]) -> bool | None:
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self.settings.seconds)
        worker: Worker = self._own.worker
        return worker.ask(answer, expected)


class Worker:
    """A process that compares, started when it is needed. Used by one thread at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, answer: Tree, expected: Sequence[Tree]) -> bool | None:
        """Whether the answer is one of those expected; None if that takes too long.

        Raises:
            RewardError: the process ended or hung for another reason.
        """
        process = self._process or self._start()
        question = json.dumps({"answer": answer, "references": list(expected)})
        assert process.stdin is not None
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            line = _line(process, self.seconds + WAIT)
        except BrokenPipeError:
            line = None
        if line:
            return bool(json.loads(line))
        if self._end() == -signal.SIGPROF:
            return None
        raise RewardError(f"reward math: no comparison of {str(answer)[:100]!r}: {_why(process)}")

    def _start(self) -> subprocess.Popen[bytes]:
        """A process without the run's secrets, in which sympy's sets have the same order every time."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(self.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONHASHSEED": "0"},
        )
        if _line(process, WAIT) != b"\n":
            self._end()
            raise RewardError(f"reward math: {WORKER.name} does not start: {_why(process)}")
        return process

    def _end(self) -> int:
        """Its exit status; it is killed if it still runs."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a question that it did not read
                pipe.close()
        return status


def in_unit_of(given: AnswerForm, right: AnswerForm) -> list[Tree]:
    """What an answer in this unit must be; nothing if the units are of different kinds.

    An answer need not repeat the unit of the reference. 28% is 28 where the reference has no unit, and 0.28.
    """
    assert right.tree is not None
    theirs, ours = right.quantity, given.quantity
    if (turned := _turned(given, right)) is not None:
        return [turned]
    if theirs.unit and ours.unit:
        if theirs.unit != ours.unit:
            return []
        return [scaled(right.tree, theirs.factor / ours.factor)]
    if theirs.percent == ours.percent:
        return [right.tree]
    if theirs.unit or ours.unit:
        return []
    value = number(right.tree) if isinstance(right.tree, str) else None
    is_share = value is not None and abs(value) <= 1  # 0.28 is 28% and not 0.28%, nor is 0.5% 0.5
    converted = scaled(right.tree, Fraction(1, 100) if theirs.percent else Fraction(100))
    return [converted] if is_share else [converted, right.tree]


def _turned(given: AnswerForm, right: AnswerForm) -> Tree | None:
    """What an answer in radians must be if the reference is in degrees, and the other way round."""
    factors: dict[tuple[Unit, Unit], str] = {
        (DEGREES, RADIANS): "\\frac{180}{\\pi}",
        (RADIANS, DEGREES): "\\frac{\\pi}{180}",
    }
    units = [  # without a unit, pi says radians
        each.quantity.unit or (RADIANS if "\\pi" in str(each.tree) else ()) for each in (given, right)
    ]
    factor = factors.get((units[0], units[1]))
    return multiplied(right.tree, factor) if factor and right.tree else None


def _score(solved: bool, *, answered: bool = True, too_hard: bool = False) -> Score:
    return Score(float(solved), solved, {"answered": float(answered), "too_hard": float(too_hard)})


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line; b"" if the process ended, None if it is late."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if poll.poll(seconds * 1000) else None


def _why(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status == -signal.SIGKILL:
        return "its process was killed, or answered too late"
    return f"its process ended with status {status}"

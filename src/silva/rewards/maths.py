r"""Mathematical answers, compared by value: 1 for the right one, else 0.

    1/2 = 0.5 = \frac12 = \dfrac{1}{2}      x = 5 is 5      \{2, 1\} = \{1, 2\}      2x + 2 = 2(x + 1)

Where answer and reference are the same text, or both plain numbers, that decides, exactly. Everything else is
compared by math-verify (sympy) in processes of its own, which are killed if an answer takes too long: what a
model writes must not hold up the run, and `9^{9^{9^9}}` is short. Such an answer is not solved, because it is
the model's doing; a comparison that fails for another reason is no result.

What has the right value must also be an answer: "41 or 42" and, for 42, the question's own "17 + 25" are none
(maths_form.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from silva.config.sections import Above0, Positive
from silva.errors import ConfigError, RewardError
from silva.protocols import Attempt, Reward, Score
from silva.rewards import text
from silva.rewards.answers import Extract, find_answer, references
from silva.rewards.maths_form import commits
from silva.rewards.settings import RewardSettings

WORKER = Path(__file__).with_name("maths_worker.py")
MAX_CHARS = 1_000  # of an answer that is compared by value
WAIT = 60.0  # seconds of real time beyond those of CPU time, after which the machine is at fault
_ASSIGNED = re.compile(r"^[a-zA-Z]\s*=\s*")
_HEDGE = re.compile(r"\b(?:not|never|cannot|neither|nor|or|either|except|unless)\b|n['’]t\b")
_DRESS = re.compile(r"\$\$?((?:[^$]|\\\$)+)\$\$?|\\(?:text|textbf|mathrm|mbox)\{([^{}]+)\}")


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


class MathReward:
    def __init__(self, settings: Math) -> None:
        self.settings = settings
        self._pool = ThreadPoolExecutor(settings.workers, "silva-math")
        self._own = threading.local()  # each thread has a process

    async def score(self, attempt: Attempt) -> Score:
        expected, answer = references(attempt), find_answer(attempt.reply, self.settings.extract)
        if answer is None:
            return _score(False, answered=False)
        if (solved := compare(answer, expected)) is not None:
            return _score(solved)
        if self.settings.worked_out:
            expected = [each for each in expected if commits(answer, each)]
        if not expected:
            return _score(False)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._ask, answer, expected)
        if found is None:
            return _score(False, too_hard=True)
        return _score(found["same"], answered=found["parsed"])

    def _ask(self, answer: str, expected: Sequence[str]) -> dict[str, bool] | None:
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self.settings.seconds)
        worker: Worker = self._own.worker
        return worker.ask(answer, expected)


class Worker:
    """A process that compares, started when it is needed. Used by one thread at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, answer: str, expected: Sequence[str]) -> dict[str, bool] | None:
        """What math-verify says; None if it takes too long.

        Raises:
            RewardError: the process ended or hung for another reason.
        """
        process = self._process or self._start()
        question = json.dumps({"answer": answer, "references": list(expected)})
        try:
            _write(process, question)
            line = _line(process, self.seconds + WAIT)
        except BrokenPipeError:
            line = None
        if line:
            found: dict[str, bool] = json.loads(line)
            return found
        if self._end() == -signal.SIGPROF:
            return None
        raise RewardError(f"reward math: no comparison of {answer[:100]!r}: {_why(process)}")

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


def compare(answer: str, expected: Sequence[str]) -> bool | None:
    """What can be said without reading an expression; None for nothing.

    "41 or 42", "not 42" and several lines are no answers, unless a reference has such words.
    """
    given, right = undressed(answer), [undressed(each) for each in expected]
    if any(text.exact_match(given, each) for each in right):
        return True
    numbers = [text.as_number(each) for each in right]
    value = text.as_number(_ASSIGNED.sub("", given))  # x = 5 for 5, but not for y = 5
    if value is not None and value in numbers:
        return True
    plain = value is not None and None not in numbers
    hedges = _hedges(answer) - set().union(*map(_hedges, expected))
    lines = "\n" in answer.strip() and "\\begin" not in answer
    return False if plain or hedges or lines or len(answer) > MAX_CHARS else None


def _hedges(answer: str) -> set[str]:
    return set(_HEDGE.findall(answer.lower()))


def undressed(answer: str) -> str:
    r"""Without the $...$ or \text{...} around all of it, and a number without \$ and the like."""
    answer = answer.strip().removesuffix(".")
    found = _DRESS.fullmatch(answer)
    answer = next(filter(None, found.groups())).strip() if found else answer
    return answer.removeprefix("\\$").replace(",\\!", ",").replace("{,}", ",")


def _score(solved: bool, *, answered: bool = True, too_hard: bool = False) -> Score:
    return Score(float(solved), solved, {"answered": float(answered), "too_hard": float(too_hard)})


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


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

"""Mathematical answers: what has the same value, and what an answer can do to the process that reads it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.real_rows import DATA
from tests.rewards.attempts import attempt, grade

from silva.errors import ConfigError, RecordError, RewardError
from silva.protocols import Score
from silva.rewards import maths
from silva.rewards.maths import Math, Worker

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'silva[math]'")

REWARD = Math(workers=1).build()
HURRIED = Math(workers=1, seconds=0.5).build()
RIGHT = Score(1.0, True, {"answered": 1.0, "too_hard": 0.0})
WRONG = Score(0.0, False, {"answered": 1.0, "too_hard": 0.0})


# (reference, answer, same): pairs that math-verify's own tests state (tests/test_all.py, Apache-2.0).
PAIRS = [
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("0.4", ".4", True),
    ("1000.99", "$1,000.99", True),
    ("1000.99", "the number is not 10 which is 1,000.99€", False),  # math-verify: True
    ("2", "AZYUK2A", False),
    ("-10/9", "-\\frac{10}{9}", True),
    ("$[0,1)$", "$[0,1)$", True),
    ("$[0,9)$", "$[0,1)$", False),
    ("$(0,9)$", "$[0,9)$", False),
    ("$1$", "$-[0,1)$", False),
    ("$9$", "Answer \\[ 9 \\]", True),
    ("$10$", "Answer \\( (9+1) \\)", False),  # math-verify: True
    ("$1/3$", "$\\frac13 $", True),
    ("$\\sqrt{3}$", "$\\sqrt3 $", True),
    ("$1/3$", "$\\left( \\frac{1}{3} \\right)$", True),
    ("$1/3$", "$\\frac{1}{3} \\text{meters}$", True),
    ("$1/3$", "$k = \\frac{1}{3}$", True),
    ("$28\\%$", "28 percent", True),
    ("$28\\%$", "$\\boxed{28}$ pct", True),
    ("$28\\%$", "28", True),
    ("$0.28$", "28", False),
    ("$\\frac{28}{100}$", "28", False),
    ("$\\frac{9}{4}\\pi$", "Therefore $\\boxed{\\frac94\\pi}$.", True),
    ("$x >= 5$", "Therefore $x \\geq 5$ is the solution.", True),
    ("$x > 5$", "Therefore $x < 5$ is the solution.", False),
    ("$x \\leq 5$", "$5 \\geq x$", True),
    ("$x < 1$", "$-x > -1$", True),
    ("$7 = 11a+c$", "$11a+c$", False),
    ("$11$", "$x=11$", True),
    ("$a^2 + b = 0$", "$0$", False),
    ("$k=1$", "$1$", True),
    ("$2x+4y-3=0$", "$y=-\\frac{1}{2}x+\\frac{3}{4}$", True),
    ("$x^2/4 + y^2/3 = 1$", "$x^2/16 + y^2/12 = 1/4$", True),
    ("$\\frac{1}{12}$", "$0.0833333333333333$", True),
    ("$(1,\\frac{9}{2})$", "$(1,4.5)$", True),
    ("$\\frac{x+2}{7}$", "$\\frac{x}{7}+\\frac{2}{7}$", True),
    ("$\\tan^2(y)+1$", "$\\sec^2(y)$", True),
    ("$(a+5)(b+2)$", "$(+5)(b+2)$", False),
    ("$2$", "$\\frac{1+\\sqrt{5}}{2}$", False),
    ("$1\\sqrt{19}$", "$1$", False),
    ("$34$", "Final Answer: The largest $n$ is 34.", True),
    ("$(3,1)$", "${1,3}$", False),
    ("\\(\\boxed{\\text{C}}\\).", "$\\boxed{\\text{(C)}}.$", True),
    ("$4$", "$4\\sqrt{2}$", False),
    ("$n=2, 3, 4$", "$n=1, 2, 3$", False),
    ("$D = (0, 1)$", "$D = (0, 1.5)$", False),
    ("$19, 46, and 82$", "$19, 46, \\text{ and } 82$", True),
    ("$19, 46, and 82$", "$21, 36, and 82$", False),
    ("$\\pm 2021$", "$2021$", False),
    ("$\\pm 2021$", "${-2021, 2021}$", True),
    ("$12:00$", "$1:00$", False),
]


@pytest.mark.parametrize(("reference", "answer", "same"), PAIRS)
def test_pairs_of_math_verify(reference: str, answer: str, same: bool) -> None:
    assert grade(REWARD, answer, reference).solved == same


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("So the answer is \\boxed{\\frac12}.", "0.5"),
        ("<answer>2(x+1)</answer>", "2x+2"),
        ("<answer>\\boxed{\\{1, 2\\}}</answer>", "\\{2, 1\\}"),
        ("#### 1,000", "1000"),
        ("That makes 18 dollars.", 18),
        ("x = 5", "5"),
        ("<answer>$5</answer>", "5"),
        ("<answer>\\$5</answer>", "5"),
        ("<answer>$5$</answer>", "5"),
        ("<answer>Evelyn</answer>", "\\text{Evelyn}"),
        ("\\boxed{\\text{Evelyn}}", "Evelyn"),
        ("0.333333", "\\frac{1}{3}"),
        ("3.1415926", "\\pi"),
        ("\\boxed{10^{-7}}", "0.0000001"),
        ("1 - \\frac{1}{\\mathrm{e}}", "1-1/e"),
        ("7", ["5", "7"]),
        ("x = 58,500", "58,500"),
        ("\\boxed{x = 10,\\!080}", "10,\\!080"),
        ("\\boxed{\\$18.90}", "18.9"),
        ("<answer>$\\$36$.</answer>", "\\$36"),
        ("x = 1 \\text{ or } x = 2", "x=1 \\text{ or } x=2"),
        ("\\boxed{\\begin{pmatrix} 0.5 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1/2 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_the_same_value_in_another_dress(reply: str, answer) -> None:
    assert grade(REWARD, reply, answer) == RIGHT


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("0", "0.0000001"),
        ("\\boxed{10^{-8}}", "0.0000001"),
        ("5.0000001", "5"),
        ("\\boxed{\\frac{\\sqrt3}{10^{20}}}", "\\frac{\\sqrt2}{10^{20}}"),
        ("0.33", "\\frac{1}{3}"),
        ("\\boxed{10^{20} + 1}", "10^{20}"),
        ("1 + \\frac{1}{\\mathrm{e}}", "1 - \\frac{1}{\\mathrm{e}}"),
        ("\\boxed{1, 2, 3, 4, 5}", "3"),
        ("$3$ or $4$", "3"),
        ("<answer>[1, 5]</answer>", "5"),
        ("<answer>(2, 1)</answer>", "(1, 2)"),
        ("<answer>x</answer>", "5"),
        ("<answer>-5</answer>", "5"),
        ("<answer>6 km</answer>", "5"),
        ("<answer>1/0</answer>", "5"),
        ("\\boxed{5 \\text{ or } 6}", "5"),
        ("5, 6", "5"),
        ("y = 5", "x = 5"),
        ("1, 234", "1234"),
        ("1234", "1, 234"),
        ("<answer>41 or 42</answer>", "42"),
        ("<answer>not 42</answer>", "42"),
        ("<answer>It isn't 42</answer>", "42"),
        ("<answer>\\frac{3}{5}\n\\left( 3, \\frac{\\pi}{2} \\right)</answer>", "\\frac{3}{5}"),
        ("<answer>\\left( 3, \\nonsense{2} \\rihgt)</answer>", "3"),
        ("<answer>3 \\left( 3 \\right) and all the rest</answer>", "3"),
        ("\\boxed{\\infty}", "5"),
    ],
)
def test_a_near_miss_never_passes(reply: str, answer: str) -> None:
    assert not grade(REWARD, reply, answer).solved
    assert grade(REWARD, reply, answer).value == 0.0


@pytest.mark.parametrize(
    "reply", ["", "   ", "<think>5</think>", "\\boxed{}", "\\boxed{5", "<answer></answer> 5"]
)
def test_no_answer_is_none(reply: str) -> None:
    assert grade(REWARD, reply, "5") == Score(0.0, False, {"answered": 0.0, "too_hard": 0.0})


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_not_solved_and_the_next_one_is_read() -> None:
    assert grade(HURRIED, "\\boxed{9^{9^{9^9}}}", "\\sqrt5") == Score(
        0, False, {"answered": 1, "too_hard": 1}
    )
    assert grade(HURRIED, "\\boxed{\\frac{10}{4}}", "2.5") == RIGHT


def test_an_answer_that_cannot_be_compared_is_not_solved() -> None:
    """sympy raises TypeError about NaN here."""
    assert not grade(REWARD, "\\boxed{\\infty}", "\\infty+1").solved
    assert not grade(HURRIED, "(" * 900, "5").solved
    assert not grade(REWARD, "\\boxed{" + "1+" * 2000 + "1}", "2001").solved  # too long to be compared


@pytest.mark.slow
def test_a_process_that_dies_gives_no_result_and_is_started_again() -> None:
    worker = Worker(5)
    assert worker.ask("\\frac12", ["0.5"]) is True
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    with pytest.raises(RewardError, match=r"no comparison of '\\\\frac12': its process was killed"):
        worker.ask("\\frac12", ["0.5"])
    assert worker.ask("\\frac12", ["0.5"]) is True


def test_a_process_that_does_not_start_is_an_error(monkeypatch, tmp_path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(maths, "WORKER", broken)
    with pytest.raises(RewardError, match=r"broken\.py does not start: its process ended with status 3"):
        Worker(5).ask("1", ["2"])


@pytest.mark.slow
def test_the_process_has_no_secrets_and_ends_with_its_owner(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    worker = Worker(5)
    worker.ask("1", ["2"])
    with open(f"/proc/{worker._process.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    code = (
        "from silva.rewards.maths import Worker\n"
        "worker = Worker(5); worker.ask('1', ['2']); print(worker._process.pid, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _wait_for_end(int(done.stdout))


def _wait_for_end(pid: int) -> None:
    """Returns once a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(20_000)
    os.close(descriptor)
    assert ended


def test_attempts_are_graded_at_the_same_time() -> None:
    async def all_of_them() -> list[Score]:
        reward = Math(workers=2).build()
        return await asyncio.gather(
            *(reward.score(attempt(f"\\boxed{{\\frac{{{n}}}{{2}}}}", str(n / 2))) for n in range(1, 20))
        )

    assert asyncio.run(all_of_them()) == [RIGHT] * 19


def test_what_is_missing_is_said(monkeypatch) -> None:
    with pytest.raises(RecordError, match="got None"):
        grade(REWARD, "5")
    monkeypatch.setattr(maths.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs math-verify: pip install 'silva\[math\]'"):
        Math().build()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
def test_answers_of_math_500_equal_themselves_and_no_others() -> None:
    """Each equals itself in four spellings, and differs from two others; a few differ in a unit alone."""
    lines = (DATA / "math500_test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    replies = [
        ("\\boxed{%s}", 0),
        ("<answer>$%s$</answer>", 0),
        ("The answer is $%s$.", 0),
        ("<answer>%s</answer>", 0),
    ]
    replies += [("\\boxed{%s}", 7), ("\\boxed{%s}", 50)]
    pairs = [
        (form % answers[(i + shift) % 500], answer, not shift)
        for i, answer in enumerate(answers)
        for form, shift in replies
        if not shift or answers[(i + shift) % 500] != answer
    ]

    async def graded() -> list[Score]:
        reward = Math(seconds=20).build()
        return await asyncio.gather(*(reward.score(attempt(reply, answer)) for reply, answer, _ in pairs))

    scores = zip(pairs, asyncio.run(graded()), strict=True)
    mistaken = [(reply, answer, same) for (reply, answer, same), score in scores if score.solved != same]
    assert not [each for each in mistaken if each[2]] and len(mistaken) <= 1


FORMS = ["{n}/{d}", "\\frac{{{n}}}{{{d}}}", "{n} \\div {d}"]
rational = st.fractions(-50, 50, max_denominator=30)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    value=rational, other=rational, form=st.sampled_from(["{n}/{d}", "\\frac{{{n}}}{{{d}}}", "{n} \\div {d}"])
)
def test_fractions_pass_exactly_if_they_are_equal(value: Fraction, other: Fraction, form: str) -> None:
    shown = form.format(n=value.numerator * 3, d=value.denominator * 3)
    score = grade(REWARD, f"\\boxed{{{shown}}}", f"{other.numerator}/{other.denominator}")
    assert (score.solved, score.value) == (value == other, float(value == other))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(reply=st.text("0123456789+-*/^(){}\\ .,=<>xe%$", max_size=25))
def test_no_text_raises_and_only_a_solution_is_worth_something(reply: str) -> None:
    score = grade(HURRIED, reply, "\\frac{355}{113}")
    assert score.value == float(score.solved)
    assert not score.solved

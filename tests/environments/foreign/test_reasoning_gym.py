"""Problems of reasoning-gym: graded by the library in a sandbox, solved only at 1.0."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.environments.foreign.playing import wrong

from silva.environments.bases.attempts import Verdict
from silva.environments.check.checks import examine
from silva.environments.foreign import reasoning_gym as module
from silva.environments.foreign.reasoning_gym import ReasoningGym, ReasoningGymEpisode
from silva.errors import ConfigError, RewardError
from silva.types import Task

RECORDED = json.loads((Path(__file__).parent / "recordings" / "reasoning_gym.json").read_text())


class Recorded:
    """`reasoning_gym`, as far as it was recorded; problems that were not are made up."""

    def create_dataset(self, name: str, seed: int, size: int, **config):
        assert (name, size) == ("leg_counting", 1)
        known = RECORDED["problems"].get(str(seed))
        return [
            known["entry"]
            if known
            else {"question": f"How many legs have {seed} men?", "answer": str(2 * seed)}
        ]


class RecordedGrader:
    def __init__(self, settings) -> None:
        pass

    async def __call__(self, answer: str, task: Task) -> float:
        known = RECORDED["problems"].get(str(task.data["seed"]))
        return (known["scores"] if known else {task.answer: 1.0}).get(answer, 0.01)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", Recorded())
    monkeypatch.setattr(module, "Grader", RecordedGrader)


def task(number: int) -> Task:
    entry = RECORDED["problems"][str(number)]["entry"]
    return Task("t", "legs", 0, {"seed": number, "question": entry["question"]}, entry["answer"])


def test_the_recorded_grades(recorded, replies_to) -> None:
    settings = ReasoningGym(task="leg_counting", eval_size=4, partial_weight=0.5)
    right = task(0).answer
    replies = (f"<answer>{right}</answer>", right, f"<answer>x {right}</answer>", "<answer>7</answer>", "")
    grades = [replies_to(settings, task(0), [reply])[0] for reply in replies]
    values = [step.rewards["correct"] for step in grades]
    assert values == [1.0, 1.0, pytest.approx(0.3), 0.0, 0.0]  # 0.6 of the library, times the weight
    assert [step.metrics["success"] for step in grades] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert grades[-1].metrics["action_is_valid"] == 0.0
    unweighted = settings.model_copy(update={"partial_weight": 0.0})
    assert replies_to(unweighted, task(0), [f"x {right}"])[0].rewards == {"correct": 0.0}


def graded(score: float, **keys) -> Verdict:
    async def grader(answer: str, task: Task) -> float:
        return score

    episode = ReasoningGymEpisode(ReasoningGym(task="leg_counting", **keys), task(0), Recorded(), grader)
    return asyncio.run(episode.judge("anything"))


@given(st.floats(-5, 5), st.floats(0, 0.999))
def test_no_partial_credit_reaches_the_reward_of_a_solution(score: float, weight: float) -> None:
    grade = graded(score, partial_weight=weight)
    assert grade.solved == (score >= 1.0)
    assert grade.solved or weight * grade.partial < 1.0


def test_a_score_that_is_no_number_is_no_result() -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        graded(float("nan"))


def test_a_seed_that_the_library_cannot_make_is_drawn_again() -> None:
    class Unlucky(Recorded):
        def create_dataset(self, *arguments, **keys):
            seeds.append(keys["seed"])
            if len(seeds) < 4:
                raise RuntimeError("Could not find suitable path cell")
            return super().create_dataset(*arguments, **keys)

    seeds: list[int] = []
    seed, entry = module.problem(Unlucky(), ReasoningGym(task="leg_counting"), random.Random(1))
    assert len(set(seeds)) == 4 and seeds[-1] == seed and str(seed) in entry["question"]


# A library with graders as the real one has them. 42 is right, and any list that holds 42 earns a part.
LIBRARY = """
import sys, types
fake = sys.modules["reasoning_gym"] = types.ModuleType("reasoning_gym")
class Set(list):
    def score_answer(self, answer, entry):
        oracle_answer = entry["answer"]
        if answer == "crash":
            raise KeyError("the grader is broken")
        try:
            return 1.0 if answer == oracle_answer else float(eval(answer))
        except Exception:
            return 0.01
fake.create_dataset = lambda name, seed, size: Set([{"question": f"q{seed}", "answer": "42"}])
"""


def scores(*answers: str, question: str = "q7") -> list[float | str]:
    """What the answers to one problem earn, one after the other, through one sandbox."""
    asked = Task("t", "made_up", 0, {"seed": 7, "question": question}, "42")

    async def run() -> list[float | str]:
        grade = module.Grader(ReasoningGym(task="made_up"), LIBRARY + module.GRADER.read_text(), ready=())
        found: list[float | str] = []
        for answer in answers:
            try:
                found.append(await grade(answer, asked))
            except RewardError as error:
                found.append(str(error))
        return found

    return asyncio.run(run())


PROGRAMS = [
    "1.0 if __import__('os').getpid() else 0",
    "[1.0, setattr(Set, 'score_answer', lambda *given: 1.0)][0]",
    "().__class__.__base__.__subclasses__() and 1.0",
    "exec('import os') or 1.0",
    "open('/etc/passwd') and 1.0",
    "oracle_answer == '42'",
    "entry and 1.0",
    "(lambda: 1.0)()",
    "[1.0 for x in (1,)][0]",
    "exit(0)",
    "print(1.0) or 1.0",
    "1.0 if (f := 1) else 0",
    "f'{oracle_answer}' and 1.0",
]


def test_an_answer_that_is_a_program_earns_nothing_and_changes_no_other_grade() -> None:
    assert scores(*PROGRAMS, "1", "42", "[0.5][0]", "max(0.25, 0.5)", "2 - 1.5", "words") == [
        *[0.0] * len(PROGRAMS), 1.0, 1.0, 0.5, 0.5, 0.5, 0.0,
    ]  # fmt: skip


def test_a_grader_that_fails_gives_no_result() -> None:
    assert "the grader is broken" in str(scores("crash")[0])
    assert "another problem in another process" in str(scores("1", question="q8")[0])


def test_what_takes_too_long_is_not_solved(monkeypatch) -> None:
    monkeypatch.setattr(module, "CPU_SECONDS", 1)
    assert scores("9**9**9**9", "42") == [0.0, 1.0]


def test_nothing_is_wrong_with_the_recorded_one(recorded) -> None:
    settings = ReasoningGym(task="leg_counting", eval_size=4, train_size=20)
    assert wrong(settings) == []


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "list_functions", "graph_color"])
def test_the_real_library(name) -> None:
    """`list_functions` draws from the random numbers of the process, `graph_color` has no answers."""
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    settings = ReasoningGym(task=name, eval_size=4, train_size=8)
    checks = examine(settings)
    assert [finding for check in checks if not check.ok for finding in check.findings] == []
    expert = next(check for check in checks if check.name == "expert")
    assert name == "graph_color" or expert.done == "succeeds in 8 of 8 episodes"


def test_names_and_parameters_are_checked_at_the_start() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    with pytest.raises(ConfigError, match="cannot make 'no_such_task'"):
        ReasoningGym(task="no_such_task").taskset()
    with pytest.raises(ConfigError, match="unexpected keyword argument 'legs'"):
        ReasoningGym(task="leg_counting", config={"legs": 3}).taskset()

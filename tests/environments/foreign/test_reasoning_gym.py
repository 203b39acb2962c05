"""Problems of reasoning-gym: graded by the library, solved only at 1.0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.environments.check import examine
from silva.environments.foreign.reasoning_gym import ReasoningGym, ReasoningGymEpisode
from silva.errors import ConfigError
from silva.types import Task

RECORDED = json.loads((Path(__file__).parent / "recordings" / "reasoning_gym.json").read_text())


class Recorded:
    """`reasoning_gym`, as far as it was recorded; problems that were not are made up."""

    def create_dataset(self, name: str, seed: int, size: int, **config):
        assert (name, size) == ("leg_counting", 1)
        known = RECORDED["problems"].get(str(seed))
        entry = (
            known["entry"]
            if known
            else {"question": f"How many legs have {seed} men?", "answer": str(2 * seed)}
        )
        scores = known["scores"] if known else {entry["answer"]: 1.0}

        def score_answer(answer: str, given: dict) -> float:
            assert given is entry
            return scores.get(answer, 0.01)

        return _Set(entry, score_answer)


class _Set:
    def __init__(self, entry, score_answer) -> None:
        self.entry, self.score_answer = entry, score_answer

    def __getitem__(self, index: int):
        assert index == 0
        return self.entry


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", Recorded())


def task(number: int) -> Task:
    entry = RECORDED["problems"][str(number)]["entry"]
    return Task("t", "legs", 0, {"seed": number, "question": entry["question"]}, entry["answer"])


def test_the_recorded_grades(recorded, replies_to) -> None:
    settings = ReasoningGym(task="leg_counting", eval_size=4, partial_weight=0.5)
    right = task(0).answer
    grades = {
        reply: replies_to(settings, task(0), [reply])[0]
        for reply in (
            f"<answer>{right}</answer>",
            right,
            f"<answer>x {right}</answer>",
            "<answer>7</answer>",
            "",
        )
    }
    values = [step.rewards["correct"] for step in grades.values()]
    assert values == [1.0, 1.0, pytest.approx(0.3), 0.0, 0.0]  # 0.6 of the library, times the weight
    assert [step.metrics["success"] for step in grades.values()] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert grades[""].metrics["action_is_valid"] == 0.0


def test_without_a_weight_a_part_earns_nothing(recorded, replies_to) -> None:
    settings = ReasoningGym(task="leg_counting", eval_size=4)
    assert replies_to(settings, task(0), [f"x {task(0).answer}"])[0].rewards == {"correct": 0.0}


@given(st.floats(-5, 5), st.floats(0, 0.999))
def test_no_partial_credit_reaches_the_reward_of_a_solution(score: float, weight: float) -> None:
    class Scores(Recorded):
        def create_dataset(self, *args, **keys):
            made = super().create_dataset(*args, **keys)
            made.score_answer = lambda answer, entry: score
            return made

    settings = ReasoningGym(task="leg_counting", partial_weight=weight)
    grade = ReasoningGymEpisode(settings, task(0), Scores()).grade("anything")
    assert grade.solved == (score >= 1.0)
    assert grade.solved or weight * grade.partial < 1.0


def test_a_score_that_is_no_number_is_no_result(recorded, monkeypatch) -> None:
    library = Recorded()
    made = library.create_dataset("leg_counting", 0, 1)
    made.score_answer = lambda answer, entry: float("nan")
    library.create_dataset = lambda *a, **k: made  # type: ignore[method-assign]
    episode = ReasoningGymEpisode(ReasoningGym(task="leg_counting"), task(0), library)
    with pytest.raises(ValueError, match="expected a finite number"):
        episode.grade("7")


def test_nothing_is_wrong_with_the_recorded_one(recorded) -> None:
    settings = ReasoningGym(task="leg_counting", eval_size=4, train_size=20)
    assert [finding for check in examine(settings) if not check.ok for finding in check.findings] == []


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

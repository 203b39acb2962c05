"""Held-out numbers by hand: avg@k, pass@k, failures left out and counted, seeds that pair."""

import asyncio

import pytest

from silva.config.sections import Eval, Limits
from silva.errors import EngineError
from silva.evaluation import evaluator
from silva.evaluation.evaluator import evaluate, success
from silva.types import Task, Trajectory


class Tasks:
    def __init__(self, label, count):
        self.label, self.count = label, count

    def tasks(self, split):
        assert split == "eval"
        return [Task(f"{self.label}/{i}", self.label, 100 + i, {}) for i in range(self.count)]


def run(monkeypatch, outcome, *, k=1, tasks=4, worlds=("a",), seed=0, concurrency=256, seen=None, **how):
    """`outcome(task, sample)`: the success of an episode, None for a failed one."""

    async def play(task, taskset, actor, renderer, limits, *, id, seed):
        if seen is not None:
            seen.append((id, task.seed, seed))
        await asyncio.sleep(0)
        value = outcome(task.id, int(id.rpartition("/")[2]))
        if value is None:
            return Trajectory(id, (), "error", failure="redo", error="broken")
        return Trajectory(id, (), "terminated", rewards={"r": 2.0 * value - 1}, metrics={"success": value})

    monkeypatch.setattr(evaluator, "play", play)
    tasksets = {label: Tasks(label, 6) for label in worlds}
    settings = Eval(tasks=tasks, samples_per_task=k)
    return asyncio.run(
        evaluate(tasksets, None, None, settings, Limits(), seed=seed, concurrency=concurrency, **how)
    )


def test_one_sample_a_task(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: float(task != "a/2"))
    assert {*e.estimates} == {"success", "reward"}
    assert e.estimates["success"].mean == 0.75 and e.estimates["success"].n == 4
    # Wilson, z = 1.95996: 3 of 4
    assert e.estimates["success"].ci_low == pytest.approx(0.3006, abs=1e-4)
    assert e.estimates["success"].ci_high == pytest.approx(0.9544, abs=1e-4)
    assert e.estimates["reward"].mean == pytest.approx(0.5)
    assert [task.id for task, _ in e.episodes] == ["a/0", "a/1", "a/2", "a/3"]


def test_avg_and_pass_at_k_by_hand(monkeypatch):
    """4 samples of 4 tasks, solved 0, 1, 2 and 4 times."""
    solved = {"a/0": 0, "a/1": 1, "a/2": 2, "a/3": 4}
    (e,) = run(monkeypatch, lambda task, sample: float(sample < solved[task]), k=4)
    assert e.estimates["success"].mean == pytest.approx((0 + 1 / 4 + 2 / 4 + 1) / 4)
    # pass@2 = 1 - C(4 - c, 2) / C(4, 2): 0, 1 - 3/6, 1 - 1/6, 1
    assert e.estimates["pass@2"].mean == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert e.estimates["pass@4"].mean == pytest.approx(3 / 4)
    assert {*e.estimates} == {"success", "reward", "pass@2", "pass@4"}
    assert e.estimates["success"].n == 4


def test_two_samples_give_one_pass_at_k(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: float(sample == 0), k=2)
    assert {*e.estimates} == {"success", "reward", "pass@2"}
    assert (e.estimates["success"].mean, e.estimates["pass@2"].mean) == (0.5, 1.0)


def test_failed_episodes_enter_no_mean_and_are_counted(monkeypatch):
    """Task 1 fails once: its other sample counts for avg@k, and it has no pass@2. Task 3 fails wholly."""
    outcomes = {"a/0": (1.0, 1.0), "a/1": (None, 0.0), "a/2": (1.0, 0.0), "a/3": (None, None)}
    (e,) = run(monkeypatch, lambda task, sample: outcomes[task][sample], k=2)
    assert e.failed == 3 and len(e.episodes) == 8
    assert e.estimates["success"].mean == pytest.approx((1 + 0 + 0.5) / 3) and e.estimates["success"].n == 3
    assert e.estimates["pass@2"].mean == 1.0 and e.estimates["pass@2"].n == 2


def test_where_everything_fails_there_is_no_number(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: None)
    assert (e.estimates, e.failed, e.rows()) == ({}, 4, [])


def test_environments_stand_apart_and_rows_name_them(monkeypatch):
    a, b = run(monkeypatch, lambda task, sample: float(task[0] == "a"), worlds=("a", "b"), tasks=2)
    assert [row["environment"] for row in (*a.rows(), *b.rows())] == ["a", "a", "b", "b"]
    assert [row["mean"] for row in (*a.rows(), *b.rows())] == [1.0, 1.0, 0.0, -1.0]
    assert {*a.rows()[0]} == {"environment", "metric", "mean", "ci_low", "ci_high", "n"}


def test_seeds_pair_two_evaluations_whatever_else_is_evaluated(monkeypatch):
    def seeds(**how):
        seen = []
        run(monkeypatch, lambda task, sample: 1.0, k=2, seen=seen, **how)
        return {id: numbers for id, *numbers in seen}

    first = seeds()
    assert seeds() == first and seeds(concurrency=1) == first
    more = seeds(worlds=("b", "a"), tasks=6)
    assert {id: more[id] for id in first} == first
    assert len({tuple(numbers) for numbers in more.values()}) == 24  # no two episodes share their noise
    other = seeds(seed=1)
    assert all(other[id][0] == first[id][0] and other[id][1] != first[id][1] for id in first)


def test_an_episode_cut_short_is_no_success():
    cut = Trajectory("x", (), "max_turns", rewards={"r": 1.0}, metrics={})
    partly = Trajectory("x", (), "terminated", metrics={"success": 0.5})
    whole = Trajectory("x", (), "terminated", metrics={"success": 1.0})
    assert (success(cut), success(partly), success(whole)) == (0.0, 0.0, 1.0)


def test_progress_names_the_environment(monkeypatch):
    told = []
    run(monkeypatch, lambda *_: 1.0, tasks=2, on_episode=lambda *what: told.append(what))
    assert told == [(1, 2, "a"), (2, 2, "a")]


def test_an_engine_that_fails_is_raised_as_it_is(monkeypatch):
    def fail(task, sample):
        raise EngineError("sampling failed")

    with pytest.raises(EngineError, match="sampling failed"):
        run(monkeypatch, fail)

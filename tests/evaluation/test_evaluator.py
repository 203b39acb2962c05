"""Held-out numbers by hand: avg@k, pass@k, failures left out and counted, seeds that pair."""

import asyncio
from dataclasses import replace

import pytest

from silva.config.load import load
from silva.config.sections import EpisodeLimits, Eval
from silva.errors import EngineError
from silva.evaluation import evaluator
from silva.evaluation.evaluator import Standing, evaluate, standing, success
from silva.evaluation.summary import ranges_of
from silva.registries import REGISTRIES
from silva.storage.summary import EVALUATION_KEYS
from silva.types import Segment, Task, Trajectory, Turn


class Tasks:
    def __init__(self, label, count):
        self.label, self.count = label, count

    def tasks(self, split):
        assert split == "eval"
        return [Task(f"{self.label}/{i}", self.label, 100 + i, {}) for i in range(self.count)]


def ended(stop_reason="terminated", turns=(), **fields):
    return Trajectory("e", turns, stop_reason, **fields)


def run(monkeypatch, outcome, *, k=1, tasks=4, worlds=("a",), seed=0, concurrency=256, seen=None, **how):
    """`outcome(task, sample)`: the success of an episode, None for one without a result, or all of it."""

    async def play(task, taskset, actor, renderer, limits, *, id, seed, watch, context):
        if seen is not None:
            seen.append((id, task.seed, seed))
        await asyncio.sleep(0)
        value = outcome(task.id, int(id.rpartition("/")[2]))
        if isinstance(value, Trajectory):
            return value
        if value is None:
            return Trajectory(id, (), "error", failure="redo", error="broken")
        return Trajectory(id, (), "terminated", rewards={"r": 2.0 * value - 1}, metrics={"success": value})

    monkeypatch.setattr(evaluator, "play", play)
    tasksets = {label: Tasks(label, 6) for label in worlds}
    settings = Eval(tasks=tasks, samples_per_task=k)
    return asyncio.run(
        evaluate(tasksets, None, None, settings, EpisodeLimits(), seed=seed, concurrency=concurrency, **how)
    )


def test_one_sample_a_task(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: float(task != "a/2"))
    assert {*e.estimates} == {"success", "reward"}
    assert e.estimates["success"].mean == 0.75 and e.estimates["success"].n == 4
    # Wilson, z = 1.95996: 3 of 4
    assert e.estimates["success"].ci_low == pytest.approx(0.3006, abs=1e-4)
    assert e.estimates["success"].ci_high == pytest.approx(0.9544, abs=1e-4)
    assert e.estimates["reward"].mean == pytest.approx(0.5)
    assert [task for task, _ in e.episodes] == ["a/0", "a/1", "a/2", "a/3"]


def test_the_interval_of_a_reward_ends_where_rewards_can_lie(monkeypatch):
    """Student's of 0, 0, 0 and 0.9 is 0.225 +- 0.716."""

    def outcome(task, sample):
        return ended(rewards={"r": 0.9 if task == "a/3" else 0.0})

    (free,), (cut,) = (run(monkeypatch, outcome, ranges=ranges) for ranges in ({}, {"a": (0.0, 1.0)}))
    assert free.estimates["reward"].ci_low == pytest.approx(-0.4911, abs=1e-4)
    assert (cut.estimates["reward"].ci_low, cut.within) == (0.0, (0.0, 1.0))
    assert (
        cut.estimates["reward"].ci_high == free.estimates["reward"].ci_high == pytest.approx(0.9411, abs=1e-4)
    )


def test_which_environments_know_where_their_rewards_lie():
    part = {"reward": {"type": "token_f1"}, "weight": 0.5}
    rewards = [
        {"type": "token_f1"},
        {"type": "weighted", "parts": [{"reward": "math"}, part]},
        {"type": "deep_research", "penalty": 0.5},
        {"type": "function", "function": "own.py:mine"},
    ]
    rows = {"type": "dataset", "path": "rows.jsonl"}
    graded = [{**rows, "name": str(i), "reward": each} for i, each in enumerate(rewards)]
    values = {"environments": [*graded, {"type": "reverse_text"}, {"type": "sokoban"}]}
    found = ranges_of(load([], REGISTRIES, values=values).config.environments)
    assert found == {"0": (0.0, 1.0), "1": (0.0, 1.5), "2": (-0.5, 1.1), "reverse_text": (0.0, 1.0)}


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


def test_episodes_without_a_result_enter_no_mean_and_leave_bounds(monkeypatch):
    """Task 1 fails once: its other sample counts for avg@k, and it has no pass@2. Task 3 fails wholly."""
    outcomes = {"a/0": (1.0, 1.0), "a/1": (None, 0.0), "a/2": (1.0, 0.0), "a/3": (None, None)}
    (e,) = run(monkeypatch, lambda task, sample: outcomes[task][sample], k=2)
    assert e.left_out == 3 and len(e.episodes) == 8
    assert e.estimates["success"].mean == pytest.approx((1 + 0 + 0.5) / 3) and e.estimates["success"].n == 3
    assert e.estimates["pass@2"].mean == 1.0 and e.estimates["pass@2"].n == 2
    # With the three: all failed, all solved.
    assert e.bounds == {
        "success": pytest.approx(((1 + 0 + 0.5 + 0) / 4, (1 + 0.5 + 0.5 + 1) / 4)),
        "pass@2": pytest.approx(((1 + 0 + 1 + 0) / 4, 1.0)),
    }
    rows = {row["metric"]: row for row in e.rows()}
    assert [rows["success"][key] for key in ("left_out", "bound_low", "bound_high")] == [3, 0.375, 0.75]
    assert [rows["reward"][key] for key in ("left_out", "bound_low", "bound_high")] == [3, None, None]
    assert e.notes() == ["a: 3 of 8 held-out episodes gave no usable result and are left out: 3 x broken"]


def test_where_everything_fails_there_is_no_number(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: None)
    assert (e.estimates, e.left_out) == ({}, 4)
    (row,) = e.rows()
    assert (row["metric"], row["mean"], row["n"], row["left_out"]) == ("reward", None, 0, 4)


LIMITED = [("context_overflow", "prompt of 230 tokens"), ("max_tokens", "no room"), ("timeout", "no end")]


@pytest.mark.parametrize(("stop_reason", "error"), LIMITED)
def test_what_the_policy_is_answerable_for_is_not_solved(monkeypatch, stop_reason, error):
    """Half of the episodes meet a limit after they earned 1: they stay in the mean, with that reward."""

    def outcome(task, sample):
        if task in ("a/0", "a/1"):
            return ended(
                stop_reason, rewards={"r": 1.0}, metrics={"success": 1.0}, failure="mask", error=error
            )
        return ended(rewards={"r": 3.0}, metrics={"success": 1.0})

    (e,) = run(monkeypatch, outcome)
    assert (e.estimates["success"].mean, e.estimates["reward"].mean) == (0.5, 2.0)
    assert (e.left_out, e.notes(), e.bounds["success"]) == (0, [], (0.5, 0.5))


def test_replies_that_are_cut_off_are_said(monkeypatch):
    """Half of the episodes end in the middle of a reply."""
    turn = Turn("t", (Segment("environment", (1,)),), fresh=True)
    ends = {"a/0": "length", "a/1": "context_overflow", "a/2": "stop_token", "a/3": "stop_string"}

    def outcome(task, sample):
        return ended(rewards={"r": 0.0}, turns=(replace(turn, stop_reason=ends[task]),))

    (e,) = run(monkeypatch, outcome)
    (note,) = e.notes()
    assert note.startswith("a: 2 of 4 held-out episodes ended with a reply that was cut off for lack of room")


def test_a_result_that_must_not_be_used_is_left_out(monkeypatch):
    def outcome(task, sample):
        if task == "a/0":
            return ended("error", failure="mask", error="step: reward 'r' is nan")
        return 1.0

    (e,) = run(monkeypatch, outcome)
    assert (e.left_out, e.estimates["success"].mean, e.bounds["success"]) == (1, 1.0, (0.75, 1.0))


def test_an_episode_without_a_result_is_tried_again(monkeypatch):
    seen, failures = [], {"a/0": 1, "a/1": 2, "a/2": 0, "a/3": 0}

    def outcome(task, sample):
        failures[task] -= 1
        return None if failures[task] >= 0 else 1.0

    (e,) = run(monkeypatch, outcome, seen=seen, redo=1)
    assert (e.left_out, e.estimates["success"].n) == (1, 3)
    assert sorted(id for id, *_ in seen) == [
        "eval:a/0/0", "eval:a/0/0", "eval:a/1/0", "eval:a/1/0", "eval:a/2/0", "eval:a/3/0"]  # fmt: skip
    assert len({seed for *_, seed in seen}) == 6  # a second attempt has numbers of its own


def test_an_environment_without_success_has_no_share_of_success(monkeypatch):
    (e,) = run(monkeypatch, lambda task, sample: ended(rewards={"r": 0.5}))
    assert {*e.estimates} == {"reward"} and e.bounds == {}
    assert [(row["metric"], row["mean"]) for row in e.rows()] == [("reward", 0.5)]


def test_where_every_episode_was_cut_off_none_is_a_success(monkeypatch):
    """An environment that reports success at the end had no occasion to."""
    (e,) = run(monkeypatch, lambda task, sample: ended("max_turns"))
    assert e.estimates["success"].mean == 0.0


def test_the_best_evaluation_is_judged_with_its_left_out_episodes_as_failures(monkeypatch):
    def judged(*values):
        return standing(run(monkeypatch, lambda task, sample: values[int(task[-1])]))

    half, three_of_three = judged(1.0, 0.0, 1.0, 0.0), judged(1.0, 1.0, 1.0, None)
    one_of_one = judged(1.0, None, None, None)
    assert (half.value, three_of_three.value, one_of_one.value) == (0.5, 0.75, 0.25)
    assert three_of_three.beats(half) and half.beats(one_of_one) and not one_of_one.beats(half)
    assert not half.beats(half) and half.beats(None)
    assert judged(None, None, None, None) is None


def test_the_best_evaluation_of_rewards_has_no_more_left_out_than_another(monkeypatch):
    def judged(*rewards):
        return standing(run(monkeypatch, lambda task, sample: paid(rewards[int(task[-1])])))

    def paid(reward):
        return None if reward is None else ended(rewards={"r": reward})

    all_four, three = judged(0.0, 4.0, 4.0, 4.0), judged(None, 4.0, 4.0, 4.0)
    assert (all_four.value, three.value) == (3.0, 4.0)
    assert not three.beats(all_four) and judged(0.0, 4.0, 4.0, 5.0).beats(all_four)
    assert judged(1.0, 1.0, 1.0, 4.0).beats(judged(None, 1.0, 1.0, 1.0))


def test_success_reported_for_the_first_time_beats_any_reward():
    assert Standing(1, 0.1, 0).beats(Standing(0, 9.0, 0)) and not Standing(0, 9.0, 0).beats(
        Standing(1, 0.1, 0)
    )


def test_environments_stand_apart_and_rows_name_them(monkeypatch):
    a, b = run(monkeypatch, lambda task, sample: float(task[0] == "a"), worlds=("a", "b"), tasks=2)
    assert [row["environment"] for row in (*a.rows(), *b.rows())] == ["a", "a", "b", "b"]
    assert [row["mean"] for row in (*a.rows(), *b.rows())] == [1.0, 1.0, 0.0, -1.0]
    assert {*a.rows()[0]} == {*EVALUATION_KEYS}


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

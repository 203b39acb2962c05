"""Signs of trouble in the numbers of a run, and the numbers in which there is none."""

import math
import random

import pytest

from silva.monitoring.alerts.signs import SIGNS, WINDOW, Signs

HEALTHY = {
    "train/entropy": 1.0, "train/grad_norm": 0.5, "train/mismatch_kl": 0.001, "trajectories/played": 64,
    "trajectories/failed": 0, "response/cut": 0.05, "response/repetition": 0.05, "groups/trained": 6,
    "groups/zero_variance": 2, "groups/failed": 0, "rollout/response_tokens": 100.0, "reward/raw": 0.3,
    "perf/seconds/rollout": 2.0, "perf/seconds/train": 1.0,
}  # fmt: skip


def run(steps: int = 60, **changes) -> list[str]:
    """What is told in a run whose numbers wobble; `changes`: key -> function of the share of steps done."""
    rng, signs, told = random.Random(0), Signs(), []
    for step in range(steps):
        row = {key: value * (1 + 0.05 * rng.gauss(0, 1)) for key, value in HEALTHY.items()}
        row |= {key.replace("__", "/"): change(step / steps) for key, change in changes.items()}
        told += signs.step(row)
    return told


def late(before: float, after: float):
    """A value that changes in the middle of a run."""
    return lambda done: before if done < 0.5 else after


def test_a_healthy_run_says_nothing():
    assert run() == []


@pytest.mark.parametrize("changes", [
    {"train__entropy": lambda done: max(0.001, 1 - 1.2 * done), "success__lake": lambda done: 0.5 + done / 2,
     "groups__trained": lambda done: 8 * (1 - done), "groups__zero_variance": lambda done: 8 * done,
     "reward__raw": lambda done: done},
    {"reward__raw": lambda done: min(0.9, done)},
    {"rollout__response_tokens": lambda done: 100 + 400 * done, "reward__raw": lambda done: done},
    {"train__grad_norm": lambda done: 0.5 + 20 * (done == 0.5)},
    {"train__loss": lambda done: math.nan, "reward__raw": lambda done: None},
])  # fmt: skip
def test_what_learning_looks_like_is_no_sign(changes):
    """A solved task leaves neither entropy nor groups to learn from; longer replies earn more; one spike."""
    assert run(**changes) == []


@pytest.mark.parametrize(("words", "changes"), [
    ("entropy fell from 0.99", {"train__entropy": late(0.99, 0.01)}),
    ("reward in training fell from 0.6 to", {"reward__raw": late(0.6, 0.2)}),
    ("gradients are 40 times as large as usual", {"train__grad_norm": late(0.5, 20.0)}),
    ("trainer and sampler disagree by 0.1", {"train__mismatch_kl": late(0.001, 0.3)}),
    ("episodes of the last 10 steps gave no result", {"trajectories__failed": late(0, 16)}),
    ("of the replies are cut off for lack of room, 10% at first", {"response__cut": late(0.1, 0.9)}),
    ("replies repeat themselves: 5", {"response__repetition": late(0.1, 0.8)}),
    ("groups of the last 10 steps taught something", {"groups__trained": late(6, 0)}),
    ("a step takes 11.5 s, 2 s at first", {"perf__seconds__rollout": late(1.0, 20.0)}),
    ("rollouts have grown from 100 to 3", {"rollout__response_tokens": late(100, 400),
                                                   "reward__raw": lambda done: 0.3}),
    ("replies hardly depend on their prompts", {"collapse__mutual_information": late(2.0, 0.1),
                                               "collapse__mutual_information_bound": lambda done: 2.77}),
])  # fmt: skip
def test_each_sign_is_told_once_with_what_to_try(words, changes):
    told = run(**changes)
    assert [words in each for each in told] == [True]
    assert "Try" in told[0] or "run.log" in told[0] or "perf/seconds" in told[0]


def test_every_sign_is_tested_here():
    assert len(SIGNS) == 11


def test_a_sign_that_went_away_is_told_again():
    def failed(done: float) -> float:
        return 16 if done < 0.25 or done > 0.75 else 0

    assert len(run(160, trajectories__failed=failed)) == 2


def test_a_resumed_run_does_not_say_it_again():
    rows = [HEALTHY | {"train/mismatch_kl": 0.5} for _ in range(3 * WINDOW)]
    assert Signs().step(rows[0]) == []
    assert Signs(rows).step(rows[0]) == []


def test_rows_of_evaluations_and_of_supervised_steps_say_nothing():
    signs = Signs()
    assert all(signs.step({"eval/lake/success": 0.1, "train/loss": 2.0}) == [] for _ in range(50))

"""Means over seeds, with Student's intervals."""

import math

import pytest

from silva.evaluation.over_seeds import over_seeds


def test_means_have_intervals_over_the_seeds() -> None:
    runs = [
        [{"step": 1, "reward/raw": value, "eval/w/success": 0.5, "eval/w/success_ci_low": 0.1, "other": 1.0}]
        for value in (1.0, 2.0, 4.0)
    ]
    del runs[2][0]["other"]
    (row,) = over_seeds(runs)
    half = 4.302652729911275 * math.sqrt(7 / 3) / math.sqrt(3)  # the quantile of t with 2 degrees of freedom
    assert row["reward/raw"] == pytest.approx(7 / 3)
    assert row["reward/raw_ci_low"] == pytest.approx(7 / 3 - half)
    assert row["reward/raw_ci_high"] == pytest.approx(7 / 3 + half)
    assert (row["eval/w/success"], row["eval/w/success_ci_low"]) == (0.5, None)  # all equal
    assert "other" not in row and "eval/w/success_ci_low_ci_low" not in row


def test_intervals_of_shares_end_at_0_and_1() -> None:
    (row,) = over_seeds([[{"step": 0, "eval/w/success": value}] for value in (0.0, 1.0)])
    assert (row["eval/w/success_ci_low"], row["eval/w/success_ci_high"]) == (0.0, 1.0)
    (row,) = over_seeds([[{"step": 1, "perf/seconds/train": value}] for value in (0.0, 1.0)])
    assert row["perf/seconds/train_ci_low"] == 0.0 and row["perf/seconds/train_ci_high"] > 6


def test_only_steps_of_all_seeds_count_and_evaluations_are_apart() -> None:
    first = [{"step": 0, "eval/w/reward": 1.0}, {"step": 1, "a": 1.0}, {"step": 1, "eval/w/reward": 3.0}]
    second = [{"step": 0, "eval/w/reward": 2.0}, {"step": 1, "eval/w/reward": 4.0}, {"step": 1, "a": None}]
    rows = over_seeds([first, second, second])
    assert [(row["step"], row.get("eval/w/reward")) for row in rows] == [(0, 5 / 3), (1, None), (1, 11 / 3)]
    assert over_seeds([first])[1] == {"step": 1, "a": 1.0} and over_seeds([]) == []

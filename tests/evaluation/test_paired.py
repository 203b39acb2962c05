"""Paired comparisons: p-values that are exact and uniform, intervals that cover, corrections by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from silva.evaluation.paired import difference, holm, sign_flip
from silva.evaluation.statistics import estimate


def of(*tasks: list[float]) -> list[np.ndarray]:
    return [np.array(task, float) for task in tasks]


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 5), (9, 2), (40, 21), (0, 12)])
def test_of_one_sample_it_is_mcnemars_exact_test(better: int, worse: int) -> None:
    a = of(*[[0]] * better, *[[1]] * worse, *[[1]] * 30, *[[0]] * 30)
    b = of(*[[1]] * better, *[[0]] * worse, *[[1]] * 30, *[[0]] * 30)
    theirs = scipy.stats.binomtest(better, better + worse, 0.5).pvalue if better + worse else 1.0
    assert difference(a, b, share=True).p == pytest.approx(theirs, rel=1e-9)


def test_of_several_samples_it_counts_all_signs() -> None:
    rng = np.random.default_rng(2)
    a, b = (list(rng.integers(0, 2, (9, 4)).astype(float)) for _ in range(2))
    deltas = np.array([y.mean() - x.mean() for x, y in zip(a, b, strict=True)])
    signs = itertools.product((-1, 1), repeat=len(deltas))
    sums = [abs(float(np.dot(each, np.abs(deltas)))) for each in signs]
    expected = np.mean([each >= abs(deltas.sum()) - 1e-12 for each in sums])
    assert difference(a, b, share=True).p == pytest.approx(expected, rel=1e-12)
    assert sign_flip(deltas) == pytest.approx(expected, rel=1e-12)  # without knowing of quarters


def test_drawn_signs_are_close_to_all_signs_and_the_same_each_time() -> None:
    deltas = np.random.default_rng(4).normal(0.3, 1, 40)
    theirs = scipy.stats.permutation_test((deltas,), np.mean, permutation_type="samples",
                                          n_resamples=50_000, rng=1).pvalue  # fmt: skip
    assert sign_flip(deltas) == pytest.approx(theirs, abs=0.01)
    assert sign_flip(deltas) == sign_flip(deltas)


def test_no_drawn_p_value_is_0() -> None:
    assert sign_flip(np.linspace(1, 2, 60)) == 1 / 20_001


def pair(rng: np.random.Generator, tasks: int, samples: int, shift: float = 0.0):
    """Two models of the same tasks, alike on most of them; the second solves `shift` more in the mean."""
    ours = rng.beta(1, 1 + 2 * shift, (tasks, 1)) if shift else rng.beta(1, 1, (tasks, 1))
    theirs = np.where(rng.random((tasks, 1)) < 0.5, ours, rng.beta(1, 1, (tasks, 1)))
    return [list((rng.random((tasks, samples)) < each).astype(float)) for each in (ours, theirs)]


@pytest.mark.slow
def test_p_values_are_uniform_under_no_difference() -> None:
    """Kolmogorov and Smirnov, of 5 to 7 samples for each of 60 tasks: with as many for all, only few sums are
    possible, and no p-value of these can be uniform."""
    rng, found = np.random.default_rng(7), []
    for _ in range(800):
        sizes = rng.integers(5, 8, 60)
        sides = ([task[:k] for task, k in zip(side, sizes, strict=True)] for side in pair(rng, 60, 7))
        found.append(difference(*sides, share=True).p)
    assert scipy.stats.kstest(found, "uniform").pvalue > 0.01
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(0.05, abs=0.023)


@pytest.mark.slow
def test_p_values_of_rewards_are_uniform_and_of_few_tasks_never_too_small() -> None:
    rng = np.random.default_rng(8)
    found = [difference(list(rng.normal(0, 1, (14, 2))), list(rng.normal(0, 1, (14, 2))), share=False).p
             for _ in range(800)]  # fmt: skip
    assert scipy.stats.kstest(found, "uniform").pvalue > 0.01
    few = np.array([difference(*pair(rng, 20, 1), share=True).p for _ in range(800)])
    assert all((few <= level).mean() <= level + 0.02 for level in (0.01, 0.05, 0.1, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "samples"), [(64, 1), (64, 8), (100, 4)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_intervals_cover(tasks: int, samples: int, shift: float) -> None:
    """93 to 97 % of 1,000 simulated pairs, whose tasks are clusters of samples, less and more two standard
    errors of the simulation: of the difference, and of the mean of one side."""
    rng, covered, mean_covered = np.random.default_rng(9), 0, 0
    truth = 0.5 * (0.5 - 1 / (2 + 2 * shift))  # half of the tasks are drawn again, with a mean of 0.5
    for _ in range(1000):
        a, b = pair(rng, tasks, samples, shift)
        found, alone = difference(a, b, share=True), estimate(a, share=True)
        covered += found.ci_low <= truth <= found.ci_high
        mean_covered += alone.ci_low <= 1 / (2 + 2 * shift) <= alone.ci_high
    assert 0.93 - 0.014 <= covered / 1000 <= 0.97 + 0.014
    assert 0.93 - 0.014 <= mean_covered / 1000 <= 0.97 + 0.014


def test_the_interval_of_one_sample_is_agresti_and_mins() -> None:
    """10 better, 4 worse of 50: with half a task more in each cell, 52 tasks differ by 6 / 52, with the
    variance (10.5 + 4.5) / 52 - (6 / 52)^2 (Agresti and Min 2005); the quantile is Student's."""
    a = of(*[[0]] * 10, *[[1]] * 4, *[[0]] * 36)
    b = of(*[[1]] * 10, *[[0]] * 4, *[[0]] * 36)
    found = difference(a, b, share=True)
    half = scipy.stats.t.ppf(0.975, 49) * math.sqrt((15 / 52 - (6 / 52) ** 2) / 52)
    assert found.mean == pytest.approx(6 / 50)
    assert (found.ci_low, found.ci_high) == pytest.approx((6 / 52 - half, 6 / 52 + half), rel=1e-9)


def test_rewards_have_students_interval_and_equal_sides_none() -> None:
    rng = np.random.default_rng(3)
    a, b = list(rng.normal(0, 1, (12, 3))), list(rng.normal(1, 1, (12, 3)))
    theirs = scipy.stats.ttest_rel([y.mean() for y in b], [x.mean() for x in a]).confidence_interval()
    found = difference(a, b, share=False)
    assert (found.ci_low, found.ci_high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    cut = difference(a, b, share=False, within=(0.0, theirs.high / 2))  # no difference is larger
    assert (cut.ci_low, cut.ci_high) == (found.ci_low, theirs.high / 2)
    same = difference(a, a, share=False)
    assert (same.mean, same.p) == (0, 1) and math.isnan(same.ci_low)
    shares = difference(of(*[[1]] * 50), of(*[[1]] * 50), share=True)
    assert shares.p == 1 and 0 < shares.ci_high < 0.06 and shares.ci_low == -shares.ci_high


def test_one_task_says_nothing_of_others() -> None:
    found = difference(of([0, 0]), of([1, 1]), share=True)
    assert (found.mean, found.p, found.n) == (1, 1, 1) and math.isnan(found.ci_low)


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.03, 0.4 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.4: none below an earlier one."""
    assert holm([0.02, 0.4, 0.01, 0.03]) == pytest.approx([0.06, 0.4, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize(("a", "b"), [([], []), (of([1]), of([1], [0]))])
def test_other_tasks_are_refused(a, b) -> None:
    with pytest.raises(ValueError, match="expected the same number"):
        difference(a, b, share=True)

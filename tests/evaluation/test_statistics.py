from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from silva.evaluation.statistics import (
    Estimate,
    clustered_wilson,
    estimate,
    maj_at_k,
    pass_at_k,
    ratio,
    student,
    student_quantile,
    wilson,
)


def columns(*values: float) -> list[np.ndarray]:
    """One sample per task."""
    return [np.array([value]) for value in values]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 2, 1, 0.4),  # c / n
        (5, 2, 2, 0.7),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (5, 2, 4, 1.0),  # four of five always hold a right one
        (8, 0, 8, 0.0),
        (8, 8, 1, 1.0),
        (200, 3, 100, 0.8768844),  # 1 - (100 * 99 * 98) / (200 * 199 * 198) = 1 - 970200 / 7880400
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-6)


def test_pass_at_k_counts_subsets() -> None:
    """The definition: the share of subsets of k samples that hold a right one."""
    for n, c in [(6, 1), (6, 3), (7, 5)]:
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), rel=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    exact = 1 - math.comb(9_990, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("arguments", [(5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6)])
def test_pass_at_k_refuses(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= c <= n and 1 <= k <= n"):
        pass_at_k(*arguments)


def test_maj_at_k_enumerates_subsets_and_ties() -> None:
    """The definition: over all subsets of k samples, the mean worth of their most frequent answers."""
    rng = np.random.default_rng(6)
    for _ in range(12):
        votes = [["a", "b", "c", None][i] for i in rng.integers(0, 4, 7)]
        worth = {"a": 1.0, "b": 0.0, "c": 0.25}
        right = [0.0 if vote is None else worth[vote] for vote in votes]
        for k in range(1, 8):
            total, subsets = 0.0, list(itertools.combinations(votes, k))
            for subset in subsets:
                counts = {vote: subset.count(vote) for vote in subset if vote is not None}
                best = [vote for vote, count in counts.items() if count == max(counts.values())]
                total += sum(worth[vote] for vote in best) / len(best) if best else 0.0
            assert maj_at_k(votes, right, k) == pytest.approx(total / len(subsets), rel=1e-12)


def test_student_ends_where_the_values_do() -> None:
    """Of 0, 0 and 0.9 it would go from -0.99 to 1.59 (scipy), and no mean lies there."""
    values = [np.array([each]) for each in (0.0, 0.0, 0.9)]
    free = estimate(values)
    theirs = scipy.stats.t.interval(0.95, 2, 0.3, scipy.stats.sem([0.0, 0.0, 0.9]))
    assert (free.ci_low, free.ci_high) == pytest.approx(theirs)
    assert free.ci_low < -0.9 and free.ci_high > 1.5
    cut = estimate(values, within=(0.0, 1.0))
    assert (cut.mean, cut.ci_low, cut.ci_high) == (free.mean, 0.0, 1.0)
    wide = estimate(values, within=(-1.0, 1.5))
    assert (wide.ci_low, wide.ci_high) == (free.ci_low, 1.5)
    equal = estimate([np.array([0.5]), np.array([0.5])], within=(0.0, 1.0))
    assert math.isnan(equal.ci_low) and math.isnan(equal.ci_high)


@pytest.mark.parametrize(
    ("votes", "right", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("aabb", (1, 1, 0, 0), 0.5),  # a tie is broken at random
        ("abb", (1, 0, 0), 0.0),
        (("a", None, None), (1, 0, 0), 1.0),  # who says nothing casts no vote
        ((None, None), (0, 0), 0.0),
        ("aab", (1, 0, 0), 0.5),  # equal answers, graded differently
    ],
)
def test_majorities_by_hand(votes, right, expected: float) -> None:
    assert maj_at_k(list(votes), right, len(votes)) == expected


def test_maj_at_k_refuses() -> None:
    with pytest.raises(ValueError, match="got 2 votes, 2 right, k 3, expected 1 <= k <= n"):
        maj_at_k(["a", "b"], [1, 0], 3)


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 1), (1, 1), (0, 128), (3, 128), (64, 128), (127, 128), (10, 10)]
)
def test_wilson_equals_scipy(successes: int, n: int) -> None:
    theirs = scipy.stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes / n, n) == pytest.approx((theirs.low, theirs.high), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 10, 127, 1000])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.975, 0.9995])
def test_student_quantile_equals_scipy(p: float, df: int) -> None:
    assert student_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


def test_student_equals_scipy() -> None:
    values = np.random.default_rng(5).normal(2.0, 1.0, 9)
    theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert student(columns(*values)) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_clustered_wilson_by_hand() -> None:
    """Four tasks x 2 samples with means 1, 0.5, 0, 0.5: p = 0.5, var = 1/6, so d = 2/3; three tasks are not
    all 1 and three not all 0, so d = (3 * 2/3 + 1) / 4 = 3/4 and n / d = 16/3. t(0.975, 3) = 3.182446."""
    tasks = [np.array(each, float) for each in ([1, 1], [1, 0], [0, 0], [0, 1])]
    z, n = 3.182446, 16 / 3
    half = z / (1 + z * z / n) * math.sqrt(0.25 / n + z * z / (4 * n * n))
    assert clustered_wilson(tasks) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_equal_samples_of_a_task_count_once() -> None:
    """40 tasks, 8 equal samples each: as wide as 40 values (the normal approximation: 0.155), not as narrow
    as 320 (0.055)."""
    means = (np.arange(40) % 2).astype(float)
    low, high = clustered_wilson([np.full(8, mean) for mean in means])
    assert (low, high) == pytest.approx((0.5 - 0.155, 0.5 + 0.155), abs=0.006)
    assert (low, high) != clustered_wilson(columns(*means))  # Student's quantile: d is estimated


def test_a_ratio_has_student_s_interval_where_clusters_are_equal_and_its_linearised_one_elsewhere() -> None:
    """Sums 2, 4, 9 of 2 values each: means 1, 2, 4.5, whose interval is Student's. Sums 3, 1 of 3 and
    1 values: r = 1, no residual. Sums 6, 1 of 3 and 1: r = 7/4, residuals 0.75 and -0.75, variance
    2 / 1 * 1.125 / 16."""
    equal, means = ratio(np.array([2.0, 4.0, 9.0]), np.full(3, 2.0)), [np.array([m]) for m in (1.0, 2.0, 4.5)]
    assert (equal.mean, equal.ci_low, equal.ci_high) == pytest.approx((2.5, *student(means)))
    assert ratio(np.array([3.0, 1.0]), np.array([3.0, 1.0])) == Estimate(1.0, 1.0, 1.0, 2)
    found = ratio(np.array([6.0, 1.0]), np.array([3.0, 1.0]))
    assert found.ci_high - found.mean == pytest.approx(scipy.stats.t.ppf(0.975, 1) * (2 * 1.125 / 16) ** 0.5)
    assert math.isnan(ratio(np.array([2.0]), np.array([2.0])).ci_low)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "mean"), [(4, 0.02), (4, 0.25), (4, 0.9), (16, 0.02), (16, 0.25), (16, 0.9), (64, 0.02)]
)
def test_intervals_of_shares_cover(tasks: int, mean: float) -> None:
    """Of 300 data sets of 2, 4 or 16 samples a task, alike a little or much, at least 89 % of the intervals
    hold the true share: 93 % and more, less three standard errors of the simulation."""
    rng = np.random.default_rng(11)
    for samples, alike in ((2, 0.8), (4, 0.3), (16, 0.8)):
        strength = 1 / alike - 1
        covered = 0
        for _ in range(300):
            chances = rng.beta(mean * strength, (1 - mean) * strength, (tasks, 1))
            found = estimate(list((rng.random((tasks, samples)) < chances).astype(float)))
            covered += found.ci_low - 1e-12 <= mean <= found.ci_high + 1e-12
        assert covered / 300 >= 0.89, (samples, alike)


def test_intervals_of_rewards_cover() -> None:
    """Normal rewards of 4 tasks x 4 samples: Student's interval is exact."""
    rng, covered = np.random.default_rng(11), 0
    for _ in range(1000):
        low, high = student(list(rng.normal(0, 1, (4, 1)) + rng.normal(0, 1, (4, 4))))
        covered += low <= 0 <= high
    assert covered / 1000 == pytest.approx(0.95, abs=0.021)


def test_estimate_of_one_binary_sample_per_task_is_wilson() -> None:
    assert estimate(columns(1, 1, 1, 1, 1, 1, 1, 1, 0, 0)) == Estimate(0.8, *wilson(0.8, 10), 10)


def test_estimate_of_several_samples_per_task() -> None:
    """The mean is over tasks: (1 + 0 + 0.5) / 3 = 0.5, though 2 of 6 samples are 1."""
    tasks = [np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.array([1.0, 0.0])]
    assert estimate(tasks) == Estimate(0.5, *clustered_wilson(tasks), 3)


def test_estimate_of_rewards_that_are_not_binary_is_student_s() -> None:
    tasks = columns(0.2, 0.9, 0.4, 1.0, 0.0)
    low, high = student(tasks)
    assert estimate(tasks) == Estimate(pytest.approx(0.5), low, high, 5)


def test_equal_rewards_have_no_interval() -> None:
    """8 rewards of -1 do not say that the mean is between -1.000 and -1.000."""
    found = estimate(columns(*[-1.0] * 8))
    assert found.mean == -1 and math.isnan(found.ci_low) and math.isnan(found.ci_high)


def test_a_share_that_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values_by_task\[1\]: got \[1.5\], expected shares from 0 to 1"):
        estimate(columns(1.0, 1.5), share=True)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_estimate_of_unanimous_samples_has_a_width(value: float) -> None:
    """100 tasks that all fail say "at most 3.7 %", not "exactly 0", and 4 samples of each hardly more."""
    assert estimate([np.full(1, value)] * 100) == Estimate(value, *wilson(value, 100), 100)
    several = estimate([np.full(4, value)] * 100)
    assert several.ci_high - several.ci_low == pytest.approx(0.038, abs=5e-4)


def test_estimate_of_one_task_speaks_of_that_task() -> None:
    result = estimate([np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])])
    assert (result.mean, result.n) == (0.5, 1)
    assert result.ci_low < 0.2 and result.ci_high > 0.8


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "got no task"),
        ([np.array([1.0]), np.array([])], r"values_by_task\[1\]: got shape \(0,\)"),
        ([np.array([1.0, float("nan")])], r"values_by_task\[0\]: got \[1.0, nan\], expected finite numbers"),
    ],
)
def test_estimate_refuses(tasks: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(tasks)

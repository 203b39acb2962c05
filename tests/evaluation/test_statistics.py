from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from silva.evaluation.statistics import Estimate, clustered_bootstrap, estimate, mean_at_k, pass_at_k, wilson


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


def test_mean_at_k() -> None:
    """First two: (1 + 0) / 2 and (1 + 1) / 2, mean 0.75; all three: 1/3 and 1, mean 2/3."""
    tasks = [np.array([1, 0, 0]), np.array([1, 1, 1, 0])]
    assert mean_at_k(tasks, 2) == pytest.approx(0.75)
    assert mean_at_k(tasks, 3) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="got k 4, expected 1 to 3"):
        mean_at_k(tasks, 4)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(
    ("successes", "n"), [(0, 1), (1, 1), (0, 128), (3, 128), (64, 128), (127, 128), (10, 10)]
)
def test_wilson_equals_scipy(successes: int, n: int, confidence: float) -> None:
    theirs = scipy.stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson(successes, n, confidence) == pytest.approx((theirs.low, theirs.high), rel=1e-9, abs=1e-12)


def test_wilson_by_hand() -> None:
    """8 of 10, z = 1.96, z^2 = 3.8416: centre (0.8 + 0.19208) / 1.38416 = 0.716738,
    half 1.96 / 1.38416 * sqrt(0.16 / 10 + 3.8416 / 400) = 1.416021 * 0.160013 = 0.226581."""
    assert wilson(8, 10) == pytest.approx((0.490157, 0.943319), abs=1e-5)


@pytest.mark.parametrize("arguments", [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= n and n >= 1"):
        wilson(*arguments)
    with pytest.raises(ValueError, match="confidence: got 95"):
        wilson(1, 2, 95)


def test_bootstrap_equals_scipy_s_percentile() -> None:
    """Tasks with one sample each are scipy's plain bootstrap; both are random, so equal within noise."""
    values = np.random.default_rng(5).normal(2.0, 1.0, 60)
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=1)
    low, high = clustered_bootstrap([values[i : i + 1] for i in range(60)], resamples=20_000)
    interval = theirs.confidence_interval
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.01)  # width 0.5


def test_bootstrap_resamples_tasks_and_not_samples() -> None:
    """40 tasks, 8 equal samples each: as wide as 40 values, not as narrow as 320."""
    means = (np.arange(40) % 2).astype(float)
    low, high = clustered_bootstrap([np.full(8, mean) for mean in means])
    half = 1.96 * 0.5 / math.sqrt(40)  # normal approximation: 0.155; by samples it would be 0.055
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.02)
    assert (low, high) == clustered_bootstrap([np.array([mean]) for mean in means])


def test_bootstrap_covers() -> None:
    """Of 200 data sets of 50 tasks x 4 correlated samples about 95 % of intervals hold the true mean."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(200):
        chances = rng.beta(1.0, 2.0, 50)  # mean 1/3
        tasks = [(rng.random(4) < chance).astype(float) for chance in chances]
        low, high = clustered_bootstrap(tasks, resamples=300)
        covered += low <= 1 / 3 <= high
    assert 0.90 <= covered / 200 <= 0.98


def test_bootstrap_is_a_function_of_its_seed() -> None:
    tasks = columns(*np.random.default_rng(3).random(30))
    assert clustered_bootstrap(tasks) == clustered_bootstrap(tasks)
    assert clustered_bootstrap(tasks, seed=1) != clustered_bootstrap(tasks, seed=2)


def test_estimate_of_one_binary_sample_per_task_is_wilson() -> None:
    assert estimate(columns(1, 1, 1, 1, 1, 1, 1, 1, 0, 0)) == Estimate(0.8, *wilson(8, 10), 10)


def test_estimate_of_several_samples_per_task_is_the_bootstrap() -> None:
    """The mean is over tasks: (1 + 0 + 0.5) / 3 = 0.5, though 2 of 6 samples are 1."""
    tasks = [np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.array([1.0, 0.0])]
    result = estimate(tasks)
    assert result == Estimate(0.5, *clustered_bootstrap(tasks), 3)
    assert result.ci_low < 0.5 < result.ci_high


def test_estimate_of_rewards_that_are_not_binary_is_the_bootstrap() -> None:
    tasks = columns(0.2, 0.9, 0.4, 1.0, 0.0)
    assert estimate(tasks) == Estimate(pytest.approx(0.5), *clustered_bootstrap(tasks), 5)


@pytest.mark.parametrize(("value", "successes"), [(0.0, 0), (1.0, 100)])
def test_estimate_of_unanimous_samples_has_a_width(value: float, successes: int) -> None:
    """100 tasks x 4 samples that all fail say "at most 3.7 %", not "exactly 0"."""
    result = estimate([np.full(4, value)] * 100)
    assert result == Estimate(value, *wilson(successes, 100), 100)
    assert result.ci_high - result.ci_low == pytest.approx(0.037, abs=5e-4)


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

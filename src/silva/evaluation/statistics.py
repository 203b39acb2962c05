"""Numbers with error bars: pass@k, mean@k and 95 % intervals over held-out tasks. numpy only.

Samples of one task resemble each other, so intervals count tasks, never samples as if independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` tasks with its confidence interval."""

    mean: float
    ci_low: float
    ci_high: float
    n: int


def estimate(values_by_task: Sequence[np.ndarray], confidence: float = 0.95) -> Estimate:
    """Mean over tasks of each task's mean, with an interval.

    Wilson where every task has one sample of 0 or 1; else the bootstrap over tasks. Where samples of 0
    and 1 are all 0 or all 1 resampling would give an interval of width zero; there it is Wilson too, with
    each task counted once (on the safe side).

    Args:
        values_by_task: for each task its samples [k_i], k_i >= 1.
        confidence: coverage of the interval.

    Raises:
        ValueError: no task, a task without samples, or a value that is not finite.
    """
    tasks = _checked(values_by_task)
    means = np.array([values.mean() for values in tasks])
    binary = all(np.isin(values, (0.0, 1.0)).all() for values in tasks)
    once = all(len(values) == 1 for values in tasks)
    unanimous = bool((means == 0).all() or (means == 1).all())
    if binary and (once or unanimous):
        low, high = wilson(round(means.sum()), len(tasks), confidence)
    else:
        low, high = clustered_bootstrap(tasks, confidence)
    return Estimate(float(means.mean()), low, high, len(tasks))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, from n samples with c right ones.

    Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1), as a product so
    that nothing overflows.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: got n {n}, c {c}, k {k}, expected 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_at_k(values_by_task: Sequence[np.ndarray], k: int) -> float:
    """Mean over tasks of the mean of each task's first k samples (avg@k).

    Raises:
        ValueError: no task, fewer than k samples of a task, k below 1, or a value that is not finite.
    """
    tasks = _checked(values_by_task)
    fewest = min(len(values) for values in tasks)
    if not 1 <= k <= fewest:
        raise ValueError(f"mean_at_k: got k {k}, expected 1 to {fewest} (the fewest samples of a task)")
    return float(np.mean([values[:k].mean() for values in tasks]))


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927, no continuity correction): (low, high).

    Raises:
        ValueError: unless 0 <= successes <= n, n >= 1 and 0 < confidence < 1.
    """
    if not (n >= 1 and 0 <= successes <= n):
        raise ValueError(f"wilson: got {successes} successes of {n}, expected 0 <= successes <= n and n >= 1")
    _check_confidence(confidence)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    # At 0 and n the exact bounds are 0 and 1; rounding must not leave [0, 1].
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def clustered_bootstrap(
    values_by_task: Sequence[np.ndarray], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap of the mean over tasks of each task's mean, whole tasks resampled: (low, high).

    A single task leaves nothing to resample but its own samples: the interval then speaks of that task
    alone. The same input and seed give the same bits.

    Args:
        values_by_task: for each task its samples [k_i], k_i >= 1.
        confidence: coverage of the interval.
        resamples: number of bootstrap draws.
        seed: of the draws.

    Raises:
        ValueError: no task, a task without samples, a value that is not finite, or a bad confidence.
    """
    tasks = _checked(values_by_task)
    _check_confidence(confidence)
    units = np.array([values.mean() for values in tasks]) if len(tasks) > 1 else tasks[0]
    rng = np.random.default_rng(seed)
    draws = [units[rng.integers(0, len(units), len(units))].mean() for _ in range(resamples)]
    low, high = np.quantile(draws, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def _checked(values_by_task: Sequence[np.ndarray]) -> list[np.ndarray]:
    tasks = [np.asarray(values, dtype=np.float64) for values in values_by_task]
    if not tasks:
        raise ValueError("values_by_task: got no task, expected at least one")
    for i, values in enumerate(tasks):
        if values.ndim != 1 or not len(values):
            raise ValueError(f"values_by_task[{i}]: got shape {values.shape}, expected [k] with k >= 1")
        if not np.isfinite(values).all():
            raise ValueError(f"values_by_task[{i}]: got {values.tolist()}, expected finite numbers")
    return tasks


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, expected 0 < confidence < 1")

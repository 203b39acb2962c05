"""Two evaluations of the same tasks, compared in pairs: difference, 95 % interval and p-value. numpy only.

A task is one unit whatever its number of samples, since these resemble each other: what is compared is the
mean of one side's samples with the mean of the other's, task by task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from silva.evaluation.statistics import UP_TO, Range, student, student_quantile

DRAWS = 20_000
"""Signs that are drawn if there are too many to go through all; the least p-value is 1 / (DRAWS + 1)."""
ALL_SIGNS = 14  # differences of which all 2^n signs are gone through
ALL_SUMS = 1 << 20  # whole numbers that a sum of differences may reach


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over `n` tasks of b - a with its 95 % interval (NaN if nothing can be said), and the two-sided
    p-value of there being none."""

    mean: float
    ci_low: float
    ci_high: float
    p: float
    n: int


def difference(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], *, share: bool, within: Range | None = None
) -> Difference:
    """Compare task by task.

    Args:
        a, b: for each task its samples [k_i], k_i >= 1; the same tasks in the same order.
        share: whether values lie between 0 and 1 by their nature.
        within: where all values can lie; None: anywhere.

    Raises:
        ValueError: no task, or not the same number of them.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"difference: got {len(a)} and {len(b)} tasks, expected the same number, 1 or more")
    deltas = np.array([y.mean() - x.mean() for x, y in zip(a, b, strict=True)])
    sizes = np.array([min(len(x), len(y)) for x, y in zip(a, b, strict=True)])
    if len(deltas) == 1:
        low, high = math.nan, math.nan
    elif share:
        low, high = _interval_of_shares(deltas, sizes)
    else:
        widest = within and (within[0] - within[1], within[1] - within[0])
        low, high = student([d[None] for d in deltas], widest)
    whole = math.lcm(*(len(x) for x in (*a, *b))) if share else 0
    return Difference(float(deltas.mean()), low, high, sign_flip(deltas, whole), len(deltas))


def sign_flip(deltas: np.ndarray, whole: int = 0) -> float:
    """Two-sided p-value of a mean of 0: the share of all signs of the differences for which the mean is as
    far from 0. Without a difference between the two sides, a task's difference has either sign with the same
    probability (Fisher's randomisation test; Good 2005, section 3.3). With one sample of 0 or 1 for each task
    this is McNemar's exact test.

    Exact if the differences are multiples of 1 / `whole`, or few; otherwise of `DRAWS` signs with a fixed
    seed, as (hits + 1) / (draws + 1) (Phipson and Smyth 2010).

    Args:
        deltas: [n].
        whole: what makes whole numbers of the differences; 0: nothing does.
    """
    sizes = np.abs(deltas[deltas != 0])
    seen = abs(float(deltas.sum())) - 1e-9 * float(sizes.sum())
    if not len(sizes):
        return 1.0
    units = np.rint(sizes * whole)
    if whole and units.sum() < ALL_SUMS and np.allclose(units, sizes * whole, atol=1e-6):
        return _of_whole(units.astype(int), seen * whole)
    if len(sizes) <= ALL_SIGNS:
        signs = 1 - 2 * ((np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1)
        return float((np.abs(signs @ sizes) >= seen).mean())
    rng, hits, at_once = np.random.default_rng(0), 0, 500
    for _ in range(DRAWS // at_once):
        signs = 1 - 2 * rng.integers(0, 2, (at_once, len(sizes)), dtype=np.int8)
        hits += int((np.abs(signs @ sizes) >= seen).sum())
    return (hits + 1) / (DRAWS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: with these the chance of any false alarm among all is as stated (Holm 1979)."""
    found, least, count = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        least = max(least, min(1.0, (count - rank) * p_values[index]))
        found[index] = least
    return found


def _of_whole(sizes: np.ndarray, seen: float) -> float:
    """P(|sum of +-sizes| >= seen), from the distribution of the sum, built one term at a time."""
    total = int(sizes.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for size in sizes:
        chances = (np.roll(chances, size) + np.roll(chances, -size)) / 2  # nothing has reached the ends yet
    return min(1.0, float(chances[np.abs(np.arange(-total, total + 1)) >= seen].sum()))


def _interval_of_shares(deltas: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Student's t interval with two imagined tasks, one better and one worse by 1 / sqrt(k) for k samples.

    With one sample for each task these are Agresti and Min's (2005), whose interval keeps its coverage if
    few tasks differ, and has a width if none does.
    """
    n, step = len(deltas), 1 / math.sqrt(float(sizes.mean()))
    imagined = np.concatenate([deltas, [step / 2**0.5, -step / 2**0.5]])
    half = student_quantile(UP_TO, n - 1) * imagined.std() / len(imagined) ** 0.5
    mean = float(imagined.mean())
    return max(-1.0, mean - half), min(1.0, mean + half)

"""Entropies from the likeliest tokens alone: exact ones lie within the bounds, which can both be met."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from silva.engines.top_entropy import top_entropy
from silva.errors import RecordError


def found(probabilities: np.ndarray, k: int) -> tuple[float, float]:
    top = np.sort(probabilities)[::-1][:k]
    estimate, bound = top_entropy(np.log(top)[None], len(probabilities))
    return float(estimate[0]), float(bound[0])


@given(
    seed=st.integers(0, 10_000), vocabulary=st.integers(2, 300), share=st.floats(0, 1), scale=st.floats(0, 8)
)
def test_the_exact_entropy_lies_within_the_bounds(
    seed: int, vocabulary: int, share: float, scale: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, scale, vocabulary)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    k = max(1, round(share * vocabulary))
    estimate, bound = found(probabilities, k)
    assert abs(estimate - entropy(probabilities)) <= bound + 1e-5
    if k == vocabulary:
        assert bound < 1e-5


def test_both_bounds_can_be_met() -> None:
    known = np.array([0.4, 0.2])
    estimate, bound = top_entropy(np.log(known)[None], 102)
    even = np.array([*known, *[0.4 / 100] * 100])
    packed = np.array([*known, 0.2, 0.2])
    assert estimate[0] + bound[0] == pytest.approx(entropy(even))
    assert estimate[0] - bound[0] == pytest.approx(entropy(packed))


def test_by_hand() -> None:
    """One of two tokens is known: the other has the rest, so there is nothing to estimate."""
    estimate, bound = top_entropy(np.log([[0.75], [0.5]]), 2)
    assert estimate == pytest.approx([0.5623351446188083, np.log(2)])
    assert bound == pytest.approx([0, 0])


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [([[0.7, 0.6]], 9), ([[0.5, 0.5]], 1), ([[0.1]], 3), ([[0.0, 0.5]], 9)],
    ids=["more than one", "more than there are", "not the likeliest", "impossible"],
)
def test_what_cannot_be_is_refused(rows: list[list[float]], vocabulary: int) -> None:
    with np.errstate(divide="ignore"), pytest.raises(RecordError, match="top_entropy: got"):
        top_entropy(np.log(rows), vocabulary)

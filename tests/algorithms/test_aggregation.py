from __future__ import annotations

import numpy as np
import pytest
from tests.algorithms.by_hand import row_of

from silva.algorithms.aggregation import AGGREGATIONS, normalise
from silva.errors import ConfigError
from silva.types import Sample

# Trajectory a has two rows (its context was rewritten) of 2 and 1 trained tokens, b one of 5, c none:
# 8 trained tokens in 2 sequences.
#   token_mean                1/8 each
#   sequence_mean_token_mean  a: 1 / (2 * 3) = 1/6, b: 1 / (2 * 5) = 1/10
#   sequence_mean_token_sum   1/2
#   constant 32               1/32
BY_HAND = {
    "token_mean": (1 / 8, 1 / 8),
    "sequence_mean_token_mean": (1 / 6, 1 / 10),
    "sequence_mean_token_sum": (1 / 2, 1 / 2),
    "constant": (1 / 32, 1 / 32),
}


def samples_of() -> list[Sample]:
    return [
        row_of("a", [0, 1, 0, 1]),
        row_of("b", [0, 0, 1, 1, 1, 1, 1]),
        row_of("c", [0, 0]),
        row_of("a", [0, 0, 1]),
    ]


def constant_of(mode: str) -> float | None:
    return 32 if mode == "constant" else None


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_by_hand(mode: str) -> None:
    samples = samples_of()
    a, b = BY_HAND[mode]
    weights = [s.loss_weights for s in normalise(samples, mode, constant=constant_of(mode))]
    assert weights[0].tolist() == pytest.approx([0, a, 0, a], rel=1e-7)
    assert weights[1].tolist() == pytest.approx([0, 0, b, b, b, b, b], rel=1e-7)
    assert weights[2].tolist() == [0, 0]
    assert weights[3].tolist() == pytest.approx([0, 0, a], rel=1e-7)
    assert all(w.dtype == np.float32 for w in weights)
    assert samples[0].loss_weights.tolist() == [0, 1, 0, 1]  # the input is as it was


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_trained_stays_nothing(mode: str) -> None:
    assert normalise([], mode, constant=constant_of(mode)) == []
    (sample,) = normalise([row_of("a", [0, 0])], mode, constant=constant_of(mode))
    assert sample.loss_weights.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("mode", "constant", "message"),
    [
        ("mean", None, "unknown aggregation: got 'mean', expected one of token_mean"),
        ("constant", None, "aggregation constant: got constant None"),
        ("token_mean", 4.0, "aggregation token_mean: got constant 4.0"),
        ("constant", 0.0, "aggregation constant: got 0.0, expected a finite number above 0"),
        ("constant", float("inf"), "expected a finite number above 0"),
    ],
)
def test_wrong_settings_are_refused(mode: str, constant: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normalise(samples_of(), mode, constant=constant)

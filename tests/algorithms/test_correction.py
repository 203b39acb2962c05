from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from silva.algorithms.correction import RolloutCorrection, importance_weights, kept

# Rows 5, 2, 5, 2, 5, 8 with ratios 4, 0.5, 0.25, 3, 0.125, 6. Products: 4 * 0.25 * 0.125 = 0.125 in row 5,
# 0.5 * 3 = 1.5 in row 2, 6 in row 8. Geometric means: 0.125^(1/3) = 0.5, sqrt(1.5) = 1.224745, 6.
ROWS = torch.tensor([5, 2, 5, 2, 5, 8])
RATIOS = (4, 0.5, 0.25, 3, 0.125, 6)
MEAN = math.sqrt(1.5)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("truncate", {}, [2, 0.5, 0.25, 2, 0.125, 2]),
        ("truncate", {"low": 0.2, "high": 3.5}, [3.5, 0.5, 0.25, 3, 0.2, 3.5]),
        ("truncate", {"level": "sequence"}, [0.125, 1.5, 0.125, 1.5, 0.125, 2]),
        ("truncate", {"level": "geometric"}, [0.5, MEAN, 0.5, MEAN, 0.5, 2]),
        ("mask", {}, [4, 0.5, 0, 3, 0, 0]),
        ("mask", {"low": 0.12, "high": 3.1}, [0, 0.5, 0.25, 3, 0.125, 0]),
        ("mask", {"level": "sequence", "high": 10.0}, [0, 1.5, 0, 1.5, 0, 6]),
        ("mask", {"level": "geometric", "low": 0.6}, [0, MEAN, 0, MEAN, 0, 0]),
    ],
)
def test_weights_by_hand(kind: str, settings: dict, expected: list[float]) -> None:
    ratios = tensor(*RATIOS).log().requires_grad_()
    weights = importance_weights(ratios, ROWS, RolloutCorrection(weight=kind, **settings))
    assert weights.tolist() == pytest.approx(expected, rel=1e-12) and not weights.requires_grad


@pytest.mark.parametrize("bounds", [(1.0, 2.0), (0.5, 1.0)])
def test_bounds_belong_to_what_is_kept(bounds: tuple[float, float]) -> None:
    low, high = bounds
    zero, row = tensor(0.0), torch.tensor([0])
    settings = RolloutCorrection(weight="mask", low=low, high=high, reject={"token": bounds, "any": bounds})
    assert importance_weights(zero, row, settings).tolist() == [1.0]
    assert kept(zero, row, settings).tolist() == [True]


def test_the_product_is_the_unbiased_weight_of_a_sequence() -> None:
    """Two steps of three tokens: the mean of w f under the sampler is that of f under the policy.

    Untruncated that is exact; truncated at 1.2 the gap is sum mu (w - 1.2)+ f; per token it is biased.
    """
    generator = torch.Generator().manual_seed(0)
    first, second, old_first, old_second = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    p, q = (
        (a.log_softmax(0)[:, None] + b.log_softmax(0)[None, :]).flatten()
        for a, b in [(first, second), (old_first, old_second)]
    )
    f = torch.randn(9, generator=generator, dtype=torch.float64)
    steps = [a.log_softmax(0) - b.log_softmax(0) for a, b in [(first, old_first), (second, old_second)]]
    log_ratios = torch.stack([steps[0][:, None].expand(3, 3), steps[1][None, :].expand(3, 3)], dim=-1)
    rows = torch.arange(9).repeat_interleave(2)

    def expectation(**settings: Any) -> Tensor:
        weights = importance_weights(log_ratios.flatten(), rows, RolloutCorrection(**settings))
        return (q.exp() * weights[::2] * f).sum()

    exact = (p.exp() * f).sum()
    torch.testing.assert_close(expectation(level="sequence", high=1e9), exact, rtol=1e-12, atol=0)
    cut = (q.exp() * ((p - q).exp() - 1.2).clamp(min=0) * f).sum()
    torch.testing.assert_close(expectation(level="sequence", high=1.2), exact - cut, rtol=1e-12, atol=0)
    assert abs(expectation(level="token", high=1e9) - exact) > 1e-3


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"token": [0.2, 5.0]}, [1, 1, 1, 1, 0, 0]),
        ({"token": [None, 3.5]}, [0, 1, 1, 1, 1, 0]),
        ({"token": [0.3, None]}, [1, 1, 0, 1, 0, 1]),
        ({"any": [0.2, 5.0]}, [0, 1, 0, 1, 0, 0]),  # rows 5 and 8 hold 0.125 and 6
        ({"any": [0.6, None]}, [0, 0, 0, 0, 0, 1]),  # by the least ratio of a row, not its product
        ({"geometric": [0.6, 2.0]}, [0, 1, 0, 1, 0, 0]),
        ({"sequence": [0.1, 1.4]}, [1, 0, 1, 0, 1, 0]),
        ({"token": [0.2, 5.0], "sequence": [0.1, 1.4]}, [1, 0, 1, 0, 0, 0]),
    ],
)
def test_kept_by_hand(bounds: dict, expected: list[int]) -> None:
    reject = {level: tuple(pair) for level, pair in bounds.items()}
    assert kept(tensor(*RATIOS).log(), ROWS, RolloutCorrection(reject=reject)).tolist() == [
        bool(x) for x in expected
    ]


def test_a_ratio_that_is_not_a_number_is_never_used() -> None:
    """Rejected where bounds are set; a weight made of it stays NaN, which makes the loss NaN and known."""
    log_ratios, rows = tensor(0.0, math.nan, 0.0, 900.0), torch.tensor([0, 0, 1, 2])
    for reject, expected in (
        ({"token": (None, None)}, [True, False, True, True]),
        ({"any": (0.0, 5.0)}, [False, False, True, False]),
    ):
        assert kept(log_ratios, rows, RolloutCorrection(reject=reject)).tolist() == expected
    for kind, last in [("truncate", 2.0), ("mask", 0.0)]:  # exp(900) is infinite
        weights = importance_weights(log_ratios, rows, RolloutCorrection(weight=kind))
        assert weights.isnan().tolist() == [False, True, False, False]
        assert weights[[0, 2, 3]].tolist() == [1.0, 1.0, last]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": "clip"}, "'truncate' or 'mask'"),
        ({"weight": "mask", "level": "row"}, "'token', 'geometric' or 'sequence'"),
        ({"weight": "mask", "low": 6.0}, "mask: got bounds 6.0 and 5.0, expected 0 <= low < high"),
        ({"low": 3.0}, "truncate: got bounds 3.0 and 2.0"),
        ({"weight": None, "low": 1.0}, "low: got 1.0 with weight = null, expected null"),
        ({"weight": None, "level": "sequence"}, 'level: got "sequence" with weight = null, expected "token"'),
        ({"reject": {"token": (2.0, 2.0)}}, "reject token: got bounds 2.0 and 2.0"),
        ({"reject": {"token": (2.0,)}}, "reject.token"),
        ({"reject": {"row": (0.5, 2.0)}}, "'token', 'geometric', 'sequence' or 'any'"),
    ],
)
def test_wrong_settings_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutCorrection(**given)

"""Losses, corrections and KL at log-ratios up to 200, which float32 cannot hold, against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from silva.algorithms.losses import LOSSES, LossInputs
from silva.algorithms.objective import compute
from silva.types import LossSpec

GAPS = (-200.0, -90.0, -40.0, -20.5, -17.3, -15.3, -1.0, 0.0, 1.0, 15.3, 17.3, 19.5, 20.5, 40.0, 90.0, 200.0)
MOST = math.exp(20)  # what a ratio counts at most
OLD = -201.0


def at(gaps: Tensor, advantage: float = 0.0, **more: Tensor) -> LossInputs:
    """float32 tokens whose log pi - log pi_old is each of `gaps`, each a row of its own."""
    old = torch.full_like(gaps, OLD)
    logprobs = (old + gaps).requires_grad_()
    return LossInputs(logprobs, old, torch.full_like(gaps, advantage), torch.arange(len(gaps)), **more)


def factors(spec: LossSpec, inputs: LossInputs) -> Tensor:
    """[N] float64 by which the gradient of log p is multiplied; value, gradient and metrics are finite."""
    loss, metrics = compute(spec, inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs)
    for found in (loss, gradient, *metrics.values()):
        assert found.isfinite().all()
    return gradient.double()


def ratio(gap: float) -> float:
    """r where it has a gradient, else 0."""
    return math.exp(gap) if gap <= 20 else 0.0


def clipped(gap: float, a: float, low: float, high: float, dual: float = math.inf) -> float:
    r = math.exp(gap)
    gone = (a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > dual))
    return 0.0 if gone else -a * ratio(gap)


# loss, keys, factor of grad log p by log r and advantage, as the docstrings of losses.py have it
FACTORS: list[tuple[str, dict[str, Any], Callable[[float, float], float]]] = [
    ("reinforce", {}, lambda gap, a: -a),
    ("clipped", {}, lambda gap, a: clipped(gap, a, 0.2, 0.2)),
    ("clipped", {"clip_dual": 3.0}, lambda gap, a: clipped(gap, a, 0.2, 0.2, 3.0)),
    (
        "clipped",
        {"balanced_clip_min_entropy": 0.0},
        lambda gap, a: -a * 1.2 if a > 0 and gap > math.log(1.2) else clipped(gap, a, 0.2, 0.2),
    ),
    ("gspo", {}, lambda gap, a: clipped(gap, a, 3e-4, 4e-4)),
    ("cispo", {}, lambda gap, a: -a * min(math.exp(gap), 4.0)),
    ("aipo", {}, lambda gap, a: -a * math.exp(gap) if gap <= math.log(8) else 0.0),
    ("dro", {}, lambda gap, a: -a + 0.05 * gap),
    ("cross_entropy", {}, lambda gap, a: -1.0),
]


def test_every_loss_is_looked_at() -> None:
    assert {name for name, _, _ in FACTORS} == set(LOSSES)


@pytest.mark.parametrize("advantage", [-1.5, 0.0, 2.0])
@pytest.mark.parametrize(("name", "keys", "factor"), FACTORS)
def test_losses(
    name: str, keys: dict[str, Any], factor: Callable[[float, float], float], advantage: float
) -> None:
    found = factors(LossSpec(name, keys), at(torch.tensor(GAPS), advantage))
    expected = [factor(gap, advantage) for gap in GAPS]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=3e-5, atol=1e-12)


# estimator, weighted by pi / mu -> factor of grad log p by x = log pi_ref / pi, in a token that pi samples
KL_FACTORS: dict[tuple[str, bool], Any] = {
    ("k1", False): lambda x: 1.0,
    ("k2", False): lambda x: -x,
    ("k3", False): lambda x: 1 - min(math.exp(x), MOST),
    ("k1", True): lambda x: 1 - x,
    ("k2", True): lambda x: x * x / 2 - x,
    ("k3", True): lambda x: -x,
}


@pytest.mark.parametrize(("estimator", "weighted"), KL_FACTORS)
def test_the_kl_pulls_hardest_where_the_policy_is_furthest_away(estimator: str, weighted: bool) -> None:
    gaps = torch.tensor(GAPS)
    inputs = at(torch.zeros_like(gaps), reference_logprobs=OLD + gaps)
    spec = LossSpec("reinforce", {"kl_coef": 1.0, "kl_estimator": estimator, "kl_bias_correction": weighted})
    expected = [KL_FACTORS[estimator, weighted](gap) for gap in GAPS]
    found = factors(spec, inputs)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=3e-5, atol=2e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weighted_kl_of_a_policy_far_from_its_sampler(estimator: str) -> None:
    """r (K + K'), r = pi / mu; nothing where r is above e^20. The reference is 3 nats above the policy."""
    gaps = torch.tensor(GAPS)
    inputs = at(gaps, reference_logprobs=OLD + gaps + 3)
    expected = [ratio(gap) * KL_FACTORS[estimator, True](3.0) for gap in GAPS]
    found = factors(LossSpec("reinforce", {"kl_coef": 1.0, "kl_estimator": estimator}), inputs)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ({"weight": "truncate"}, lambda w: min(w, 2.0)),
        ({"weight": "mask"}, lambda w: w if 0.5 <= w <= 5 else 0.0),
        ({"weight": None, "reject": {"token": [0.125, 8.0]}}, lambda w: float(0.125 <= w <= 8)),
        ({"weight": None, "reject": {"any": [0.125, 8.0]}}, lambda w: float(0.125 <= w <= 8)),
        ({"weight": None, "reject": {"geometric": [0.1, None]}}, lambda w: float(w >= 0.1)),
    ],
)
def test_corrections_weigh_or_drop_what_is_far(level: str, correction: dict[str, Any], weight: Any) -> None:
    """pi = pi_old, mu further and further away: the factor is -A w."""
    gaps = torch.tensor(GAPS)
    inputs = at(torch.zeros_like(gaps), 1.5, sampler_logprobs=OLD - gaps)
    levels = {"level": level} if correction["weight"] else {}
    found = factors(LossSpec("clipped", {"rollout_correction": {**levels, **correction}}), inputs)
    expected = torch.tensor([-1.5 * weight(math.exp(gap)) for gap in GAPS], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("name", ["clipped", "aipo", "cispo", "dro"])
def test_a_rejected_token_of_which_nobody_knows_the_ratio_costs_nothing(name: str) -> None:
    """It was not sampled: its log-probability is NaN. The other token keeps its gradient."""
    logprobs = torch.tensor([-1.0, -2.0]).requires_grad_()
    old = torch.tensor([-1.0, math.nan])
    inputs = LossInputs(logprobs, old, torch.ones(2), torch.arange(2))
    spec = LossSpec(name, {"rollout_correction": {"weight": None, "reject": {"token": [0.5, 2.0]}}})
    loss, _ = compute(spec, inputs)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [-1.0, 0.0]
    assert loss.isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("scored", [False, True])
def test_its_kl_counts_as_if_the_policy_had_sampled_it(estimator: str, scored: bool) -> None:
    """log p - log p_ref is 0.5. The gradient of its weight times the estimate is 0.5, that of k1 1.5."""
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64).requires_grad_()
    unknown = torch.tensor([-1.0, math.nan], dtype=torch.float64)
    inputs = LossInputs(
        logprobs,
        logprobs.detach() if scored else unknown,
        torch.zeros(2, dtype=torch.float64),
        torch.arange(2),
        reference_logprobs=torch.tensor([-1.5, -2.5], dtype=torch.float64),
        sampler_logprobs=unknown if scored else None,
    )
    correction = {"weight": None, "reject": {"token": [0.5, 2.0]}}
    params = {"kl_coef": 1.0, "kl_estimator": estimator, "rollout_correction": correction}
    loss, _ = compute(LossSpec("clipped", params), inputs)
    found = torch.autograd.grad(loss.sum(), logprobs)[0]
    assert found.tolist() == pytest.approx([{"k1": 1.5, "k2": 0.625, "k3": 0.5}[estimator]] * 2)

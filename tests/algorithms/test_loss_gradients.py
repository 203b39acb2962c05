"""Gradients of the losses against finite differences and in their limits; what a loss must not depend on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.algorithms.test_losses import gradient, inputs_of, tensor
from torch import Tensor

from silva.algorithms.losses import LOSSES, LossInputs
from silva.algorithms.objective import compute
from silva.types import LossSpec

# Losses with parts that the gradient takes for constants. Differences do not: they have tests of their own.
WITH_CONSTANTS = ("gspo", "cispo")


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in WITH_CONSTANTS])
def test_gradients_equal_finite_differences(name: str, estimator: str, correction: bool) -> None:
    """float64, away from the kinks at 0.8, 1.2, 2 and 2.5, every branch of the clips taken."""
    ratios = tensor(0.5, 0.9, 1.1, 1.5, 3.0, 0.5, 0.9, 1.1, 1.5, 3.0)
    advantages = tensor(1, 2, 0.5, 1, 1.5, -1, -2, -0.5, -1, -1.5)
    generator = torch.Generator().manual_seed(1)
    reference = -2 * torch.rand(10, generator=generator, dtype=torch.float64)
    entropies = torch.rand(10, generator=generator, dtype=torch.float64).requires_grad_()
    params = {"kl_coef": 0.3, "kl_estimator": estimator, "kl_bias_correction": correction}
    own = {"clipped": {"clip_dual": 2.5}, "aipo": {"max_ratio": 2.0, "kl_tau": 0.3}, "dro": {"kl_beta": 0.7}}
    spec = LossSpec(name, params | {"entropy_coef": 0.2} | own.get(name, {}))
    at = inputs_of(ratios, advantages)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, at.old_logprobs, advantages, at.rows, reference, entropies)
        return compute(spec, inputs)[0]

    assert torch.autograd.gradcheck(loss, (at.logprobs, entropies), eps=1e-6, atol=1e-8)


def test_cispo_gradient_equals_finite_differences_at_fixed_weights() -> None:
    """Its weight is a constant for the gradient: so it is for the differences where p_old moves with p."""
    log_ratios = tensor(0.1, 0.9, 1.5, 3.0, 1.5).log()
    advantages = tensor(1, -2, 0.5, -1, 2)
    spec = LossSpec("cispo", {"clip_low": 0.5, "clip_high": 0.6})

    def loss(logprobs: Tensor) -> Tensor:
        return compute(spec, LossInputs(logprobs, logprobs - log_ratios, advantages, torch.arange(5)))[0]

    assert torch.autograd.gradcheck(loss, tensor(-1, -2, -0.5, -3, -0.1).requires_grad_(), atol=1e-8)


def test_gspo_gradient_equals_finite_differences_of_the_sequence_loss() -> None:
    """The mean over a row of equal advantages is the loss of the sequence (eq. 5): its value is differenced.

    s of the rows: exp((ln 1.2 + ln 1.5) / 2) = 1.34, free as A < 0; 0.84; 0.64, clipped; 1.17.
    """
    ratios = tensor(1.2, 1.5, 0.9, 0.6, 1.1, 0.8, 0.4, 0.8, 1.7, 0.81)
    rows = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 3])
    advantages = tensor(-1, 2, -0.5, 1.5)[rows]
    lengths = torch.bincount(rows)[rows]
    at = inputs_of(ratios, advantages)

    def loss(logprobs: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, at.old_logprobs, advantages, rows)
        per_token, _ = compute(LossSpec("gspo", {"clip_low": 0.3, "clip_high": 0.25}), inputs)
        return (per_token / lengths).sum()

    assert torch.autograd.gradcheck(loss, at.logprobs, eps=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec("clipped"),
        LossSpec("clipped", {"clip_dual": 3.0}),
        LossSpec("clipped", {"balanced_clip_min_entropy": 0.0, "clip_high": 0.0}),
        LossSpec("gspo"),
        LossSpec("cispo"),
        LossSpec("aipo"),
        LossSpec("aipo", {"kl_tau": 0.1}),
        LossSpec("dro"),
        LossSpec(
            "reinforce",
            {
                "rollout_correction": {
                    "weight": "mask",
                    "reject": {"token": [0.5, 2], "geometric": [0.9, 1.1]},
                }
            },
        ),
    ],
    ids=str,
)
def test_on_policy_the_gradient_is_that_of_reinforce(spec: LossSpec) -> None:
    """At r = 1 both branches of max() are equal: its gradient is shared between them and must add up."""
    advantages = tensor(1.5, -2.0, 0.0, 0.3)
    inputs = inputs_of(torch.ones(4, dtype=torch.float64), advantages)
    inputs = dataclasses.replace(inputs, sampler_logprobs=inputs.old_logprobs)
    loss, metrics = compute(spec, inputs)
    assert gradient(loss, inputs) == pytest.approx([-1.5, 2.0, 0.0, -0.3], abs=1e-15)
    for name in {"clipped", "masked", "mismatch_kl", "approx_kl"} & set(metrics):
        assert metrics[name].tolist() == [0, 0, 0, 0]


def test_tokens_do_not_see_each_other() -> None:
    """Permuted or cut in two, every token keeps its loss, gradient and metrics."""
    generator = torch.Generator().manual_seed(2)
    ratios = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    correction = {"weight": "mask", "reject": {"token": [0.6, 1.4]}}
    spec = LossSpec("clipped", {"clip_high": 0.1, "rollout_correction": correction})

    def losses_and_gradients(index: Tensor) -> Tensor:
        inputs = inputs_of(ratios[index], advantages[index])
        inputs = dataclasses.replace(inputs, sampler_logprobs=inputs.old_logprobs + advantages[index] / 2)
        loss, metrics = compute(spec, inputs)
        return torch.stack([loss.detach(), tensor(*gradient(loss, inputs)), metrics["clipped"]])

    whole = losses_and_gradients(torch.arange(12))
    order = torch.randperm(12, generator=generator)
    assert torch.equal(losses_and_gradients(order), whole[:, order])
    cut = [losses_and_gradients(part) for part in torch.arange(12).split([5, 7])]
    assert torch.equal(torch.cat(cut, dim=1), whole)


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
        LossSpec("aipo", {"rollout_correction": {"level": "sequence"}}),
        LossSpec(
            "aipo",
            {"rollout_correction": {"weight": None, "reject": {"any": [0.6, 1.4], "geometric": [0.8, 1.2]}}},
        ),
    ],
    ids=str,
)
def test_rows_do_not_see_each_other(spec: LossSpec) -> None:
    generator = torch.Generator().manual_seed(4)
    ratios = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4, 4])

    def losses_and_gradients(index: Tensor) -> Tensor:
        inputs = inputs_of(ratios[index], advantages[index])
        sampler = inputs.old_logprobs + advantages[index] / 2
        inputs = dataclasses.replace(inputs, rows=rows[index], sampler_logprobs=sampler)
        loss, _ = compute(spec, inputs)
        return torch.stack([loss.detach(), tensor(*gradient(loss, inputs))])

    whole = losses_and_gradients(torch.arange(12))
    cut = [losses_and_gradients(part) for part in torch.arange(12).split([4, 8])]
    assert torch.equal(torch.cat(cut, dim=1), whole)
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(losses_and_gradients(order), whole[:, order], rtol=1e-12, atol=0)

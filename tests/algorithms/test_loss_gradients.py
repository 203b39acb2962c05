"""Gradients of the losses on-policy, and what a loss must not depend on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.algorithms.test_losses import gradient, inputs_of, tensor
from torch import Tensor

from silva.algorithms.objective import compute
from silva.types import LossSpec


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

from __future__ import annotations

import math

import pytest
import torch

from silva.algorithms.kl import KL_ESTIMATORS, kl_rewards

# Policy 0.5, reference 0.25: r = 0.5, log r = -ln 2 = -0.693147.
#   k1 = ln 2 = 0.693147             d/dlogp = 1
#   k2 = 0.693147^2 / 2 = 0.240227   d/dlogp = -log r = 0.693147
#   k3 = 0.5 + 0.693147 - 1 = 0.193147   d/dlogp = 1 - r = 0.5
# Policy 0.1, reference 0.3: r = 3, log r = ln 3 = 1.098612.
#   k1 = -1.098612, 1;  k2 = 0.603474, -1.098612;  k3 = 3 - 1.098612 - 1 = 0.901388, 1 - 3 = -2
BY_HAND = {
    "k1": ([math.log(2), -math.log(3)], [1.0, 1.0]),
    "k2": ([math.log(2) ** 2 / 2, math.log(3) ** 2 / 2], [math.log(2), -math.log(3)]),
    "k3": ([math.log(2) - 0.5, 2 - math.log(3)], [0.5, -2.0]),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_and_gradients_worked_by_hand(name: str) -> None:
    logprobs = torch.tensor([0.5, 0.1], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.25, 0.3], dtype=torch.float64).log()
    value = KL_ESTIMATORS[name](logprobs, reference)
    value.sum().backward()
    values, gradients = BY_HAND[name]
    assert value.tolist() == pytest.approx(values, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradients, rel=1e-12)


def test_expectations_under_the_policy() -> None:
    """Over all four tokens, weighted by their probability, expectations are exact sums."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-0.5, 0.4, 0.2, 1.0], dtype=torch.float64).log_softmax(0)

    def p() -> torch.Tensor:
        return logits.log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    sampled = p().exp().detach()
    expected = {name: (sampled * k(p(), q)).sum() for name, k in KL_ESTIMATORS.items()}
    reverse = (p().exp() * (p() - q)).sum()
    forward = (q.exp() * (q - p())).sum()

    torch.testing.assert_close(expected["k1"], reverse, rtol=1e-12, atol=0)  # unbiased values
    torch.testing.assert_close(expected["k3"], reverse, rtol=1e-12, atol=0)
    assert abs(expected["k2"].item() - reverse.item()) > 1e-3  # biased
    torch.testing.assert_close(
        gradient(expected["k1"]), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15
    )
    torch.testing.assert_close(gradient(expected["k2"]), gradient(reverse), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient(expected["k3"]), gradient(forward), rtol=1e-12, atol=1e-15)


def test_k3_keeps_its_sign_near_the_reference_in_float32() -> None:
    """exp(x) - x - 1 in float32 is 0 or negative for x = 1e-4; its true value is x^2 / 2 = 5e-9."""
    reference = torch.tensor([-1e-4, 1e-4], dtype=torch.float32)
    value = KL_ESTIMATORS["k3"](torch.zeros(2, dtype=torch.float32), reference)
    assert value.min() >= 0
    assert value.tolist() == pytest.approx([5e-9, 5e-9], rel=2e-3)


def test_kl_rewards_by_hand() -> None:
    """Policy 0.5 and 0.1, reference 0.25 and 0.3: -0.1 ln 2 = -0.069315, 0.1 ln 3 = 0.109861; no gradient."""
    logprobs = torch.tensor([0.5, 0.1], dtype=torch.float64).log().requires_grad_()
    rewards = kl_rewards(logprobs, torch.tensor([0.25, 0.3], dtype=torch.float64).log(), 0.1)
    assert rewards.tolist() == pytest.approx([-0.0693147181, 0.1098612289], rel=1e-9)
    assert not rewards.requires_grad


def test_distillation_advantages_give_the_gradient_of_the_kl_to_the_reference() -> None:
    """-A log p with A = kl_rewards, over all four tokens weighted by their probability, is exact."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.2, 1.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    loss = (logprobs.exp().detach() * -kl_rewards(logprobs, reference, 1.0) * logprobs).sum()
    ours = torch.autograd.grad(loss, logits, retain_graph=True)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(ours, reverse, rtol=1e-12, atol=1e-15)

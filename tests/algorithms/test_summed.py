"""The service's losses by hand, and against the losses of Silva that have the same formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from silva.algorithms.losses import LossInputs
from silva.algorithms.objective import compute
from silva.algorithms.summed import HIGH, LOW, MASK, SUMMED, named
from silva.errors import RecordError
from silva.types import LossSpec


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def computed(name: str, logprobs: Tensor, rows: list[int], params: Any = None, /, **inputs: Tensor) -> Any:
    """The sum and its gradient by log p."""
    leaf = logprobs.clone().requires_grad_()
    total = named(name).total(leaf, torch.tensor(rows), inputs, params or {})
    return total.item(), torch.autograd.grad(total, leaf)[0]


Q = math.log(0.2)  # of every token; so log p = log(0.2 r)
# r, A -> loss and gradient by log p, by hand. A = 2, r = 1.5, bounds 0.8 and 1.2: -min(3, 2.4) = -2.4, none.
# A = -1, r = 0.5: -min(-0.5, -0.8) = 0.8, none.  A = -1, r = 1.5: 1.5.  A = 1, r = 1.1: -1.1.
# cispo in [0, 4]: A = 1, r = 5: -4 ln 1 = 0, gradient -4;  A = -2, r = 0.5: 0.5 * 2 * ln 0.1, gradient 1.
# dro, beta 0.05: A = 2, r = 3: -2 ln 0.6 + 0.025 (ln 3)^2, gradient -2 + 0.05 ln 3.
BY_HAND = {
    "importance_sampling": ([1.5, 0.5], [2, -1], -3.0 + 0.5, [-3.0, 0.5]),
    "ppo": ([1.5, 0.5, 1.5, 1.1], [2, -1, -1, 1], -2.4 + 0.8 + 1.5 - 1.1, [0, 0, 1.5, -1.1]),
    "cispo": ([5, 0.5], [1, -2], math.log(0.1), [-4.0, 1.0]),
    "dro": ([3.0], [2], -2 * math.log(0.6) + 0.025 * math.log(3) ** 2, [-2 + 0.05 * math.log(3)]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    ratios, advantages, loss, gradient = BY_HAND[name]
    q = torch.full((len(ratios),), Q, dtype=torch.float64)
    logprobs = q + tensor(*ratios).log()
    total, found = computed(name, logprobs, [0] * len(ratios), logprobs=q, advantages=tensor(*advantages))
    assert total == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found, tensor(*gradient), rtol=1e-12, atol=1e-12)


def test_cross_entropy_weighs_each_of_k_targets() -> None:
    logprobs, weights = tensor([-1.0, -2.0], [-3.0, -4.0]), tensor([0.5, 0.25], [0.0, 2.0])
    total, gradient = computed("cross_entropy", logprobs, [0, 0], weights=weights)
    assert total == 0.5 + 0.5 + 8.0
    assert torch.equal(gradient, -weights)


def test_bounds_of_tokens_replace_those_of_the_loss() -> None:
    """A = 1, r = 1.5 thrice: bounds 0.8 to 1.2, 0.8 to 2 and, of the loss, 0.9 to 1.4."""
    q = torch.full((3,), Q, dtype=torch.float64)
    given = {"logprobs": q, "advantages": torch.ones(3, dtype=torch.float64), HIGH: tensor(1.2, 2.0, 1.4)}
    total, gradient = computed("ppo", q + math.log(1.5), [0, 0, 0], {LOW: 0.9, HIGH: 9.0}, **given)
    assert total == pytest.approx(-1.2 - 1.5 - 1.4, rel=1e-12)
    torch.testing.assert_close(gradient, tensor(0.0, -1.5, 0.0))
    total, _ = computed("cispo", q + math.log(1.5), [0, 0, 0], {LOW: 0.9, HIGH: 9.0}, **given)
    assert total == pytest.approx(-(1.2 + 1.5 + 1.4) * math.log(0.3), rel=1e-12)


def test_gspo_takes_the_mean_of_the_marked_tokens_of_each_row() -> None:
    """Row 0: marked are 2 and 0.5, mean of logs 0, s = 1; the unmarked token has s too. Row 1: s = 4, clipped
    at 1.3 for A > 0. Row 2 has none marked: s = 1."""
    ratios, rows = tensor(7.0, 2.0, 0.5, 4.0, 4.0, 9.0), [0, 0, 0, 1, 1, 2]
    q = torch.full((6,), Q, dtype=torch.float64)
    given = {"logprobs": q, "advantages": tensor(1, 2, -3, 1, -1, 1), MASK: tensor(0, 1, 1, 1, 1, 0)}
    total, gradient = computed("gspo", q + ratios.log(), rows, {LOW: 0.7, HIGH: 1.3}, **given)
    assert total == pytest.approx(-1 - 2 + 3 - 1.3 + 4 - 1, rel=1e-12)
    torch.testing.assert_close(gradient, tensor(-1, -2, 3, 0, 4, -1).double())


# Of the service, of Silva, and the parameters of both.
SAME = [
    ("ppo", "clipped", {LOW: 0.7, HIGH: 1.4}, {"clip_low": 0.3, "clip_high": 0.4}),
    ("cispo", "cispo", {LOW: 0.5, HIGH: 1.25}, {"clip_low": 0.5, "clip_high": 0.25}),
    ("dro", "dro", {"beta": 0.25}, {"kl_beta": 0.25}),
    ("gspo", "gspo", {}, {}),
    ("gspo", "gspo", {LOW: 0.9, HIGH: 1.1}, {"clip_low": 0.1, "clip_high": 0.1}),
]


@pytest.mark.parametrize(("name", "other", "params", "theirs"), SAME)
def test_it_is_silva_s_loss(name: str, other: str, params: Any, theirs: Any) -> None:
    drawn = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(40, generator=drawn, dtype=torch.float64) for _ in range(3))
    old = logprobs + 0.2 * old
    rows = torch.arange(40) // 8
    mask = {MASK: torch.ones_like(old)} if MASK in SUMMED[name].needs else {}
    total, gradient = computed(
        name, logprobs, rows.tolist(), params, logprobs=old, advantages=advantages, **mask
    )
    leaf = logprobs.clone().requires_grad_()
    expected = compute(LossSpec(other, theirs), LossInputs(leaf, old, advantages, rows))[0].sum()
    assert total == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_not_there_is_refused() -> None:
    with pytest.raises(RecordError, match="got 'stable_reinforce', expected one of cross_entropy"):
        named("stable_reinforce")

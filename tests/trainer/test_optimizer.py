"""AdamW and clipping on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from silva.trainer.optimizer import Stepper, clip
from silva.trainer.sharding.parallel import Mesh
from silva.types import OptimParams


def test_adamw_by_hand() -> None:
    """w = 1, g = 0.5, then g = -0.25; lr 0.1, betas 0.9 / 0.99, decay 0.1.

    Step 1: decay 1 - 0.1 * 0.1 = 0.99; m^ = 0.5, v^ = 0.25, so the step is 0.1 and w = 0.89.
    Step 2: decay 0.8811; m = 0.9 * 0.05 - 0.025 = 0.02, m^ = 0.02 / 0.19;
    v = 0.99 * 0.0025 + 0.01 * 0.0625 = 0.0031, v^ = 0.0031 / 0.0199.
    """
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    params = OptimParams(lr=0.1, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1, max_grad_norm=None)
    stepper = Stepper({"weight": weight})
    weight.grad = torch.tensor([0.5], dtype=torch.float64)
    stepper.step(params)
    assert weight.item() == pytest.approx(0.89, abs=1e-10)
    weight.grad = torch.tensor([-0.25], dtype=torch.float64)
    stepper.step(params)
    assert weight.item() == pytest.approx(
        0.8811 - 0.1 * (0.02 / 0.19) / math.sqrt(0.0031 / 0.0199), abs=1e-10
    )


def gradients() -> list[torch.Tensor]:
    return [torch.tensor([2.0, 3.0]), torch.tensor([6.0])]


def test_norm_is_over_all_gradients() -> None:
    assert Mesh().norm(gradients()) == pytest.approx(7.0)  # 4 + 9 + 36 = 49
    assert Mesh().norm([]) == 0.0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(3.5, [[1.0, 1.5], [3.0]]), (None, [[2.0, 3.0], [6.0]]), (7.0, [[2.0, 3.0], [6.0]])],
)
def test_clipping_scales_all_gradients_alike(limit: float | None, expected: list[list[float]]) -> None:
    found = gradients()
    clip(found, 7.0, limit)
    assert [gradient.tolist() for gradient in found] == expected


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    """Later ones of the same update come of the same weights."""
    stepper = Stepper({"weight": nn.Parameter(torch.ones(1))})
    for loss, name in ((1.0, "fine"), (math.inf, "first"), (math.nan, "later")):
        stepper.blame(torch.tensor(loss), [name])
    numbers, problem = stepper.step(OptimParams(lr=0.1))
    assert numbers["nonfinite"] == 1.0 and "micro-batch with trajectories first." in problem


def test_norm_of_bfloat16_numbers_is_taken_in_float32() -> None:
    assert Mesh().norm([torch.ones(1001, dtype=torch.bfloat16)]) == pytest.approx(math.sqrt(1001), rel=1e-6)


@pytest.mark.slow
def test_a_bfloat16_weight_moves_as_a_float32_one_does() -> None:
    """A gradient of 1, then many of 0.01: the second moment decays from 1e-3 towards 1e-4. In bfloat16 it
    would stay, and an update of 1e-6 is a hundredth of what changes a weight of 0.02."""
    params = OptimParams(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=None)
    rounded = nn.Parameter(torch.full((4,), 0.02, dtype=torch.bfloat16))
    narrow = Stepper({"weight": rounded})
    exact = nn.Parameter(narrow.masters["weight"].detach().clone())
    wide = Stepper({"weight": exact})
    for update in range(2000):
        for stepper in (narrow, wide):
            stepper.parameters["weight"].grad = torch.full((4,), 0.01 if update else 1.0)
            stepper.step(params)
            stepper.drop_gradients()
    (moment,) = (state["exp_avg_sq"] for state in wide.optimizer.state.values())
    (narrow_moment,) = (state["exp_avg_sq"] for state in narrow.optimizer.state.values())
    assert wide.masters["weight"] is exact
    assert torch.equal(narrow.masters["weight"], exact) and torch.equal(narrow_moment, moment)
    assert torch.equal(rounded, exact.to(torch.bfloat16)) and float(rounded.detach()[0]) < 0.0197
    decay = 0.999**1999
    assert float(moment[0]) == pytest.approx(decay * 1e-3 + (1 - decay) * 1e-4, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_change_their_share_of_narrow_weights(dtype: torch.dtype) -> None:
    """The weights of one step on many weights of 0.1, by a fiftieth of what lies between two numbers there:
    their mean moves by the step (an error of 1 % is one standard deviation), where rounding to the nearest
    would leave all of them."""
    count, spacing = 500_000, torch.finfo(dtype).eps / 16  # 0.1 lies between 1/16 and 1/8
    weight = nn.Parameter(torch.full((count,), 0.1, dtype=dtype))
    before = float(weight.detach().double().mean())
    stepper = Stepper({"weight": weight})
    stepper.round()
    assert float(weight.detach().double().mean()) == before  # the policy that was loaded
    weight.grad = torch.ones(count)
    betas, eps = (0.9, 0.999), 1e-12
    stepper.step(OptimParams(lr=spacing / 50, betas=betas, eps=eps, weight_decay=0.0, max_grad_norm=None))
    moved = before - float(weight.detach().double().mean())
    assert moved == pytest.approx(spacing / 50, rel=0.05)


def test_masters_of_zeros_powers_of_two_and_the_least_numbers_round_to_them() -> None:
    exponents = torch.arange(-133, 127).double()
    numbers = torch.cat([torch.tensor([0.0, -0.0]), 2.0**exponents, -(2.0**exponents), torch.rand(10_000)])
    weight = nn.Parameter(numbers.to(torch.bfloat16))
    master = Stepper({"weight": weight}).masters["weight"].detach()
    assert torch.equal(master.to(torch.bfloat16), weight.detach())
    assert master[:2].tolist() == [0.0, 0.0]
    assert float((master != weight.detach().float())[2:].double().mean()) > 0.95

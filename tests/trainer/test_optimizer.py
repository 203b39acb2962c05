"""AdamW and clipping on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from silva.trainer.optimizer import adamw, clip_gradients, gradient_norm, step
from silva.types import OptimParams


def test_adamw_by_hand() -> None:
    """w = 1, g = 0.5, then g = -0.25; lr 0.1, betas 0.9 / 0.99, decay 0.1.

    Step 1: decay 1 - 0.1 * 0.1 = 0.99; m^ = 0.5, v^ = 0.25, so the step is 0.1 and w = 0.89.
    Step 2: decay 0.8811; m = 0.9 * 0.05 - 0.025 = 0.02, m^ = 0.02 / 0.19;
    v = 0.99 * 0.0025 + 0.01 * 0.0625 = 0.0031, v^ = 0.0031 / 0.0199.
    """
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    params = OptimParams(lr=0.1, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1)
    optimizer = adamw([weight])
    weight.grad = torch.tensor([0.5], dtype=torch.float64)
    assert step(optimizer, [weight], 0.5, params)
    assert weight.item() == pytest.approx(0.89, abs=1e-10)
    weight.grad = torch.tensor([-0.25], dtype=torch.float64)
    assert step(optimizer, [weight], 0.25, params)
    assert weight.item() == pytest.approx(
        0.8811 - 0.1 * (0.02 / 0.19) / math.sqrt(0.0031 / 0.0199), abs=1e-10
    )


def parameters_with_gradients() -> list[torch.nn.Parameter]:
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    return parameters  # the last one has none


def test_norm_is_over_all_gradients() -> None:
    assert gradient_norm(parameters_with_gradients()) == pytest.approx(7.0)  # 4 + 9 + 36 = 49
    assert gradient_norm([torch.nn.Parameter(torch.zeros(1))]) == 0.0


def test_clipping_scales_all_gradients_alike() -> None:
    parameters = parameters_with_gradients()
    clip_gradients(parameters, 7.0, 3.5)
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[1.0, 1.5], [3.0]]


@pytest.mark.parametrize("limit", [None, 7.0, 100.0])
def test_small_gradients_are_left_alone(limit: float | None) -> None:
    parameters = parameters_with_gradients()
    clip_gradients(parameters, 7.0, limit)
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[2.0, 3.0], [6.0]]


def test_norm_of_bfloat16_gradients_is_taken_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1001, dtype=torch.bfloat16))
    parameter.grad = torch.ones(1001, dtype=torch.bfloat16)
    assert gradient_norm([parameter]) == pytest.approx(math.sqrt(1001), rel=1e-6)

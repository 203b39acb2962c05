"""Schedule, AdamW and clipping on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from silva.config.sections import Optimizer
from silva.trainer.optimizer import adamw, clip_gradients, gradient_norm, lr_at


def rates(settings: Optimizer, total: int) -> list[float]:
    return [lr_at(update, settings, total) for update in range(total)]


def test_constant_is_constant() -> None:
    assert rates(Optimizer(lr=0.5), 3) == [0.5, 0.5, 0.5]


def test_warmup_rises_to_the_full_rate() -> None:
    assert rates(Optimizer(lr=1.0, warmup=3), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_smallest_rate() -> None:
    settings = Optimizer(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert rates(settings, 5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_after_warmup() -> None:
    settings = Optimizer(lr=1.0, schedule="cosine", warmup=1)
    expected = [0.5, 1.0, 0.5 * (1 + math.cos(math.pi / 3)), 0.5 * (1 + math.cos(2 * math.pi / 3)), 0.0]
    assert rates(settings, 5) == pytest.approx(expected)
    assert expected[2:4] == pytest.approx([0.75, 0.25])


def test_past_the_end_the_rate_stays() -> None:
    settings = Optimizer(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert lr_at(50, settings, 10) == pytest.approx(0.1)
    assert lr_at(0, settings, 1) == 1.0


def test_adamw_by_hand() -> None:
    """w = 1, g = 0.5, then g = -0.25; lr 0.1, betas 0.9 / 0.99, decay 0.1.

    Step 1: decay 1 - 0.1 * 0.1 = 0.99; m^ = 0.5, v^ = 0.25, so the step is 0.1 and w = 0.89.
    Step 2: decay 0.8811; m = 0.9 * 0.05 - 0.025 = 0.02, m^ = 0.02 / 0.19;
    v = 0.99 * 0.0025 + 0.01 * 0.0625 = 0.0031, v^ = 0.0031 / 0.0199.
    """
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    settings = Optimizer(lr=0.1, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1)
    optimizer = adamw([weight], settings)
    weight.grad = torch.tensor([0.5], dtype=torch.float64)
    optimizer.step()
    assert weight.item() == pytest.approx(0.89, abs=1e-10)
    weight.grad = torch.tensor([-0.25], dtype=torch.float64)
    optimizer.step()
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

"""Sums of products of bfloat16, against the exact ones in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from silva.models import weight_gradient
from silva.models.weight_gradient import MIN_ROWS, add_product

NARROW = torch.bfloat16


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("rows", [3, MIN_ROWS + 5])
def test_a_sum_of_micro_batches(rows: int, multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is rounded once at most, by 1/256 of it, and the sum is one of float32: in bfloat16 the
    products of 1/512 would not change it."""
    monkeypatch.setattr(weight_gradient, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(weight_gradient, "BLOCK", 7)  # of 20
    weight = nn.Parameter(torch.zeros(20, 6, dtype=NARROW))
    weight.grad_dtype = torch.float32
    generator = torch.Generator().manual_seed(0)
    exact, most = torch.zeros(20, 6, dtype=torch.float64), torch.zeros(20, 6, dtype=torch.float64)
    for scale in (1.0, *[1 / 512] * 100):
        outputs = (scale * torch.randn(rows, 20, generator=generator)).to(NARROW)
        inputs = torch.randn(rows, 6, generator=generator).to(NARROW)
        add_product(weight, outputs, inputs)
        product = outputs.double().T @ inputs.double()
        exact += product
        most += product.abs() / 256 + 1e-5
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert ((weight.grad - exact).abs() <= most).all()


def test_wide_numbers_are_multiplied_as_they_are() -> None:
    """Also of a bfloat16 weight whose inputs are wider."""
    for dtype in (torch.float32, NARROW):
        weight = nn.Parameter(torch.zeros(4, 6, dtype=dtype))
        weight.grad_dtype = torch.float32
        outputs, inputs = torch.randn(50, 4), torch.randn(50, 6)
        add_product(weight, outputs, inputs)
        torch.testing.assert_close(weight.grad, outputs.T @ inputs)

"""Rules for products of training; those of sampling are in tests/engines/local/test_same_bits.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.models import row_rules
from silva.models.row_rules import RowRule, of_products, of_training, random_numbers


@pytest.mark.same_bits
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_rows_and_their_gradients_have_the_same_bits_under_the_rule(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 72, bias) if kind == "linear" else Conv1D(72, 48)
    rule = of_training([layer])
    assert rule is not None
    x, grad = torch.randn(300, 48), torch.randn(300, 72)

    def row(count: int) -> tuple[bytes, bytes]:
        start = (300 - count) // 2
        rows = x[start : start + count].clone().requires_grad_()
        (out := layer(rows)).backward(grad[start : start + count])
        at = 149 - start
        return out[at].detach().numpy().tobytes(), rows.grad[at].numpy().tobytes()

    counts = {rule.padded(count) for count in (2, 3, 5, 8, 31, 64, 130, 299)}
    assert len({row(count) for count in counts}) == 1


def test_the_products_of_both_ways_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(least: int) -> row_rules.Product:
        return lambda rows: torch.full((rows, 3), float(rows >= least))

    monkeypatch.setattr(row_rules, "linear_product", lambda layer: product(2))
    monkeypatch.setattr(row_rules, "_backward", lambda layer: product(5))
    assert of_training([nn.Linear(4, 4)]) == RowRule(8)
    monkeypatch.setattr(row_rules, "_backward", lambda layer: lambda rows: torch.rand(rows, 3))
    assert of_training([nn.Linear(4, 4)]) is None


@pytest.mark.same_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 32), (88, 3), (16, 576), (192, 16)], ids=str)
def test_rows_of_plain_products_have_the_same_bits_under_the_rule(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rule = of_products(frozenset({(*shape, dtype)}), torch.get_num_threads())
    assert rule is not None
    x, weight = random_numbers((300, shape[1]), dtype, 2), random_numbers(shape, dtype, 3)

    def row(count: int, before: int) -> bytes:
        start = 149 - min(before, count - 1)
        return F.linear(x[start : start + count], weight)[149 - start].numpy().tobytes()

    counts = {rule.padded(count) for count in (1, 2, 3, 5, 8, 31, 64, 130)}
    assert len({row(count, before) for count in counts for before in (0, 1, 2, 140)}) == 1


def test_numbers_that_are_probed_have_all_digits_of_their_type() -> None:
    """Products of numbers of 24 bits are exact in float64, so no order of summing would show."""
    numbers = random_numbers(100, torch.float64)
    assert (numbers != numbers.float()).all()

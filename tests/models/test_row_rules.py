"""Rules for products of training; those of sampling are in tests/engines/local/test_same_bits.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.models import row_rules
from silva.models.row_rules import RowRule, of_training


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

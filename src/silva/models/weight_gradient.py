"""The gradients of a linear layer's weight and bias, added to what is there without tensors of their own."""

from __future__ import annotations

import torch
from torch import nn

from silva.models.processor import multiplies_bfloat16
from silva.models.products import by_onednn, onednn

MIN_ROWS = 32
"""From where on a product of narrow numbers and its sum take less time than a product of float32."""
BLOCK = 4096
"""Outputs whose gradient is there at once where it is summed apart: what of a head stays in the processor's
cache."""


def add_product(weight: nn.Parameter, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add outputs^T inputs to `weight.grad`; the gradient of outputs [N, out], and inputs [N, in].

    Of a bfloat16 weight they are multiplied as they are where the processor has products for that, and what
    is added is rounded once.
    """
    narrow = weight.dtype == outputs.dtype == inputs.dtype == torch.bfloat16 and multiplies_bfloat16()
    if (narrow and len(inputs) >= MIN_ROWS) or (by_onednn(weight) and len(inputs)):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
        for part, rows in zip(weight.grad.split(BLOCK), outputs.split(BLOCK, 1), strict=True):
            part.add_(rows.T @ inputs if narrow else onednn(rows.T, inputs.T))
        return
    rows, inputs = outputs.to(weight.grad_dtype), inputs.to(weight.grad_dtype)
    if weight.grad is None:
        weight.grad = rows.T @ inputs
    else:
        weight.grad.addmm_(rows.T, inputs)


def add_sum(bias: nn.Parameter, outputs: torch.Tensor) -> None:
    """Add the sum over N to `bias.grad`; the gradient of outputs [N, out]."""
    total = outputs.to(bias.grad_dtype).sum(0)
    bias.grad = total if bias.grad is None else bias.grad.add_(total)

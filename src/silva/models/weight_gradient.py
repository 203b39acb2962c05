"""The gradient of a linear layer's weight, added to what is there without a tensor of its own."""

from __future__ import annotations

import torch
from torch import nn


def add_product(weight: nn.Parameter, outputs: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add outputs^T inputs to `weight.grad`; the gradient of outputs [N, out], and inputs [N, in]."""
    rows, inputs = outputs.to(weight.grad_dtype), inputs.to(weight.grad_dtype)
    if weight.grad is None:
        weight.grad = rows.T @ inputs
    else:
        weight.grad.addmm_(rows.T, inputs)

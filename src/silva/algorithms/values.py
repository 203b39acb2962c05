"""The loss of a critic, per token; weights and sums are the caller's, as in losses.py."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped within `clip` of the value before the update.

    From the code of PPO (github.com/openai/baselines, ppo2), which its paper (arXiv:1707.06347) leaves out;
    the clip keeps an update from moving a value far, as the policy's does.

    Args:
        values: [N] of the critic being trained, with gradient.
        old_values: [N] as the returns were made with.
        returns: [N] targets.
        clip: in units of reward; None leaves it out.

    Returns:
        loss [N]; metrics `critic/loss`, and `critic/clipped` (1 where the clip took the gradient away).
    """
    error_N = (values - returns).square()
    loss_N, clipped_N = error_N, torch.zeros_like(error_N)
    if clip is not None:
        bounded_N = torch.clamp(values, old_values - clip, old_values + clip)
        loss_N = torch.maximum(error_N, (bounded_N - returns).square())
        clipped_N = (loss_N > error_N).to(error_N.dtype)
    loss_N = loss_N / 2
    return loss_N, {"critic/loss": loss_N.detach(), "critic/clipped": clipped_N.detach()}

"""Activation functions whose every element has the same bits wherever it stands in a batch.

torch computes an activation such as SiLU with vector instructions, but the elements left over at the end of
a thread's share with scalar ones, whose exponential rounds differently. Which elements those are depends on
how many tokens a step holds. In pieces of whole vectors, each too small to be shared among threads, none
are left over. Training keeps torch's own (a batch is cut the same way every time), except where it has the
bits of sampling (trainer/exact.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

LANES = 64  # elements: a multiple of what any CPU takes at once
SERIAL = 32768  # from so many elements on torch shares a tensor among threads
_PIECE = SERIAL // 2  # GELU already from 20,480 on
_HOMES = ("torch.nn.modules.activation", "transformers.activations")


def steady_activations(model: nn.Module, *, always: bool = False) -> None:
    """Make the activations of `model` independent of the batch on CPU; in place. In inference mode, or
    `always`."""
    for module in activations(model):
        module.forward = partial(_steady, module.forward, always=always)  # type: ignore[method-assign]


def activations(model: nn.Module) -> list[nn.Module]:
    known = (module for module in model.modules() if type(module).__module__ in _HOMES)
    return [module for module in known if next(module.parameters(), None) is None]


def _steady(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, always: bool = False
) -> torch.Tensor:
    if not (always or torch.is_inference_mode_enabled()) or x.device.type != "cpu":
        return function(x)
    flat, left_over = x.flatten(), -x.numel() % LANES
    if left_over:
        flat = F.pad(flat, (0, left_over))
    if len(flat) <= _PIECE:
        out = function(flat)
    else:
        out = torch.cat([function(piece) for piece in flat.split(_PIECE)])
    return out[: x.numel()].view(x.shape)

"""From the last hidden states to logits: shared by sampling, training and the check at load."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

BLOCK = 256
"""Logits that are summed at once."""


def logits_of(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The language-model head and the family's operations on its logits, as configured.

    Granite divides logits, Cohere multiplies them, Gemma 2 caps them softly. A family that does more is
    refused when it is loaded (checks.py).

    Args:
        hidden: [..., H], the last hidden states of the decoder.

    Returns:
        [..., V] in float32, or float64 for a float64 model.
    """
    config: Any = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(config, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B, ceil(V / BLOCK), BLOCK], filled up with zeros."""
    missing = -x.shape[1] % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(1, (-1, BLOCK))


def log_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the soft-max of logits [B, V], with the same bits for a row in any company.

    Returns:
        The logarithm of its sum [B]; the terms of the sum over the largest of them [B, V]; and their sums
        over `blocks` [B, ceil(V / BLOCK)].
    """
    largest = logits.amax(-1)
    weights = (logits - largest[:, None]).exp_()
    # In blocks, as torch splits one long sum over its threads: a lone row got other bits.
    sums = blocks(weights).sum(2)
    return sums.sum(1).log() + largest, weights, sums

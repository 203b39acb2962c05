"""From the last hidden states to logits: shared by sampling, training and the check at load."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


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

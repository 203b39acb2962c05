"""A plain Hugging Face folder of the current weights, with LoRA merged into a copy."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel

from silva.errors import ModelError
from silva.models.adapters import merged
from silva.models.checks import gap_of, own_states, sequences
from silva.models.loading import LoadedModel
from silva.models.weight_files import let_read

MOST_GAP = {torch.bfloat16: 0.5}
"""Merged weights are rounded: models of random weights differ by 0.01 to 0.26."""


@torch.no_grad()
def export_model(loaded: LoadedModel, path: Path) -> None:
    """Write config, safetensors and tokenizer into `path`; plain AutoModelForCausalLM loads it.

    The model itself is only read.

    Raises:
        ModelError: the plain model would give other logits than the policy. Nothing is written then.
    """
    plain, tokens = _plain(loaded), sequences(loaded)
    (_, found), (_, expected) = (own_states(model, tokens) for model in (plain, loaded.model))
    gap, most = gap_of(found, expected), MOST_GAP.get(loaded.dtype, 1e-3)
    if gap > most:
        raise ModelError(
            f"{path}: not written, because {loaded.name} as a plain model gives other logits than the policy "
            f"(by {gap:.2g} of their size, expected at most {most:g}); the checkpoints hold what was learned"
        )
    plain.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    let_read(path)


def _plain(loaded: LoadedModel) -> PreTrainedModel:
    """As transformers would make it from the merged weights; it copies none but these."""
    config = copy.deepcopy(loaded.model.config)
    config.dtype = loaded.dtype
    with init_empty_weights():  # the weights below take the place of its own
        plain: PreTrainedModel = type(loaded.model)(config)
    plain.load_state_dict(merged(loaded.model), assign=True)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(loaded.model.generation_config)
    return plain.to(loaded.device).eval()

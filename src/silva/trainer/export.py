"""A plain Hugging Face folder of the current weights, with LoRA merged into a copy."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft.tuners.lora import Linear as LoraLinear

from silva.models.loading import LoadedModel


def export_model(loaded: LoadedModel, path: Path) -> None:
    """Write config, safetensors and tokenizer into `path`; plain AutoModelForCausalLM loads it.

    The model itself is only read. Adapters are added as W + (alpha / rank) B A (Hu et al. 2021, LoRA).
    """
    config = copy.deepcopy(loaded.model.config)
    config.dtype = loaded.dtype
    with torch.device("meta"):  # allocates nothing: the weights below take the place of its own
        plain = type(loaded.model)(config)
    plain.load_state_dict(plain_weights(loaded), assign=True)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(loaded.model.generation_config)
    plain.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)


@torch.no_grad()
def plain_weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The state of the model as if it never had adapters; tensors without one are the model's own storage."""
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in loaded.model.state_dict().items()
        if ".lora_" not in name
    }
    for prefix, module in loaded.model.named_modules():
        if isinstance(module, LoraLinear):
            base: torch.Tensor = module.get_base_layer().weight  # type: ignore[assignment]
            merged = base.float() if base.dtype == torch.bfloat16 else base
            for adapter in module.active_adapters:
                merged = merged + module.get_delta_weight(adapter).to(merged.dtype)
            weights[f"{prefix}.weight"] = merged.to(base.dtype)
    return weights

"""LoRA (Hu et al. 2021): adapters into a model, and the plain weights that they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from silva.errors import ModelError

if TYPE_CHECKING:
    from silva.config.sections import Lora


def inject(model: PreTrainedModel, lora: Lora) -> None:
    """Add fresh adapters, which alone require a gradient from here on.

    Raises:
        ModelError: a target matches no layer, or one whose adapter a plain model has no place for.
    """
    named = dict(model.named_modules())
    linear = {name: module for name, module in named.items() if isinstance(module, nn.Linear | Conv1D)}
    targets = {t: [n for n in named if n == t or n.endswith(f".{t}")] for t in lora.targets}
    wrong = [t for t, names in targets.items() if not names or not linear.keys() >= set(names)]
    if wrong:  # peft is content with one that matches
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ModelError(
            f"model.lora.targets: got {', '.join(wrong)}, expected names of linear layers of this model: "
            f"{', '.join(known)}"
        )
    embeddings = model.get_input_embeddings().weight
    if tied := [t for t, names in targets.items() if any(linear[n].weight is embeddings for n in names)]:
        raise ModelError(
            f"model.lora.targets: got {', '.join(tied)}, whose weight is that of the embeddings too "
            "(tie_word_embeddings in config.json): a plain model has no place for an adapter of one of them. "
            "Leave it out, or take a model whose head has weights of its own"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:  # peft makes them in the type of the layer, which may be too narrow to learn in
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


@torch.no_grad()
def merged(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state of the model with W + (alpha / rank) B A for each weight W that has an adapter.

    Tensors without one are the model's own storage.
    """
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    for prefix, module in model.named_modules():
        if isinstance(module, LoraLinear):
            base: torch.Tensor = module.get_base_layer().weight  # type: ignore[assignment]
            weight = base.to(torch.promote_types(base.dtype, torch.float32))
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
            weights[f"{prefix}.weight"] = weight.to(base.dtype)
    return weights


@torch.no_grad()
def fold(model: PreTrainedModel) -> None:
    """Merge the adapters into the model's own weights, in place: a plain one, all of it trainable."""
    weights = merged(model)
    for name, module in [*model.named_modules()]:
        if isinstance(module, LoraLinear):
            plain = module.get_base_layer()
            plain.weight.data = weights[f"{name}.weight"]
            model.set_submodule(name, plain)
    for parameter in model.parameters():
        parameter.requires_grad_(True)

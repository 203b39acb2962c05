"""LoRA (Hu et al. 2021): adapters into a model, and the plain weights that they come to.

A mixture of experts keeps the weights of a layer's experts in parameters of three dimensions, which PEFT
adapts by `target_parameters`: each expert gets an adapter of its own, of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from silva.errors import ModelError

if TYPE_CHECKING:
    from silva.config.sections import Lora

EXPERTS = "experts"
"""What transformers calls the module with the weights of all experts of a layer."""
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters of experts that hold the weights of several layers of a dense MLP."""


def inject(model: PreTrainedModel, lora: Lora) -> None:
    """Add fresh adapters, which alone require a gradient from here on.

    Raises:
        ModelError: a target matches no layer, or one whose adapter a plain model has no place for; or dropout
            for experts, whose adapters PEFT adds to the weights themselves.
    """
    inject_adapter_in_model(peft_config(model, lora), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:  # peft makes them in the type of the layer, which may be too narrow to learn in
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def peft_config(model: PreTrainedModel, lora: Lora, **others: Any) -> LoraConfig:
    """The adapters as PEFT describes them; errors as of `inject`.

    Args:
        model: the plain one, which may be without weights.
    """
    layers, experts = _targets(model, lora)
    if experts and lora.dropout:
        raise ModelError(
            f"model.lora.dropout: got {lora.dropout:g} with adapters of experts ({', '.join(experts)}), "
            "which PEFT adds to the weights, so that no input can be dropped; expected 0, or other targets"
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=layers,
        target_parameters=experts or None,
        **others,
    )


def _targets(model: PreTrainedModel, lora: Lora) -> tuple[list[str], list[str]]:
    """Those of `lora.targets` that are linear layers, and the parameters of experts that they stand for."""
    named = dict(model.named_modules())
    linear = {name: module for name, module in named.items() if isinstance(module, nn.Linear | Conv1D)}
    targets = {t: [n for n in named if n == t or n.endswith(f".{t}")] for t in lora.targets}
    experts = {target: _of_experts(model, target, lora.targets) for target in lora.targets}
    wrong = [t for t, names in targets.items() if not linear.keys() >= set(names)]
    wrong += [t for t, names in targets.items() if not names and not experts[t]]
    if wrong:  # peft is content with one that matches
        known = {name.rpartition(".")[2] for name in linear}
        known |= {name.rpartition(".")[2] for name, _ in _stacked(model)}
        raise ModelError(
            f"model.lora.targets: got {', '.join(wrong)}, expected names of linear layers of this model, or "
            f"of parameters of its experts: {', '.join(sorted(known))}"
        )
    embeddings = model.get_input_embeddings().weight
    if tied := [t for t, names in targets.items() if any(linear[n].weight is embeddings for n in names)]:
        raise ModelError(
            f"model.lora.targets: got {', '.join(tied)}, whose weight is that of the embeddings too "
            "(tie_word_embeddings in config.json): a plain model has no place for an adapter of one of them. "
            "Leave it out, or take a model whose head has weights of its own"
        )
    layers = [t for t, names in targets.items() if names]
    return layers, sorted({name for names in experts.values() for name in names})


def _of_experts(model: PreTrainedModel, target: str, targets: tuple[str, ...]) -> set[str]:
    """The parameters of experts that a target stands for, as "experts.down_proj"; a fused one has all its
    parts among the targets, or is named itself."""
    found = set[str]()
    for name, _ in _stacked(model):
        short = name.rpartition(".")[2]
        parts = FUSED.get(short, ())
        if f".{name}".endswith(f".{target}") or (target in parts and {*parts} <= {*targets}):
            found.add(f"{EXPERTS}.{short}")
    return found


def _stacked(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters [experts, ., .], by their full names."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and f".{name}".split(".")[-2] == EXPERTS:
            yield name, parameter


class Adapted(NamedTuple):
    name: str  # of the weight in the plain model
    weight: nn.Parameter
    layer: LoraLayer


def adapted(model: nn.Module, at: str = "") -> list[Adapted]:
    """The weights that have an adapter. `at`: where the module is, if it is a part of a model."""
    found = []
    for name, layer in model.named_modules(prefix=at):
        if isinstance(layer, LoraLayer):
            own = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            weight: Any = getattr(layer.get_base_layer(), own)
            found.append(Adapted(f"{plain_name(name)}.{own}", weight, layer))
    return found


def merged_bytes(model: nn.Module) -> int:
    """Of the weights that a pass in training makes and keeps: adapters of experts are added to copies."""
    return sum(each.weight.nbytes for each in adapted(model) if isinstance(each.layer, ParamWrapper))


@torch.no_grad()
def merged(model: nn.Module, at: str = "") -> dict[str, torch.Tensor]:
    """The state of the model with W + (alpha / rank) B A for each weight W that has an adapter.

    Tensors without one are the model's own storage. `at`: where the module is, if it is a part of a model.
    """
    state = model.state_dict(prefix=f"{at}." if at else "").items()
    weights = {plain_name(name): tensor for name, tensor in state if ".lora_" not in name}
    for name, base, layer in adapted(model, at):
        weight = base.to(torch.promote_types(base.dtype, torch.float32))
        for adapter in layer.active_adapters:
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        weights[name] = weight.to(base.dtype)
    return weights


@torch.no_grad()
def fold(model: PreTrainedModel) -> None:
    """Merge the adapters into the model's own weights, in place: a plain one, all of it trainable."""
    weights = merged(model)
    for name, weight, _ in adapted(model):
        weight.data = weights[name]
    for name, module in [*model.named_modules()]:
        if isinstance(module, LoraLayer) and not name.endswith(".base_layer"):
            model.set_submodule(name, module.get_base_layer())
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def plain_name(name: str) -> str:
    """Of a weight in the plain model. Adapters of experts lie one around the other, which the name shows."""
    return f"{name}.".replace("base_layer.", "")[:-1]

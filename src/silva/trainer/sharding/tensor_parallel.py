"""Tensor parallel (Shoeybi et al. 2019): each rank computes with a part of every linear layer's weight.

    attention, MLP     first layers by columns (a rank has its heads), last ones by rows, whose results add up
    LoRA               A of a layer by columns and B of one by rows are whole; their other half is cut
    embeddings, head   by the vocabulary
    norms              whole; those of the heads see the heads of their rank

Which layer is which, transformers says for each family. Every parameter becomes a DTensor, also where it is
whole, so that optimizer, norm and checkpoint see one kind.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from silva.errors import CapabilityError

COLUMNS, ROWS, OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
ADAPTERS = (".lora_A.", ".lora_B.", ".base_layer")


class _Whole(ParallelStyle):
    """The same computation on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(module: nn.Module, given: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
                else x
                for x in given
            )

        def after(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, None, before, after)


def styles(model: PreTrainedModel, ranks: int) -> dict[nn.Module, ParallelStyle]:
    """How each module with parameters of its own is divided among so many ranks.

    Raises:
        CapabilityError: the family has a layer that cannot be divided, or too few heads.
    """
    text: Any = model.config.get_text_config()
    plan: dict[str, str] = text.base_model_tp_plan or {}
    if not plan:
        raise CapabilityError(
            f"trainer.parallel.tp = {ranks}: transformers does not say how {text.model_type} is divided; "
            "expected 1"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, what)) % ranks:
            raise CapabilityError(
                f"trainer.parallel.tp = {ranks}: the model has {what} = {heads}; expected a divisor of it"
            )
    found: dict[nn.Module, ParallelStyle] = {}
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            found[module] = _style(model, module, name, plan)
    return found


def _style(model: PreTrainedModel, module: nn.Module, name: str, plan: dict[str, str]) -> ParallelStyle:
    if module is model.get_input_embeddings():
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if module is model.get_output_embeddings():
        return ColwiseParallel(output_layouts=Replicate())
    plain = name
    for mark in ADAPTERS:
        plain = plain.partition(mark)[0]
    prefix = f"{model.base_model_prefix}."
    kind = next((kind for key, kind in plan.items() if fnmatch.fnmatchcase(plain, prefix + key)), "")
    if kind == COLUMNS:
        return _Whole() if ".lora_A." in name else ColwiseParallel()
    if kind == ROWS:
        return _Whole() if ".lora_B." in name else RowwiseParallel()
    if kind == OF_HEADS:
        return SequenceParallel(sequence_dim=2, use_local_output=True)  # [rows, tokens, heads, d]
    if not kind and all(p.dim() < 3 for p in module.parameters(recurse=False)):
        return _Whole()
    raise CapabilityError(
        f"trainer.parallel.tp: {name} of {model.config.model_type} is divided in transformers as "
        f"{kind or 'experts'}, which Silva does not do; expected tp = 1"
    )


def divide_tensors(part: nn.Module, mesh: DeviceMesh, chosen: dict[nn.Module, ParallelStyle]) -> None:
    """Divide what `part` holds and is not divided yet, in place."""
    for module in [*part.modules()]:
        style = chosen.pop(module, None)
        if style is None:
            continue
        trained = {name: p.requires_grad for name, p in module.named_parameters(recurse=False)}
        parallelize_module(module, mesh, style)
        for name, requires in trained.items():  # some styles make every parameter a trained one
            module.get_parameter(name).requires_grad_(requires)

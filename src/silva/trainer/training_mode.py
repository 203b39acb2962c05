"""Train what is sampled: in train mode, switch on only what was configured.

A model's own dropout (and layer drop, and a router's noise) is off in the sampler. If it were on in training,
the ratio of probabilities would differ from 1 before anything was learned. Two things are on: dropout of
LoRA's adapters, which `[model.lora]` sets, and gradient checkpointing, which transformers has in train mode
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel


@contextmanager
def training_mode(model: PreTrainedModel) -> Iterator[None]:
    """For the forward and backward pass of an update; the model is in eval mode before and after it."""
    switched: list[nn.Module] = [
        dropout
        for layer in model.modules()
        if isinstance(layer, BaseTunerLayer)
        for dropout in layer.lora_dropout.modules()  # type: ignore[union-attr]
    ]
    switched += _checkpointed(model)
    for module in switched:
        module.training = True  # not train(), which reaches the modules below as well
    try:
        yield
    finally:
        for module in switched:
            module.training = False


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Layers keep only their inputs and are computed again in the backward pass, inside `training_mode`."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in _checkpointed(model):
        layer._gradient_checkpointing_func = partial(_checkpoint, layer, layer._gradient_checkpointing_func)


def _checkpointed(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


def _checkpoint(layer: nn.Module, way: Callable[..., Any], forward: Callable[..., Any], *inputs: Any) -> Any:
    def in_eval_mode(*inputs: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            return forward(*inputs)
        finally:
            layer.training = before

    return way(in_eval_mode, *inputs)

"""Which experts a token goes to in a mixture of experts: recorded in sampling, replayed in training.

A router gives each expert a probability, sends a token to the k likeliest and weighs what they say:

    logits = W x      p = softmax(logits)      chosen = top k of p      weights = p[chosen]

Some families divide the weights by their sum. Sampler and trainer compute the logits with other kernels, in
another type, or from weights that have changed. Where two experts are about as likely the choice differs, and
the token goes through other parameters. With rollout routing replay (R3, arXiv:2510.11370) `chosen` is what
the sampler chose, and the weights are what the current logits give to it (divided by their sum they are a
softmax over the chosen, as in the paper), so that the gradient flows into the router as before.

This is the one place that reaches into transformers' routers: modules that return (logits, weights, chosen).
A family whose routers choose in another way is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from silva.errors import ModelError, RecordError
from silva.models.adapters import EXPERTS
from silva.routes import signed

TRIED = 16  # tokens


@dataclass(frozen=True)
class ExpertRouter:
    module: nn.Module
    layer: int
    normalised: bool  # weights are divided by their sum


class Routing:
    """The routers of a model, in the order of its layers.

    Raises:
        ModelError: the model has no experts, or routers that choose them in another way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        family = model.config.model_type
        owners = [name.rpartition(".") for name, _ in model.named_modules()]
        owners = [each for each in owners if each[2] == EXPERTS]
        if not owners:
            raise ModelError(
                f"a model of the family {family} has no experts whose choice could be replayed; expected a "
                "mixture of experts such as Qwen3-MoE, or trainer.replay_routing = false"
            )
        self.routers = tuple(_router(model, name, family) for name, _, _ in owners)
        first: Any = self.routers[0].module
        self.experts, self.k = int(first.weight.shape[0]), int(first.top_k)
        self.layers = tuple(router.layer for router in self.routers)
        self.stored = (
            torch.uint8 if self.experts <= 256 else torch.int16
        )  # what holds the number of an expert
        self.model_layers = int(model.config.get_text_config().num_hidden_layers)

    def known(self, routes: np.ndarray | None, count: int, whose: str) -> np.ndarray:
        """Routes of `count` tokens as [count, layers, k] int32, -1 where nothing is known.

        Args:
            routes: [count, layers, k] of the layers with experts, or of all layers of the model; None:
                nothing is known.

        Raises:
            RecordError: they are not this model's.
        """
        shape = (count, len(self.layers), self.k)
        if routes is None:
            return np.full(shape, -1, np.int32)
        if routes.ndim == 3 and routes.shape[1] == self.model_layers != len(
            self.layers
        ):  # as vLLM gives them
            routes = routes[:, list(self.layers)]
        if routes.shape != shape:
            raise RecordError(f"routes of {whose}: got {list(routes.shape)}, expected {list(shape)}")
        found = signed(routes)
        if (most := int(found.max(initial=-1))) >= self.experts:
            raise RecordError(f"routes of {whose}: got expert {most}, expected 0 to {self.experts - 1}")
        return found

    @contextmanager
    def recorded(self) -> Iterator[list[torch.Tensor]]:
        """Collects what routers choose in a pass: [tokens, k] int64 of each layer in turn."""
        found: list[torch.Tensor] = []

        def hook(module: nn.Module, given: Any, output: tuple[torch.Tensor, ...]) -> None:
            found.append(output[2])

        with self.hooked([hook] * len(self.routers)):
            yield found

    @contextmanager
    def hooked(self, hooks: list[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for router, hook in zip(self.routers, hooks, strict=True):
                stack.callback(router.module.register_forward_hook(hook).remove)
            yield


@dataclass
class ReplayedRoutes:
    """What routers do in the passes of a batch.

    Attributes:
        experts: [N, layers, k] int64 for the N tokens of the batch; -1: the router chooses.
        tokens: which of them the next pass computes.
    """

    routing: Routing
    experts: torch.Tensor
    tokens: slice = field(default_factory=lambda: slice(None))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Forward and backward passes belong within: checkpointed layers are computed again in the latter."""
        with self.routing.hooked([partial(self._choose, n) for n in range(len(self.routing.routers))]):
            yield

    def _choose(
        self, number: int, module: nn.Module, given: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        logits, weights, own = output
        told = self.experts[self.tokens, number]
        chosen = torch.where(told >= 0, told, own)
        found = _weights(logits, chosen, self.routing.routers[number].normalised)
        return logits, found.to(weights.dtype), chosen


def _weights(logits: torch.Tensor, chosen: torch.Tensor, normalised: bool) -> torch.Tensor:
    """logits [N, experts], chosen [N, k] -> [N, k] in float32, as transformers computes them."""
    found = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return found / found.sum(-1, keepdim=True) if normalised else found


def _router(model: PreTrainedModel, owner: str, family: str) -> ExpertRouter:
    """The router beside some experts, which is tried: `_weights` must give what it gives."""
    module = getattr(model.get_submodule(owner), "gate", None)
    normalised = _is_normalised(module) if module is not None else None
    if module is None or normalised is None:
        shown = type(module).__name__ if module is not None else "none"
        raise ModelError(
            f"a model of the family {family} has routers ({shown} at {owner}) that do not choose the largest "
            "of a softmax, so that their choice cannot be replayed; expected those of Qwen3-MoE, Qwen2-MoE, "
            "OLMoE or Mixtral, or trainer.replay_routing = false"
        )
    parts = owner.split(".")
    layer = next(int(part) for part in parts if part.isdecimal())
    return ExpertRouter(module, layer, normalised)


@torch.no_grad()
def _is_normalised(module: nn.Module) -> bool | None:
    """None: it is another kind of router."""
    weight = getattr(module, "weight", None)
    if not torch.is_tensor(weight) or not hasattr(module, "top_k"):
        return None
    generator = torch.Generator().manual_seed(0)
    if weight.is_meta:  # any weights tell its kind, if no expert is certain
        module = copy.deepcopy(module).to_empty(device="cpu")
        weight = module.get_parameter("weight").normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        for buffer in module.buffers():
            buffer.normal_(generator=generator)
    inputs = torch.randn(TRIED, weight.shape[-1], generator=generator).to(weight)
    output = module(inputs)
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    logits, weights, chosen = output
    if chosen.shape != weights.shape or logits.shape != (TRIED, weight.shape[0]):
        return None
    largest = logits.topk(chosen.shape[-1]).values
    if not torch.equal(logits.gather(-1, chosen).sort().values, largest.sort().values):
        return None  # a bias, or groups of experts, that decide too
    for normalised in (False, True):
        if torch.allclose(_weights(logits, chosen, normalised).to(weights.dtype), weights, rtol=1e-2):
            return normalised
    return None

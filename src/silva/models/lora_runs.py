"""Adapters of many runs over one model: each run's are added for its own tokens of a pass.

    x [all tokens] ── linear layer, once ──> y
    x[tokens of a] ── A and B of a ────────> y[tokens of a] +=
    x[tokens of b] ── A and B of b ────────> y[tokens of b] +=

The layers stay as they are, under their own names; a hook adds to what they give. Products of a run's
adapters, forward and backward, have the shapes that they have without the others, so no sum over tokens mixes
runs. Whether a token of the layer's own product has the same bits in any company is a matter of how many
there are (row_rules.py): who makes the pass sees to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from silva.errors import ModelError
from silva.models.activation import activations
from silva.models.adapters import adapted
from silva.models.weight_gradient import add_product
from silva.ports import derive

Span = tuple[str | None, int, int]
"""A run and its tokens [start, stop) of a flat batch; None: the plain model."""


@dataclass(frozen=True)
class LowRank:
    """Of one layer and one run: `scale` * B A is added to the layer's weight."""

    A: nn.Parameter  # [rank, in]
    B: nn.Parameter  # [out, rank]
    scale: float


def named(adapters: Mapping[str, LowRank]) -> dict[str, nn.Parameter]:
    """Parameters of adapters: "<layer>.lora_A.weight" and "<layer>.lora_B.weight"."""
    sides = {"lora_A": "A", "lora_B": "B"}
    return {
        f"{path}.{part}.weight": getattr(adapter, side)
        for path, adapter in adapters.items()
        for part, side in sides.items()
    }


def adapters_in(model: PreTrainedModel) -> dict[str, LowRank]:
    """The adapters that PEFT has put into a model, by the names of their layers in the plain one.

    Raises:
        ModelError: one is of experts, whose weights are parameters of several layers.
    """
    found = {}
    for name, _, layer in adapted(model):
        if isinstance(layer, ParamWrapper):
            raise ModelError(
                f"model.lora.targets: got experts ({name}), which runs on one base cannot adapt; expected "
                "linear layers alone"
            )
        (one,) = layer.active_adapters
        a: Any = layer.lora_A[one].weight
        b: Any = layer.lora_B[one].weight
        found[name.removesuffix(".weight")] = LowRank(a, b, layer.scaling[one])
    return found


class LoraRuns:
    """The adapters (Hu et al. 2021) of any number of runs, installed over a plain model, which is frozen.

    Several may be installed over one model: each acts in its own passes only.

    Args:
        targets: last parts of the names of the linear layers that runs may adapt; the head by its name too.
        in_place: `backward` adds to the gradients of the adapters itself (weight_gradient.py), in place of
            returning them.

    Raises:
        ModelError: a target is no linear layer of the model.
    """

    def __init__(self, model: PreTrainedModel, targets: Sequence[str], *, in_place: bool = False) -> None:
        self._in_place = in_place
        self._head = model.get_output_embeddings()
        self.layers = _linears(model, targets)
        self._runs: dict[str, dict[str, LowRank]] = {}
        self._spans = ContextVar[tuple[Span, ...]](f"spans of {id(self)}", default=())
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, layer in self.layers.items():
            layer.register_forward_hook(self._hook(name))
        for module in activations(model):
            module.forward = self._by_span(module.forward)  # type: ignore[method-assign]

    def add(
        self,
        name: str,
        rank: int,
        alpha: float,
        seed: int,
        *,
        attn: bool = True,
        mlp: bool = True,
        unembed: bool = False,
    ) -> dict[str, nn.Parameter]:
        """Give a run fresh adapters: A as PEFT draws it, from `seed`, and B = 0.

        Args:
            attn: adapt the layers of attention.
            mlp: adapt all others but the head.
            unembed: adapt the head.

        Returns:
            See `parameters`.

        Raises:
            ModelError: the run has adapters, the rank is below 1, or there is no layer for it.
        """
        if name in self._runs:
            raise ModelError(f"run {name}: it has adapters, expected the name of a new run")
        if rank < 1:
            raise ModelError(f"run {name}: got rank {rank}, expected 1 or more")
        wanted = {"attn": attn, "mlp": mlp, "unembed": unembed}
        chosen = {path: layer for path, layer in self.layers.items() if wanted[self.kind(path)]}
        if not chosen:
            raise ModelError(f"run {name}: got no layer to adapt, expected attn, mlp or unembed")
        self._runs[name] = {path: _fresh(path, layer, rank, alpha, seed) for path, layer in chosen.items()}
        return self.parameters(name)

    def adopt(self, name: str, adapters: Mapping[str, LowRank]) -> None:
        """Take a run with adapters that there are already, by the names of the layers in the plain model.

        Raises:
            ModelError: a layer is none of those that runs may adapt.
        """
        if unknown := adapters.keys() - self.layers.keys():
            raise ModelError(f"run {name}: got an adapter of {min(unknown)}, expected one of a target")
        self._runs[name] = dict(adapters)

    def kind(self, path: str) -> str:
        """Which of the arguments of `add` a layer belongs to."""
        if self.layers[path] is self._head:
            return "unembed"
        return "attn" if "attn" in path or "attention" in path else "mlp"

    def remove(self, name: str) -> None:
        del self._runs[name]

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Of a run, by the names of the layers in the plain model: "<layer>.lora_A.weight" and "lora_B"."""
        return named(self._runs[name])

    @contextmanager
    def rows(self, spans: Sequence[Span]) -> Iterator[None]:
        """Of the pass within, forward and backward: whose each token of its flat batch is.

        Raises:
            ModelError: a run has no adapters, or spans are not in the order of the tokens.
        """
        edges = [edge for _, start, stop in spans for edge in (start, stop)]
        if edges != sorted(edges) or any(edge < 0 for edge in edges):
            raise ModelError(f"rows: got {list(spans)}, expected spans one after the other")
        if unknown := [name for name, *_ in spans if name is not None and name not in self._runs]:
            raise ModelError(f"rows: got the runs {', '.join(unknown)}, which have no adapters")
        token = self._spans.set(tuple(spans))
        try:
            yield
        finally:
            self._spans.reset(token)

    def _hook(self, path: str) -> Callable[..., torch.Tensor | None]:
        def add(_: nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor | None:
            mine = [
                (adapter, slice(start, stop))
                for name, start, stop in self._spans.get()
                if name is not None and (adapter := self._runs[name].get(path)) and stop > start
            ]
            return _added(out, inputs[0], mine, self._in_place) if mine else None

        return add

    def _by_span(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        """In training torch computes what is left over of a tensor's vectors in another way (activation.py),
        so each run's numbers are a tensor of their own."""

        def apply(x: torch.Tensor) -> torch.Tensor:
            spans = self._spans.get()
            if len(spans) < 2 or torch.is_inference_mode_enabled():
                return function(x)
            flat = x.flatten(0, -2)
            cuts = sorted({0, len(flat), *(start for _, start, _ in spans)})
            parts = flat.split([stop - start for start, stop in itertools.pairwise(cuts)])
            return torch.cat([function(part) for part in parts]).view(x.shape)

        return apply


def _linears(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Module]:
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    found = {name: m for name, m in linear.items() if name.rpartition(".")[2] in targets}
    if missing := set(targets) - {name.rpartition(".")[2] for name in found}:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ModelError(
            f"adapters: got the targets {', '.join(sorted(missing))}, expected linear layers of this model: "
            f"{', '.join(known)}"
        )
    return found


def _fresh(path: str, layer: Any, rank: int, alpha: float, seed: int) -> LowRank:
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    outputs, inputs = weight.shape
    drawn = torch.Generator().manual_seed(derive(seed, "lora", path))
    a = torch.empty(rank, inputs)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=drawn)
    b = torch.zeros(outputs, rank, dtype=wide, device=weight.device)
    return LowRank(nn.Parameter(a.to(weight.device, wide)), nn.Parameter(b), alpha / rank)


def _added(
    out: torch.Tensor, x: torch.Tensor, mine: list[tuple[LowRank, slice]], in_place: bool
) -> torch.Tensor:
    weights = [weight for adapter, _ in mine for weight in (adapter.A, adapter.B)]
    plan = [(adapter.scale, rows) for adapter, rows in mine]
    return _Added.apply(out, x, plan, in_place, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Added(torch.autograd.Function):
    """out + scale * (x A^T) B^T for each run's rows; one function, so that no run's rows are copied into a
    tensor of all rows for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        x: torch.Tensor,
        plan: list[tuple[float, slice]],
        in_place: bool,
        *weights: nn.Parameter,
    ) -> torch.Tensor:
        made, inner = out.clone().flatten(0, -2), []
        for (scale, rows), a, b in zip(plan, weights[::2], weights[1::2], strict=True):
            inner.append(x.flatten(0, -2)[rows].to(a.dtype) @ a.T)
            made[rows] += (inner[-1] @ b.T) * scale
        ctx.plan, ctx.in_place = plan, in_place
        ctx.weights = weights  # saved, they would come back from a checkpoint as tensors of their own
        ctx.save_for_backward(x, *inner)
        return made.view(out.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (x, *inner), weights = ctx.saved_tensors, ctx.weights
        flat, of_x = grad.flatten(0, -2), x.new_zeros(x.shape) if ctx.needs_input_grad[1] else None
        found: list[torch.Tensor | None] = []
        for (scale, rows), a, b, h in zip(ctx.plan, weights[::2], weights[1::2], inner, strict=True):
            of_delta = flat[rows].to(a.dtype) * scale
            of_inner, inputs = of_delta @ b, x.flatten(0, -2)[rows].to(a.dtype)
            if ctx.in_place:
                add_product(a, of_inner, inputs)
                add_product(b, of_delta, h)
                found += [None, None]
            else:
                found += [of_inner.T @ inputs, of_delta.T @ h]
            if of_x is not None:
                of_x.flatten(0, -2)[rows] = (of_inner @ a).to(x.dtype)
        return grad, of_x, None, None, *found

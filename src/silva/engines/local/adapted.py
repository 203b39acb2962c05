"""Adapters of LoRA for the requests of one step: each request has its own, or none.

    rows of a step   | a a a a a | b b b | c c c c c c c |     x W      once for all of them
    their adapter    |   none    | first |    second     |     + x A B  for the rows of each

The products of the model are shared, so a step with many adapters takes little longer than with none. Those
of adapters are small; they are filled up with the rows beside them as a `RowRule` says, so that a request has
the bits that it would have alone. An adapter is a copy: what it was made from may be trained further. (In
training, models/lora_runs.py does the same with gradients.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.errors import EngineError
from silva.models.prepacked import JoinedLinear
from silva.models.row_rules import ANY, RowRule, of_products, shape_of


class AddedProduct(NamedTuple):
    """What is added to some outputs of a product: scale * x [N, in] A^T B^T.

    Computed as PEFT does it, so that a model with the adapter in it samples the same bits. A scale that is a
    power of two, which rounds nothing, is in B already.
    """

    outputs: slice
    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float


@dataclass(frozen=True, eq=False)
class StepAdapter:
    """A version of an adapter, laid out for steps.

    Attributes:
        number: its own, never given twice; 0 stands for the model alone.
        rule: how many rows its products have.
        steady: whether a row has the same bits under this rule.
    """

    name: str
    version: int
    number: int
    added: Mapping[JoinedLinear, Sequence[AddedProduct]]
    rule: RowRule
    steady: bool


AdapterSpan = tuple[StepAdapter, int, int]
"""An adapter and the rows [start, stop) of a step that have it."""


class _Part(NamedTuple):
    """Rows of a step that have the same adapter."""

    adapter: StepAdapter
    window: slice  # rows to compute: these and some beside them
    inner: slice  # these rows in the window
    rows: slice


class AdaptedLinears:
    """The linear layers of a model, to which steps add adapters.

    Args:
        called: layers of the model that are called as these and not as modules.
    """

    def __init__(self, model: nn.Module, called: Sequence[JoinedLinear], device: torch.device) -> None:
        self._device = device
        self._numbers = itertools.count(1)
        self._parts: Sequence[_Part] = ()
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = {n: m for m, n in self._names.items() if isinstance(m, nn.Linear | Conv1D)}
        self._places: dict[str, tuple[JoinedLinear, int]] = {}  # the product, and the first of its outputs
        for group in called:
            self._register(group)

    def _register(self, group: JoinedLinear) -> None:
        first = 0
        for layer, (outputs, _) in zip(group.layers, group.shapes, strict=True):
            self._places[self._names[layer]] = group, first
            first += outputs

    def _place(self, name: str) -> tuple[JoinedLinear, int]:
        """Of a layer, which from now on may have adapters; one that was called as a module is called as a
        product."""
        if name not in self._places:
            layer: Any = self._layers[name]
            single = JoinedLinear(layer)
            self._register(single)
            layer.forward = single.__call__
        group, first = self._places[name]
        group.added = functools.partial(self._add, group)
        return group, first

    @torch.inference_mode()
    def laid_out(
        self, name: str, version: int, parameters: Mapping[str, torch.Tensor], scale: float
    ) -> StepAdapter:
        """A copy of an adapter.

        Args:
            parameters: A [r, in] as "<layer>.lora_A.weight" and B [out, r] as "<layer>.lora_B.weight" of some
                layers; scale * B A is added to the weight of each.

        Raises:
            EngineError: the model has no such linear layer, or one of other sizes.
        """
        pairs = {layer: self._pair(name, layer, parameters) for layer in _layers_of(name, parameters)}
        added: dict[JoinedLinear, list[AddedProduct]] = {}
        exact = abs(math.frexp(scale)[0]) == 0.5
        for layer, (a, b) in pairs.items():
            group, first = self._place(layer)
            outputs = slice(first, first + len(b))
            of_layer = (
                AddedProduct(outputs, a, b.mul_(scale), 1.0) if exact else AddedProduct(outputs, a, b, scale)
            )
            added.setdefault(group, []).append(of_layer)
        products = {product for pair in pairs.values() for product in pair}
        rule: RowRule | None = ANY
        if self._device.type == "cpu":
            shapes = frozenset((*product.shape, product.dtype) for product in products)
            rule = of_products(shapes, torch.get_num_threads())
        return StepAdapter(name, version, next(self._numbers), added, rule or ANY, rule is not None)

    def _pair(
        self, name: str, layer: str, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of A and B."""
        module: Any = self._layers.get(layer)
        if module is None:
            raise EngineError(
                f"adapter {name}: got {layer}, expected the name of a linear layer of the model"
            )
        a, b = (parameters.get(f"{layer}.lora_{side}.weight", torch.empty(0)) for side in "AB")
        inputs, outputs = shape_of(module)
        if a.shape[1:] != (inputs,) or b.shape != (outputs, len(a)):
            raise EngineError(
                f"adapter {name}, {layer}: got A {[*a.shape]} and B {[*b.shape]}, expected [r, {inputs}] "
                f"and [{outputs}, r]"
            )
        wide = torch.promote_types(a.dtype, torch.float32)
        a, b = (each.detach().to(self._device, wide, copy=True).contiguous() for each in (a, b))
        return a, b

    def least(self, spans: Sequence[AdapterSpan]) -> int:
        """How many rows a step must have for these."""
        return max((adapter.rule.padded(stop - start) for adapter, start, stop in spans), default=0)

    @contextmanager
    def rows(self, spans: Sequence[AdapterSpan], size: int) -> Iterator[None]:
        """The rows [start, stop) of a step of so many have this adapter, and those of no span none."""
        parts = []
        for adapter, start, stop in spans:
            count = adapter.rule.padded(stop - start)
            first = min(start, size - count)
            window, inner = slice(first, first + count), slice(start - first, stop - first)
            parts.append(_Part(adapter, window, inner, slice(start, stop)))
        self._parts = parts
        try:
            yield
        finally:
            self._parts = ()

    def _add(self, group: JoinedLinear, x: torch.Tensor, made: torch.Tensor) -> None:
        for adapter, window, inner, rows in self._parts:
            for outputs, a, b, scale in adapter.added.get(group, ()):
                more = F.linear(F.linear(x[window].to(a.dtype), a), b)
                if scale != 1:
                    more.mul_(scale)
                made[rows, outputs].add_(more[inner])


def _layers_of(name: str, parameters: Mapping[str, torch.Tensor]) -> list[str]:
    layers: dict[str, None] = {}
    for each in parameters:
        layer, _, side = each.rpartition(".lora_")
        if side not in ("A.weight", "B.weight"):
            raise EngineError(f"adapter {name}: got {each}, expected <layer>.lora_A.weight or lora_B.weight")
        layers[layer] = None
    return [*layers]


def adapter_spans(owners: Iterable[tuple[StepAdapter | None, int]]) -> list[AdapterSpan]:
    """Of rows that lie side by side: the adapter of each so many; those of one adapter come together."""
    found: list[AdapterSpan] = []
    stop = 0
    for adapter, count in owners:
        start, stop = stop, stop + count
        if found and found[-1][0] is adapter:
            start = found.pop()[1]
        if adapter is not None:
            found.append((adapter, start, stop))
    return found

"""Linear layers on copies of their weights that are laid out for fast kernels, on CPU.

Layers of one input (the query, key and value projections, say) can share a copy and so a product.

    kernel   weights    processors      bits of a product         a weight that has changed since
    MKL      float32    others          those of the plain one    takes the plain way until it is
                                                                  packed again
    oneDNN   float32    AMD's           its own, for a row the    is packed again at once
                                        same in any company
    oneDNN   bfloat16   that multiply   those of the plain one    as with MKL
                        bfloat16

MKL is not made for AMD's processors: oneDNN takes half of its time there for 8 rows. A shape whose bits are
not so on the machine at hand is left alone. Nothing is packed where products with the bits of plain ones
are not faster, which changes no bit. Of the others a measured time must not decide, so the processor's maker
does.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from silva.models.processor import multiplies_bfloat16
from silva.models.products import LARGE, made_by_amd, of_inputs
from silva.models.row_rules import ANY, RowRule, counts_of, holds, probed, random_numbers
from silva.models.weight_gradient import add_product, add_sum

Changes = Mapping[torch.Tensor, torch.Tensor]
"""New numbers of parameters that still have their old ones."""
ROWS = 256  # what a copy is laid out for; it serves any number of rows
_TRIED, _TRIED_ROWS, _ROUNDS = 8, 8, 5  # layers and rows of a speed trial, and how often
_CHECKED = (1, 3, 8, 17, ROWS, ROWS + 1)


@dataclass(frozen=True)
class Kernel:
    """A way to multiply by a packed weight [out, in].

    `exact`: its products have the bits of plain ones.
    """

    name: str
    exact: bool
    pack: Callable[[torch.Tensor], torch.Tensor]
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Of x [N, in], the packed weight, a tensor of the weight's shape, and a bias."""


MKL = Kernel(
    "MKL",
    True,
    lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS),
    # The last argument says which number of rows takes the packed kernel: all of them do.
    lambda x, packed, shape, bias: torch.ops.mkl._mkl_linear.default(x, packed, shape, bias, len(x)),
)
ONEDNN = Kernel(
    "oneDNN",
    False,
    lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, ROWS),
    lambda x, packed, _, bias: torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], ""),
)

BFLOAT16 = dataclasses.replace(ONEDNN, exact=True)
"""For weights of bfloat16, whose plain products are oneDNN's too."""


class JoinedLinear:
    """Layers of the same input, called together: [..., in] -> [..., the sum of their outputs]."""

    kernel: Kernel | None = None
    added: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    """Given the inputs [N, in], adds to the outputs [N, out] in place (adapted.py)."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        self._plain: list[Callable[[torch.Tensor], torch.Tensor]] = [layer.forward for layer in layers]
        self.packed: torch.Tensor | None = None
        self._versions: list[int] = []  # torch counts the changes of a tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and all(type(layer) is nn.Linear for layer in self.layers):
            made = _Joined.apply(x, self, *(layer.weight for layer in self.layers))  # type: ignore[no-untyped-call]
        else:
            made = self._made(x)
        if self.added is not None:
            self.added(x.flatten(0, -2), made.flatten(0, -2))
        return made

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is None:
            return self.plain(x)
        if self.packed is None or self._changed():
            if self.kernel.exact:
                return self.plain(x)
            self.pack()
        if x.ndim == 2:
            return self._product(x)
        return self._product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.kernel is not None and self.packed is not None
        return self.kernel.product(x, self.packed, self._shape, self._bias)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        made = [plain(x) for plain in self._plain]
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each layer."""
        linears: Any = self.layers
        return tuple(tuple(linear.weight.shape) for linear in linears)

    @property
    def dtype(self) -> torch.dtype:
        linear: Any = self.layers[0]
        return linear.weight.dtype  # type: ignore[no-any-return]

    def pack(self) -> None:
        """Make the copy, or make it again if a weight has changed. Who multiplies by these very weights
        elsewhere (sampler and trainer of one process) has the same one."""
        if self.kernel is not None and (self.packed is None or self._changed()):
            other = _LAST.get(self._key)
            same = other is not None and (other.kernel, other._key) == (self.kernel, self._key)
            copy = other.current if other is not None and same else None
            self.take(self.laid_out({}) if copy is None else copy)

    @property
    def current(self) -> torch.Tensor | None:
        """The copy, if it is of the weights as they are now."""
        return None if self._changed() else self.packed

    @property
    def _key(self) -> tuple[int, ...]:  # tensors that are alive have numbers of their own
        linears: Any = self.layers
        return tuple(id(linear.weight) for linear in linears)

    def laid_out(self, changes: Changes) -> torch.Tensor:
        """The copy of the weights after these changes."""
        assert self.kernel is not None
        linears: Any = self.layers  # only plain ones are packed
        weights = [changes.get(linear.weight, linear.weight).detach().to(self.dtype) for linear in linears]
        return self.kernel.pack(weights[0] if len(weights) == 1 else torch.cat(weights))

    def take(self, packed: torch.Tensor) -> None:
        """Multiply by a copy of the weights as they are now."""
        linears: Any = self.layers
        weights = [linear.weight for linear in linears]
        shape = (sum(map(len, weights)), weights[0].shape[1])
        self.packed, self._shape = packed, weights[0].detach().new_empty(1).expand(shape)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._versions = self._counts()
        _LAST[self._key] = self

    def changed_by(self, changes: Changes) -> bool:
        linears: Any = self.layers
        return any(linear.weight in changes for linear in linears)

    def _changed(self) -> bool:
        return self._versions != self._counts()

    def _counts(self) -> list[int]:
        linears: Any = self.layers
        return [p._version for linear in linears for p in (linear.weight, linear.bias) if p is not None]


_LAST = WeakValueDictionary[tuple[int, ...], JoinedLinear]()
"""Of those over the same weights, the one that had its copy last."""
Layouts = list[tuple[JoinedLinear, Callable[[], torch.Tensor]]]


class _Joined(torch.autograd.Function):
    """The product of a `JoinedLinear`, and the gradient of plain ones; weights and biases add theirs to what
    is there, as `gradients.summed_in_place` says. Weights are arguments only to make autograd ask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: JoinedLinear, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.group = group
        return group._made(x)

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (x,), linears, into = ctx.saved_tensors, ctx.group.layers, None
        parts = out.split([len(linear.weight) for linear in linears], -1)
        for linear, part in zip(linears, parts, strict=True):
            rows = part.flatten(0, -2)
            if linear.weight.requires_grad:
                add_product(linear.weight, rows, x.flatten(0, -2))
            if linear.bias is not None and linear.bias.requires_grad:
                add_sum(linear.bias, rows)
            if ctx.needs_input_grad[0]:
                more = of_inputs(rows, linear.weight)
                into = more if into is None else into.add_(more)
        return (None if into is None else into.view(x.shape), None, *(None for _ in linears))


class PrepackedLinears:
    """The large linear layers of a model on CPU in float32, or in bfloat16 if the processor multiplies it.

    `refresh` makes the copies, `drop` frees them.

    Attributes:
        kernel: what multiplies; None: nothing is packed.

    Args:
        called: layers of the model that are called as these and not as modules.
        rule: how many rows they are called with.
    """

    def __init__(self, model: nn.Module, called: Sequence[JoinedLinear] = (), rule: RowRule = ANY) -> None:
        groups = [group for group in called if _packable(group.layers)]
        taken = {layer for group in groups for layer in group.layers}
        singles = {m: JoinedLinear(m) for m in model.modules() if m not in taken and _packable([m])}
        groups += singles.values()
        narrow = any(group.dtype == torch.bfloat16 for group in groups)
        kernel = BFLOAT16 if narrow else ONEDNN if made_by_amd() else MKL
        check = _exact if kernel.exact else _steady
        for group in groups:
            group.kernel = kernel
        self._all: list[JoinedLinear] = []
        if groups and (not kernel.exact or _faster(groups, rule)):
            of_shapes = {group.shapes: group for group in groups}
            same = {shapes for shapes, group in of_shapes.items() if check(group, rule)}
            self._all = [group for group in groups if group.shapes in same]
        self.kernel = kernel if self._all else None
        for group in groups:
            group.kernel = kernel if group in self._all else None
        for module, group in singles.items():
            if group in self._all:
                module.forward = group.__call__  # type: ignore[method-assign,assignment]

    @property
    def always(self) -> bool:
        """Whether there is no plain way, as its products would have other bits."""
        return self.kernel is not None and not self.kernel.exact

    @property
    def nbytes(self) -> int:
        return sum(group.packed.nbytes for group in self._all if group.packed is not None)

    def layouts(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Layouts:
        """For each layer that these weights change, what makes a copy for `JoinedLinear.take` once the model
        has them; the old ones stay in use."""
        parameters = dict(model.named_parameters())
        changes: Changes = {parameters[name]: tensor for name, tensor in weights.items()}
        made = torch.inference_mode()(JoinedLinear.laid_out)
        return [(group, partial(made, group, changes)) for group in self._all if group.changed_by(changes)]

    def refresh(self) -> None:
        """Copy every weight that has changed since its last copy."""
        for group in self._all:
            group.pack()

    def drop(self) -> None:
        for group in self._all:
            group.packed = None


def _packable(layers: Sequence[nn.Module]) -> bool:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    if not torch.backends.mkl.is_available() or len(linears) < len(layers):
        return False
    weights = [linear.weight for linear in linears]
    if {w.device.type for w in weights} != {"cpu"} or {w.dtype for w in weights} not in _types():
        return False
    large = sum(weight.numel() for weight in weights) >= LARGE
    return large and len({linear.bias is None for linear in linears}) == 1


def _types() -> list[set[torch.dtype]]:
    """Of weights in a group that can be packed here."""
    narrow = multiplies_bfloat16() and torch.backends.mkldnn.is_available()
    return [{torch.float32}, {torch.bfloat16}] if narrow else [{torch.float32}]


@torch.inference_mode()
def _faster(groups: Sequence[JoinedLinear], rule: RowRule) -> bool:
    """Whether packed products are faster here, tried on layers of the commonest shape (not on Zen 3).

    Several layers in turn, because a single weight would stay in the processor's cache.
    """
    (shapes, _), *_ = Counter(group.shapes for group in groups).most_common(1)
    some = [group for group in groups if group.shapes == shapes][:_TRIED]
    x = torch.randn(rule.padded(_TRIED_ROWS), shapes[0][1], dtype=groups[0].dtype)
    ways: list[Callable[[JoinedLinear], object]] = [lambda group: group.plain(x), lambda group: group(x)]
    seconds: list[list[float]] = [[], []]
    for group in some:
        group.pack()
    for _ in range(_ROUNDS):
        for way, times in zip(ways, seconds, strict=True):
            began = time.perf_counter()
            for group in some:
                way(group)
            times.append(time.perf_counter() - began)
    for group in some:
        group.packed = None
    plain, packed = map(statistics.median, seconds)
    return packed < plain


@torch.inference_mode()
def _exact(group: JoinedLinear, rule: RowRule) -> bool:
    """Whether packed products have the bits of plain ones here, for few rows and many."""
    group.pack()
    try:
        inputs = (
            random_numbers((rows, group.shapes[0][1]), group.dtype)
            for rows in sorted({rule.padded(rows) for rows in _CHECKED})
        )
        return all(torch.equal(group(x), group.plain(x)) for x in inputs)
    finally:
        group.packed = None


@torch.inference_mode()
def _steady(group: JoinedLinear, rule: RowRule) -> bool:
    """Whether a row of a packed product has the same bits here in any company, under the rule."""
    outputs, inputs = sum(size for size, _ in group.shapes), group.shapes[0][1]
    row = torch.randn(inputs, generator=torch.Generator().manual_seed(0))
    group.pack()
    try:
        counts = counts_of(inputs, outputs)
        return holds(rule, [probed(lambda rows: group(row.expand(rows, -1).contiguous()), counts)])
    finally:
        group.packed = None

"""Linear layers on copies of their weights that MKL has laid out for its kernels: for sampling on CPU.

Layers of one input (the query, key and value projections, say) can share a copy and so a product. A packed
product has the bits of the plain ones; shapes for which it has not, on the machine at hand, are left alone.
So a copy changes time and nothing else, and a layer whose weight has changed since just takes the plain way
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LEAST = 100_000  # numbers in a weight; small ones stay in the processor's cache anyway
ROWS = 256  # what a copy is laid out for; it serves any number of rows
_CHECKED = (1, 3, 8, 17, ROWS, ROWS + 1)


class JoinedLinear:
    """Layers of the same input, called together: [..., in] -> [..., the sum of their outputs]."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        self._plain: list[Callable[[torch.Tensor], torch.Tensor]] = [layer.forward for layer in layers]
        self.packed: torch.Tensor | None = None
        self._versions: list[int] = []  # torch counts the changes of a tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}  # a copy of the model packs anew: MKL's cannot be copied

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None or not torch.is_inference_mode_enabled() or self._changed():
            made = [plain(x) for plain in self._plain]
            return made[0] if len(made) == 1 else torch.cat(made, -1)
        if x.ndim == 2:
            return _product(x, self.packed, self._shape, self._bias)
        flat = x.reshape(-1, x.shape[-1])
        return _product(flat, self.packed, self._shape, self._bias).view(*x.shape[:-1], -1)

    def pack(self) -> None:
        """Make the copy, or make it anew if a weight has changed."""
        if self.packed is not None and not self._changed():
            return
        linears: Any = self.layers  # only plain ones are packed
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.packed, self._shape = _pack(weight), weight.new_empty(1).expand(weight.shape)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._versions = self._counts()

    def _changed(self) -> bool:
        return self._versions != self._counts()

    def _counts(self) -> list[int]:
        linears: Any = self.layers
        return [p._version for linear in linears for p in (linear.weight, linear.bias) if p is not None]


class PackedLinears:
    """The large linear layers of a model in float32 on CPU. `refresh` makes the copies, `drop` frees them.

    Args:
        called: layers of the model that are called as these and not as modules.
    """

    def __init__(self, model: nn.Module, called: Sequence[JoinedLinear] = ()) -> None:
        self._exact: dict[Any, bool] = {}
        self._all = [group for group in called if self._packable(group.layers)]
        taken = {layer for group in self._all for layer in group.layers}
        for module in model.modules():
            if module not in taken and self._packable([module]):
                single = JoinedLinear(module)
                self._all.append(single)
                module.forward = single.__call__  # type: ignore[method-assign,assignment]

    @property
    def nbytes(self) -> int:
        return sum(group.packed.nbytes for group in self._all if group.packed is not None)

    def refresh(self) -> None:
        """Copy every weight that has changed since its last copy."""
        for group in self._all:
            group.pack()

    def drop(self) -> None:
        for group in self._all:
            group.packed = None

    def _packable(self, layers: Sequence[nn.Module]) -> bool:
        linears = [layer for layer in layers if type(layer) is nn.Linear]
        if not torch.backends.mkl.is_available() or len(linears) < len(layers):
            return False
        weights = [linear.weight.detach() for linear in linears]
        if any(w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
            return False
        if len({linear.bias is None for linear in linears}) > 1 or sum(w.numel() for w in weights) < LEAST:
            return False
        shapes = tuple(w.shape for w in weights)
        if shapes not in self._exact:
            self._exact[shapes] = _exact(weights)
        return self._exact[shapes]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)


def _product(x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    # Only the shape of `weight` is read. The last argument says which number of rows takes the packed
    # kernel: all of them do.
    return torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, len(x))


@torch.inference_mode()
def _exact(weights: Sequence[torch.Tensor]) -> bool:
    """Whether packed products have the bits of plain ones here, for few rows and many."""
    joined, generator = torch.cat(list(weights)), torch.Generator().manual_seed(0)
    packed = _pack(joined)
    inputs = [torch.randn(rows, joined.shape[1], generator=generator) for rows in _CHECKED]
    return all(
        torch.equal(_product(x, packed, joined, None), torch.cat([F.linear(x, w) for w in weights], -1))
        for x in inputs
    )

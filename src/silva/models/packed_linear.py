"""Linear layers on copies of their weights that MKL has laid out for its kernels: for sampling on CPU.

A packed product has the bits of the plain one; shapes for which it has not, on the machine at hand, are left
alone. So a copy changes time and nothing else, and a layer whose weight has changed since just takes the
plain way again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LEAST = 100_000  # numbers in a weight; small ones stay in the processor's cache anyway
ROWS = 64  # what a copy is laid out for; it serves any number of rows
_CHECKED = (1, 3, 8, 17, ROWS, ROWS + 1)


class PackedLinears:
    """The large linear layers of a model in float32 on CPU. `refresh` makes the copies, `drop` frees them."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[_Layer] = []
        if not torch.backends.mkl.is_available():
            return
        exact: dict[torch.Size, bool] = {}
        for module in model.modules():
            if type(module) is not nn.Linear or module.weight.numel() < LEAST:
                continue
            weight = module.weight
            if weight.dtype != torch.float32 or weight.device.type != "cpu":
                continue
            if weight.shape not in exact:
                exact[weight.shape] = _exact(weight)
            if exact[weight.shape]:
                self._layers.append(_Layer(module))
        for layer in self._layers:
            layer.module.forward = layer.forward  # type: ignore[method-assign,assignment]

    @property
    def nbytes(self) -> int:
        return sum(layer.packed.nbytes for layer in self._layers if layer.packed is not None)

    def refresh(self) -> None:
        """Copy every weight that has changed since its last copy."""
        for layer in self._layers:
            layer.refresh()

    def drop(self) -> None:
        for layer in self._layers:
            layer.packed = None


class _Layer:
    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.plain: Callable[[torch.Tensor], torch.Tensor] = module.forward
        self.packed: torch.Tensor | None = None
        self.version = -1  # torch counts the changes of a tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}  # a copy of the model packs anew: MKL's cannot be copied

    def refresh(self) -> None:
        if self.packed is None or self.version != self.module.weight._version:
            self.packed = _pack(self.module.weight.detach())
            self.version = self.module.weight._version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.module.weight
        if self.packed is None or self.version != weight._version or not torch.is_inference_mode_enabled():
            return self.plain(x)
        flat = x.reshape(-1, x.shape[-1])
        return _product(flat, self.packed, weight, self.module.bias).view(*x.shape[:-1], -1)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)


def _product(x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    # The last argument says which number of rows takes the packed kernel: all of them do.
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, len(x))


@torch.inference_mode()
def _exact(weight: torch.Tensor) -> bool:
    """Whether packed products have the bits of plain ones here, for few rows and many."""
    packed, generator = _pack(weight.detach()), torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, weight.shape[1], generator=generator) for rows in _CHECKED]
    return all(torch.equal(_product(x, packed, weight, None), F.linear(x, weight)) for x in inputs)

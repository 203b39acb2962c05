"""How many rows a matrix product needs on this machine for the bits of a row not to depend on the others.

A BLAS chooses its kernel, and how threads share a product, by the shape of the product, and each kernel sums
in an order of its own. So a row computed alone may have other last bits than in a batch. Intel's MKL
has a mode without that (`MKL_CBWR=AUTO,STRICT`), which holds on Intel CPUs only. Elsewhere a few more rows
often suffice: on AMD's Zen 3, float32 rows have equal bits from four rows on, float64 rows in multiples of 4.

How many suffice is probed. Sampling fills its products up to them (models/same_bits.py), and so do
passes of several runs at once (trainer/tenants).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.models.products import by_onednn, of_inputs, product

Product = Callable[[int], torch.Tensor]
"""The product of so many equal rows: [..., rows, n]."""
Shape = tuple[int, int]
"""Inputs and outputs of a linear layer."""
Probed = tuple[Callable[[int], bytes | None], Sequence[int]]


@dataclass(frozen=True, slots=True)
class RowRule:
    """Products of `least` rows or more, in multiples of `multiple`, give every row the same bits."""

    least: int = 1
    multiple: int = 1

    def padded(self, rows: int) -> int:
        """How many rows to compute where `rows` are wanted."""
        return -(-max(rows, self.least) // self.multiple) * self.multiple

    def __str__(self) -> str:
        if self.multiple > 1:
            return f"multiples of {self.multiple} rows"
        return f"{self.least} rows or more" if self.least > 1 else "any number of rows"


ANY = RowRule()
CANDIDATES = (
    ANY, RowRule(2), RowRule(4), RowRule(4, 4), RowRule(8), RowRule(8, 8), RowRule(16), RowRule(16, 16),
    RowRule(32), RowRule(32, 32), RowRule(64, 64),
)  # fmt: skip
"""In the order of what they cost."""

SMALL = 10**5  # weights of a layer whose rows do not decide how many a step has
# These tell kernels apart: few rows, what is left over of a kernel's tiles, uneven shares of several threads.
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64, 65, 130, 257)
_ALWAYS = 9  # counts up to this are probed however large a weight is
_WORK = 2 * 10**7  # multiplications of one probed product beyond that
_SQUARE = 6 * 10**8  # ... of one with more rows than outputs, from where on threads share out the rows


def probed(product: Product, counts: Sequence[int]) -> Probed:
    """The bytes of a row in a product of so many, None where its rows differ; and how many to try."""

    @functools.cache
    @torch.inference_mode()
    def bits(rows: int) -> bytes | None:
        # Bytes of numpy: torch would share out the comparison.
        found = product(rows).flatten(0, -2).contiguous().view(torch.uint8).numpy()
        return found[0].tobytes() if (found == found[0]).all() else None

    return bits, counts


def first_rule(families: Iterable[Sequence[Probed]]) -> RowRule | None:
    """The cheapest rule under which all products of a family give a row the same bits, for every family."""
    families = list(families)
    return next((rule for rule in CANDIDATES if all(holds(rule, family) for family in families)), None)


def holds(rule: RowRule, family: Sequence[Probed]) -> bool:
    """Whether all products of a family give a row the same bits under the rule."""
    rows = (bits(rule.padded(n)) for bits, counts in family for n in counts)
    first = next(rows)
    return first is not None and all(row == first for row in rows)


def random_numbers(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With all digits of the type: products of shorter numbers are exact, which hides in what order they are
    summed."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=wide).to(dtype)


def repeated(x: torch.Tensor, *times: int) -> torch.Tensor:
    """[*times, *shape of x], copied by one thread: the probe is many small operations."""
    made = np.empty((*times, *x.shape[:-1], x.shape[-1] * x.itemsize), np.uint8)
    made[...] = x.view(torch.uint8).numpy()
    return torch.from_numpy(made).view(x.dtype)


def shape_of(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def counts_of(k: int, n: int) -> list[int]:
    """Numbers of rows to try of a product of rows of k numbers that gives rows of n."""
    counts = [c for c in _COUNTS if c <= _ALWAYS or c * k * n <= _WORK]
    return [*counts, n + 1] if counts[-1] < n and n * k * n <= _SQUARE else counts


def linear_product(module: Any) -> Product:
    """On the module's own weight; a small one may be all zeros (fresh adapters), so it gets other numbers."""
    weight: torch.Tensor = _numbers(module.weight)
    bias: Any = None if module.bias is None else _numbers(module.bias)
    if weight.numel() < 10 * SMALL:
        weight = random_numbers(tuple(weight.shape), weight.dtype)
    row = random_numbers(shape_of(module)[0], weight.dtype)
    if isinstance(module, Conv1D):
        return lambda rows: torch.addmm(bias, repeated(row, rows), weight)
    return lambda rows: F.linear(repeated(row, rows), weight, bias)


@functools.cache
def of_products(kinds: frozenset[tuple[int, int, torch.dtype]], threads: int) -> RowRule | None:
    """The cheapest rule for products x [N, k] @ w^T, w [n, k], on CPU, for all kinds (n, k, type).

    None: no number of rows makes the bits equal.

    Args:
        threads: that torch has.
    """

    def product(n: int, k: int, dtype: torch.dtype) -> Product:
        row, weight = random_numbers(k, dtype), random_numbers((n, k), dtype, 1)
        return lambda rows: F.linear(repeated(row, rows), weight)

    return first_rule([probed(product(n, k, dtype), counts_of(k, n))] for n, k, dtype in kinds)


def of_training(layers: Iterable[nn.Module]) -> RowRule | None:
    """The cheapest rule for these linear layers on CPU, forward and for the gradient of their inputs.

    None: no number of rows makes the bits equal.
    """
    distinct: Mapping[Any, Any] = {(shape_of(m), m.bias is None, m.weight.dtype): m for m in layers}
    families: list[list[Probed]] = []
    for (shape, *_), layer in distinct.items():
        families.append([probed(_forward(layer), counts_of(*shape))])
        families.append([probed(_backward(layer), counts_of(*shape[::-1]))])
    return first_rule(families)


def _numbers(parameter: torch.Tensor) -> torch.Tensor:
    """Its own, or others if they are in a file alone."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    return random_numbers(shape, dtype) if parameter.is_meta else parameter.detach()


def _forward(module: Any) -> Product:
    if not by_onednn(module.weight) or isinstance(module, Conv1D):
        return linear_product(module)
    weight, row = _numbers(module.weight), random_numbers(shape_of(module)[0], module.weight.dtype)
    return lambda rows: product(repeated(row, rows), weight)


def _backward(module: Any) -> Product:
    weight = _numbers(module.weight)
    grad = random_numbers(shape_of(module)[1], weight.dtype)
    if isinstance(module, Conv1D):
        return lambda rows: repeated(grad, rows) @ weight.T
    return lambda rows: of_inputs(repeated(grad, rows), weight)

"""What a matrix product needs on this machine for the bits of a row not to depend on the rows beside it.

A BLAS chooses its kernel, and how threads share a product, by the shape of the product, and each kernel sums
in an order of its own. So a row computed alone may have other last bits than in a batch. Intel's MKL
has a mode without that (`MKL_CBWR=AUTO,STRICT`), which holds on Intel CPUs only. Elsewhere a few more rows
often suffice: on AMD's Zen 3, float32 rows have equal bits from four rows on, float64 rows in multiples of 4.

How many rows suffice is probed here, with the shapes of a model, and sampling fills its products up to them.
Training needs none of it: a batch is always cut the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

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
BLOCK = 256  # positions that attention sums over at once
LANES = 64  # positions: a multiple of what the vectors of any CPU hold
CANDIDATES = (
    ANY, RowRule(2), RowRule(4), RowRule(4, 4), RowRule(8), RowRule(8, 8), RowRule(16), RowRule(16, 16),
    RowRule(32), RowRule(32, 32), RowRule(64, 64),
)  # fmt: skip
"""In the order of what they cost."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What sampling needs: from one model, in one dtype, with one number of threads."""

    linear: RowRule = ANY
    """Of linear layers and the head, and so of the tokens of a step."""
    alone: Mapping[Shape, RowRule] = field(default_factory=dict)
    """Small layers (adapters) that need more rows than the large ones; `fill_up` sees to them."""
    attention: RowRule = ANY
    """Of the queries in each matrix of attention's batched products."""
    matrices: int = 1
    """How many matrices such a batch holds at least: with fewer, threads share out each of them."""
    lanes: int = LANES
    """Positions come in multiples of it: a sum over others is cut at other places, though they count 0."""
    one_thread: bool = False
    """Sampling computes on one thread: with several no number of rows suffices."""
    packed: str = ""
    """The kernel of packed linear layers whose bits are not those of plain ones."""
    hold: bool = True
    """Whether bits are equal under these rules; False where no number of rows makes them so."""

    def positions(self, length: int) -> int:
        """How many positions to attend to where `length` are wanted."""
        return -(-length // self.lanes) * self.lanes

    def describe(self) -> str:
        if not self.hold:
            return "no number of rows gives equal bits"
        matrices = f" in {self.matrices} matrices or more" if self.matrices > 1 else ""
        matrices += f", multiples of {self.lanes} positions"
        alone = "".join(f", of {k} x {n} {rule}" for (k, n), rule in sorted(self.alone.items()))
        one = "; on one thread" if self.one_thread else ""
        packed = f" packed by {self.packed}" if self.packed else ""
        return f"linear layers{packed}: {self.linear}{alone}; attention: {self.attention}{matrices}{one}"


# These tell kernels apart: few rows, what is left over of a kernel's tiles, uneven shares of several threads.
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64, 65, 130, 257)
_ALWAYS = 9  # counts up to this are probed however large a weight is
SMALL = 10**5  # weights of a layer whose rows do not decide how many a step has
_WORK = 2 * 10**7  # multiplications of one probed product beyond that
_SEEDS = 8  # in bfloat16 one score of 200 differs
_SQUARE = 6 * 10**8  # ... of one with more rows than outputs, from where on threads share out the rows


def probe(model: nn.Module, *, head_dim: int, dtype: torch.dtype) -> RowRules:
    """The rules for sampling from `model` on CPU, with the number of threads that torch has now.

    Takes some milliseconds for a small model and as long as a forward pass over 50 tokens for a large one.
    """
    threads = torch.get_num_threads()
    rules = _probe(model, head_dim, dtype)
    if rules.hold or threads == 1:
        return rules
    torch.set_num_threads(1)
    try:
        rules = _probe(model, head_dim, dtype)
    finally:
        torch.set_num_threads(threads)
    return dataclasses.replace(rules, one_thread=rules.hold)


def _probe(model: nn.Module, head_dim: int, dtype: torch.dtype) -> RowRules:
    modules = (m for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    layers = {(_shape(m), m.bias is None, m.weight.dtype): m for m in modules}
    families: dict[Shape, list[list[Probed]]] = {}  # with a bias and without, of each type
    for (shape, *_), module in layers.items():
        families.setdefault(shape, []).append([probed(_linear(module), counts_of(*shape))])
    large = [shape for shape in families if math.prod(shape) >= SMALL] or list(families)
    linear = first_rule(family for shape in large for family in families[shape])
    small = {shape: first_rule(families[shape]) for shape in families if shape not in large}
    threads = torch.get_num_threads()
    attention, matrices = _attention(head_dim, dtype, threads)
    # Experts multiply the tokens that are sent to them, however few: nothing fills those products up.
    experts = any(parameter.ndim > 2 for parameter in model.parameters())
    if linear is None or attention is None or (experts and linear != ANY):
        return RowRules(hold=False)
    alone: dict[Shape, RowRule] = {}
    for shape, rule in small.items():
        if rule is None:
            return RowRules(hold=False)
        if not all(holds(linear, family) for family in families[shape]):
            alone[shape] = rule
    lanes = _lanes(head_dim, dtype, attention.padded(1), matrices, threads)
    return RowRules(linear, alone, attention, matrices, lanes)


def fill_up(model: nn.Module, alone: Mapping[Shape, RowRule]) -> None:
    """Let the layers of these shapes fill up their inputs themselves in inference mode; in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and (rule := alone.get(_shape(module))):
            module.forward = functools.partial(_filled, type(module).forward, module, rule)  # type: ignore[method-assign]


def _filled(
    forward: Callable[[Any, torch.Tensor], torch.Tensor], module: nn.Module, rule: RowRule, x: torch.Tensor
) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    missing = rule.padded(rows) - rows
    if not missing or not torch.is_inference_mode_enabled():
        return forward(module, x)
    return forward(module, F.pad(x.reshape(rows, -1), (0, 0, 0, missing)))[:rows].view(*x.shape[:-1], -1)


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


@functools.cache
def _attention(head_dim: int, dtype: torch.dtype, threads: int) -> tuple[RowRule | None, int]:
    """The rule for the products of queries and keys and of weights and values, and how many at once."""

    def product(kind: Callable[..., Product], length: int, matrices: int) -> Probed:
        return probed(kind(head_dim, length, matrices, dtype), counts_of(head_dim, matrices * length))

    kinds = list(itertools.product((_scores, _values), (LANES, BLOCK)))
    many = [[product(kind, length, threads), product(kind, length, 4 * threads)] for kind, length in kinds]
    rule = first_rule(many)
    if rule is None or threads == 1:
        return rule, 1
    # Fewer matrices than threads may take another path: then they are filled up to that number.
    single = [[*family, product(*kind, 1)] for family, kind in zip(many, kinds, strict=True)]
    return rule, 1 if all(holds(rule, family) for family in single) else threads


@functools.cache
def _lanes(head_dim: int, dtype: torch.dtype, rows: int, matrices: int, threads: int) -> int:
    """The least number of positions in whose multiples more of them change neither the scores of keys before
    them, nor the sum over values where their weights are 0."""

    def family(kind: Callable[..., Product], real: int, step: int, seed: int) -> list[Probed]:
        lengths = range(real, BLOCK + 1, step)
        return [probed(kind(head_dim, n, matrices, dtype, real, seed), (rows,)) for n in lengths]

    for step in (LANES, BLOCK // 2):
        cases = itertools.product((_scores, _values), range(step, BLOCK, step), range(_SEEDS))
        if all(holds(ANY, family(kind, real, step, seed)) for kind, real, seed in cases):
            return step
    return BLOCK


def _linear(module: Any) -> Product:
    """On the module's own weight; a small one may be all zeros (fresh adapters), so it gets other numbers."""
    weight, bias = module.weight.detach(), module.bias
    if weight.numel() < 10 * SMALL:
        weight = _random(tuple(weight.shape), weight.dtype)
    row = _random(_shape(module)[0], weight.dtype)
    if isinstance(module, Conv1D):
        return lambda rows: torch.addmm(bias, _repeated(row, rows), weight)
    return lambda rows: F.linear(_repeated(row, rows), weight, bias)


def _scores(
    head_dim: int, length: int, matrices: int, dtype: torch.dtype, real: int | None = None, seed: int = 0
) -> Product:
    """Queries times keys, which lie in the cache row by row; the scores of the first `real` keys."""
    query, keys = _random(head_dim, dtype, seed), _random((BLOCK, head_dim), dtype, seed + 1)[:length]
    keys = _repeated(keys, matrices)
    return lambda rows: torch.bmm(_repeated(query, matrices, rows), keys.transpose(1, 2))[..., :real]


def _values(
    head_dim: int, length: int, matrices: int, dtype: torch.dtype, real: int | None = None, seed: int = 0
) -> Product:
    """Attention's weights, 0 from position `real` on, times values."""
    weights = _random(BLOCK, dtype, seed)[:length]
    values = _random((BLOCK, head_dim), dtype, seed + 1)[:length]
    if real is not None:
        weights[real:] = 0
    values = _repeated(values, matrices)
    return lambda rows: torch.bmm(_repeated(weights, matrices, rows), values)


def _random(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def _repeated(x: torch.Tensor, *times: int) -> torch.Tensor:
    """[*times, *shape of x], copied by one thread: the probe is many small operations."""
    made = np.empty((*times, *x.shape[:-1], x.shape[-1] * x.itemsize), np.uint8)
    made[...] = x.view(torch.uint8).numpy()
    return torch.from_numpy(made).view(x.dtype)


def _shape(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def counts_of(k: int, n: int) -> list[int]:
    """Numbers of rows to try of a product of rows of k numbers that gives rows of n."""
    counts = [c for c in _COUNTS if c <= _ALWAYS or c * k * n <= _WORK]
    return [*counts, n + 1] if counts[-1] < n and n * k * n <= _SQUARE else counts

"""What sampling needs on this machine for the bits of a row not to depend on the rows beside it.

How many rows a product needs (models/row_rules.py) is probed here, with the shapes of a model, and sampling
fills its products up to them. Training of one model needs none of it to repeat (a batch is always cut the
same way), but all of it to have the bits of sampling (trainer/exact.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from silva.models.row_rules import (
    ANY,
    SMALL,
    Probed,
    Product,
    RowRule,
    Shape,
    counts_of,
    first_rule,
    holds,
    linear_product,
    probed,
    random_numbers,
    repeated,
    shape_of,
)

BLOCK = 256  # positions that attention sums over at once
LANES = 64  # positions: a multiple of what the vectors of any CPU hold


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


_SEEDS = 8  # few scores may differ


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
    layers = {(shape_of(m), m.bias is None, m.weight.dtype): m for m in modules}
    families: dict[Shape, list[list[Probed]]] = {}  # with a bias and without, of each type
    for (shape, *_), module in layers.items():
        families.setdefault(shape, []).append([probed(linear_product(module), counts_of(*shape))])
    large = [shape for shape in families if math.prod(shape) >= SMALL] or list(families)
    linear = first_rule(family for shape in large for family in families[shape])
    small = {shape: first_rule(families[shape]) for shape in families if shape not in large}
    threads = torch.get_num_threads()
    dtype = torch.promote_types(dtype, torch.float32)  # of attention (blocked_attention.py)
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
    """Let the layers of these shapes fill up their inputs themselves; in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and (rule := alone.get(shape_of(module))):
            module.forward = functools.partial(_filled, type(module).forward, module, rule)  # type: ignore[method-assign]


def _filled(
    forward: Callable[[Any, torch.Tensor], torch.Tensor], module: nn.Module, rule: RowRule, x: torch.Tensor
) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    missing = rule.padded(rows) - rows
    if not missing:
        return forward(module, x)
    return forward(module, F.pad(x.reshape(rows, -1), (0, 0, 0, missing)))[:rows].view(*x.shape[:-1], -1)


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


def _scores(
    head_dim: int, length: int, matrices: int, dtype: torch.dtype, real: int | None = None, seed: int = 0
) -> Product:
    """Queries times keys, which lie in the cache row by row; the scores of the first `real` keys."""
    query, keys = (
        random_numbers(head_dim, dtype, seed),
        random_numbers((BLOCK, head_dim), dtype, seed + 1)[:length],
    )
    keys = repeated(keys, matrices)
    return lambda rows: torch.bmm(repeated(query, matrices, rows), keys.transpose(1, 2))[..., :real]


def _values(
    head_dim: int, length: int, matrices: int, dtype: torch.dtype, real: int | None = None, seed: int = 0
) -> Product:
    """Attention's weights, 0 from position `real` on, times values."""
    weights = random_numbers(BLOCK, dtype, seed)[:length]
    values = random_numbers((BLOCK, head_dim), dtype, seed + 1)[:length]
    if real is not None:
        weights[real:] = 0
    values = repeated(values, matrices)
    return lambda rows: torch.bmm(repeated(weights, matrices, rows), values)

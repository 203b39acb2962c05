"""From logits to sampled tokens: one uniform number a token, pure functions of tensors.

torch.multinomial draws one random number a vocabulary entry and is serial on CPU (83 ms for 64 rows of
49k); the two-level inverse of the cumulative distribution takes 3 ms. Each row depends on its own logits
and number alone, so a sample does not change with what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from silva.models.head import BLOCK, blocks, log_normaliser
from silva.types import SamplingParams

AT_ONCE = 2**20  # logits on CPU: more leave the processor's cache between one pass over them and the next
_Lists = tuple[list[int], list[float], list[float], list[float]]


@dataclass(frozen=True)
class Drawn:
    """One entry a row, on the CPU; see `Completion` for what each log-probability means."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    entropies: list[float]


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: torch.Tensor,
    counts: Sequence[int] | None = None,
) -> Drawn:
    """Sample so many tokens of each row, one if nothing is said.

    Args:
        logits: [B, V] of the model, in float32 or float64.
        params: temperature, top-k, top-p and min-p of each row (applied in that order).
        uniforms: [N] float64 in [0, 1), a number for each token.
        counts: [B], N in sum: how many tokens of each row.

    Returns:
        N tokens, those of a row one after the other.
    """
    counts = [1] * len(params) if counts is None else counts
    size = max(1, AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(params)
    parts, first = [], 0
    for i in range(0, len(params), size):
        here = slice(i, i + size)
        last = first + sum(counts[here])
        parts.append(_draw(logits[here], params[here], uniforms[first:last], counts[here]))
        first = last
    return Drawn(*(list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)))


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor, counts: Sequence[int]
) -> _Lists:
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    greedy = temperatures == 0
    untempered = bool((temperatures == 1).all())
    scaled = logits if untempered else logits / torch.where(greedy, 1, temperatures)[:, None]
    normaliser, weights, sums = log_normaliser(scaled)  # probabilities, not yet divided by their sum
    raw_normaliser = normaliser if untempered else log_normaliser(logits)[0]
    truncated = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p > 0]
    if truncated:
        normaliser = normaliser.clone()
        for i in truncated:  # rare, and a sort a row dwarfs the loop
            keep = _kept(weights[i] / sums[i].sum(), params[i])
            weights[i].masked_fill_(~keep, 0)
            sums[i] = blocks(weights[i : i + 1]).sum(2)[0]
            normaliser[i] = sums[i].sum().log() + scaled[i].max()
    rows = torch.from_numpy(np.repeat(np.arange(len(params)), counts)).to(logits.device)
    tokens = inverse_cdf(weights, uniforms, sums, rows)
    if bool(greedy.any()):
        tokens = torch.where(greedy[rows], logits.argmax(-1)[rows], tokens)
    logprobs = torch.where(greedy[rows], 0, scaled[rows, tokens] - normaliser[rows])
    # E[-log p] = normaliser - E[scaled]; entries of probability 0 must not give 0 * inf.
    means = _sum(weights.mul_(scaled.clamp_min(torch.finfo(scaled.dtype).min))) / sums.sum(1)
    entropies = torch.where(greedy, 0, normaliser - means).clamp_min_(0)
    raw_logprobs = logits[rows, tokens] - raw_normaliser[rows]
    return tokens.tolist(), logprobs.tolist(), raw_logprobs.tolist(), entropies[rows].tolist()


def inverse_cdf(
    weights: torch.Tensor,
    uniforms: torch.Tensor,
    sums: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens at which the cumulative distribution of a row passes `uniforms`: first the block, then inside.

    Args:
        weights: [B, V], probabilities up to a factor of each row.
        uniforms: [N] in [0, 1).
        sums: [B, ceil(V / BLOCK)] of the weights' blocks, where they are known already.
        rows: [N] the row of each number; None: N is B.

    Returns:
        [N] int64, never a token of weight 0.
    """
    rows = torch.arange(len(weights), device=weights.device) if rows is None else rows
    vocabulary = weights.shape[1]
    of_blocks = blocks(weights)
    # float64: near 1 float32 numbers are 6e-8 apart, wider than many a token's share.
    upto = (of_blocks.sum(2) if sums is None else sums).double().cumsum(1)[rows]
    at = torch.arange(len(rows), device=weights.device)
    target = uniforms.to(upto.dtype)[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, target, right=True).clamp_max_(upto.shape[1] - 1)[:, 0]
    before = torch.where(block > 0, upto[at, (block - 1).clamp_min(0)], 0)
    inner = of_blocks[rows, block].double().cumsum(1)
    offset = torch.searchsorted(inner, target - before[:, None], right=True).clamp_max_(BLOCK - 1)[:, 0]
    tokens = (block * BLOCK + offset).clamp_max_(vocabulary - 1)
    # Rounding can push the target past the last possible token of a block.
    impossible = weights[rows, tokens] == 0
    return torch.where(impossible, weights.argmax(-1)[rows], tokens) if bool(impossible.any()) else tokens


def _sum(x: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B], in blocks as `log_normaliser` sums."""
    return blocks(x).sum(2).sum(1)


def _kept(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] bool: top-k first, then top-p and min-p on what is left; the most likely token always stays."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k:
        keep[params.top_k :] = False
    if params.top_p < 1:
        left = ordered * keep
        left = left / left.sum()
        keep &= left.cumsum(0) - left < params.top_p
    if params.min_p > 0:
        keep &= ordered >= params.min_p * ordered[0]
    keep[0] = True
    return torch.zeros_like(keep).scatter_(0, order, keep)

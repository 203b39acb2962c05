"""From logits to sampled tokens: one uniform number a row, pure functions of tensors.

torch.multinomial draws one random number a vocabulary entry and is serial on CPU (83 ms for 64 rows of
49k); the two-level inverse of the cumulative distribution takes 3 ms. Each row depends on its own logits
and number alone, so a sample does not change with what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from silva.types import SamplingParams

BLOCK = 256


@dataclass(frozen=True)
class Drawn:
    """One entry a row, on the CPU; see `Completion` for what each log-probability means."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    entropies: list[float]


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor) -> Drawn:
    """Sample one token a row.

    Args:
        logits: [B, V] of the model, in float32 or float64.
        params: temperature, top-k, top-p and min-p of each row (applied in that order).
        uniforms: [B] float64 in [0, 1).
    """
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    greedy = temperatures == 0
    raw_normaliser = _logsumexp(logits)
    if bool((temperatures == 1).all()):
        scaled, normaliser = logits, raw_normaliser
    else:
        scaled = logits / torch.where(greedy, 1, temperatures)[:, None]
        normaliser = _logsumexp(scaled)
    probabilities = (scaled - normaliser[:, None]).exp_()
    truncated = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p > 0]
    if truncated:
        scaled, normaliser = scaled.clone(), normaliser.clone()
        for i in truncated:  # rare, and a sort a row dwarfs the loop
            keep = _kept(probabilities[i], params[i])
            scaled[i].masked_fill_(~keep, float("-inf"))
            normaliser[i] = _logsumexp(scaled[i : i + 1])[0]
            probabilities[i] = (scaled[i] - normaliser[i]).exp()
    tokens = inverse_cdf(probabilities, uniforms)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    rows = torch.arange(len(tokens), device=logits.device)
    logprobs = torch.where(greedy, 0, scaled[rows, tokens] - normaliser)
    # E[-log p] = normaliser - E[scaled]; entries of probability 0 must not give 0 * inf.
    finite = scaled.clamp_min(torch.finfo(scaled.dtype).min)
    entropies = torch.where(greedy, 0, normaliser - _sum(probabilities * finite)).clamp_min_(0)
    return Drawn(
        tokens.tolist(),
        logprobs.tolist(),
        (logits[rows, tokens] - raw_normaliser).tolist(),
        entropies.tolist(),
    )


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token of each row at which the cumulative distribution passes `uniforms`: first the block, then inside.

    Args:
        probabilities: [B, V], rows summing to about 1.
        uniforms: [B] in [0, 1).

    Returns:
        [B] int64, never a token of probability 0.
    """
    rows = torch.arange(len(probabilities), device=probabilities.device)
    vocabulary = probabilities.shape[1]
    blocks = _blocks(probabilities)
    # float64: near 1 float32 numbers are 6e-8 apart, wider than many a token's share.
    sums = blocks.sum(2).double().cumsum(1)
    target = uniforms.to(sums.dtype)[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_max_(sums.shape[1] - 1)[:, 0]
    before = torch.where(block > 0, sums[rows, (block - 1).clamp_min(0)], 0)
    inner = blocks[rows, block].double().cumsum(1)
    offset = torch.searchsorted(inner, target - before[:, None], right=True).clamp_max_(BLOCK - 1)[:, 0]
    tokens = (block * BLOCK + offset).clamp_max_(vocabulary - 1)
    # Rounding can push the target past the last possible token of a block.
    impossible = probabilities[rows, tokens] == 0
    return torch.where(impossible, probabilities.argmax(-1), tokens)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B, ceil(V / BLOCK), BLOCK], filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _sum(x: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B]. In blocks, as torch splits one long sum over its threads: a lone row got other bits."""
    return _blocks(x).sum(2).sum(1)


def _logsumexp(x: torch.Tensor) -> torch.Tensor:
    """[B, V] -> [B]"""
    largest = x.amax(-1)
    return _sum((x - largest[:, None]).exp_()).log_().add_(largest)


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

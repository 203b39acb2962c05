"""Softmax attention with the same bits for a query whatever else is computed with it.

Sums over positions are cut at absolute multiples of BLOCK, and queries and matrices are filled up as
`RowRules` say. Sampling attends over its cache with it, and training over a trie where it has the bits of
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from silva.models.same_bits import BLOCK, RowRules


class KvBlock(NamedTuple):
    """Keys and values of BLOCK positions (the last of a row: a multiple of `RowRules.lanes`)."""

    readers: slice | torch.Tensor  # the rows of the batch that see it
    start: int  # its first position
    key: torch.Tensor  # [readers, kv, L, d], or [kv, L, d] that all readers share: then it is read once
    value: torch.Tensor


QUERIES = 256
"""Of training, attended at once: their scores are not kept, and fit into the processor's cache."""


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """torch's own, of the last Q of L positions: query [B, heads, Q, d], key and value [B, kv, L, d] ->
    [B, heads, Q, d].

    Args:
        bias: [1, 1, Q, L] of 0 and -inf; None: causal, and Q is L.
    """
    dtype = query.dtype
    query, key, value = (x.to(computed_in(dtype, x.device)) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if bias is not None and query.device.type == "cuda":  # its kernels know masks or groups, not both
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        groups = 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=groups > 1
    ).to(dtype)


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """On CPU float32 or wider: torch's attention in narrow types takes up to twice as long there."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    rules: RowRules,
) -> torch.Tensor:
    """The same with the bits of sampling, and the gradient of `plain_attention`."""
    return _Causal.apply(query, key, value, bias, scaling, rules)  # type: ignore[no-any-return, no-untyped-call]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        scaling: float,
        rules: RowRules,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.bias, ctx.scaling = bias, scaling
        rows, heads, count, d = query.shape
        kv, length = key.shape[1:3]
        past, groups = length - count, heads // kv
        query = query * scaling if scaling != 1 else query
        missing = rules.positions(length) - length
        key, value = (F.pad(x, (0, 0, 0, missing)).contiguous() for x in (key, value))
        outs = []
        for first in range(0, count, QUERIES):
            last = min(count, first + QUERIES)
            seen = past + last
            total = rules.positions(seen)
            hidden = torch.arange(total) > torch.arange(past + first, seen)[:, None]
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
            pairs = []
            for b in range(0, total, BLOCK):
                block = slice(b, min(b + BLOCK, total))
                pairs.append(KvBlock(slice(None), b, key[:, :, block], value[:, :, block]))
            mine = query[:, :, first:last].reshape(rows, kv, groups * (last - first), d)
            out = blocked_attention(mine, pairs, mask.repeat(groups, 1)[None, None], rules)
            outs.append(out.reshape(rows, heads, last - first, d))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            again = plain_attention(query, key, value, ctx.bias, ctx.scaling)
        return *torch.autograd.grad(again, (query, key, value), out), None, None, None


def blocked_attention(
    query: torch.Tensor, blocks: Sequence[KvBlock], bias: torch.Tensor, rules: RowRules
) -> torch.Tensor:
    """Softmax attention whose every query row has the same bits for any batch, padding or chunking.

    Args:
        query: [B, kv, Q, d], scaled already.
        blocks: of each row those that it sees anything of, ascending by position.
        bias: [B or 1, 1, Q or 1, T] of 0 and -inf.
        rules: how queries and matrices are filled up for that.

    Returns:
        [B, kv, Q, d], on CPU computed in float32 or wider: narrow products are slow there.
    """
    count, dtype = query.shape[2], query.dtype
    wide = computed_in(dtype, query.device)
    query, bias = query.to(wide), bias.to(wide)
    blocks = [each._replace(key=each.key.to(wide), value=each.value.to(wide)) for each in blocks]
    missing = rules.attention.padded(count) - count
    if missing:
        query = F.pad(query, (0, 0, 0, missing))
        if bias.shape[2] > 1:
            bias = F.pad(bias, (0, 0, 0, missing))
    found = [_product(query[readers], key.transpose(-1, -2), rules.matrices) for readers, _, key, _ in blocks]
    if all(len(part) == len(query) for part in found):
        scores = (found[0] if len(found) == 1 else torch.cat(found, -1)).add_(bias)
    else:
        scores = bias.expand(*query.shape[:3], -1).clone(memory_format=torch.contiguous_format)
        for (readers, start, key, _), part in zip(blocks, found, strict=True):
            _add_(scores[..., start : start + key.shape[-2]], readers, part)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    out = torch.zeros_like(query)
    for readers, start, _, value in blocks:
        seen = weights[readers, :, :, start : start + value.shape[-2]]
        _add_(out, readers, _product(seen, value, rules.matrices))
    return out[:, :, :count].to(dtype)


def _add_(rows: torch.Tensor, readers: slice | torch.Tensor, part: torch.Tensor) -> None:
    if isinstance(readers, slice):
        rows[readers] += part
    else:
        rows.index_add_(0, readers, part)


def _product(x: torch.Tensor, y: torch.Tensor, matrices: int) -> torch.Tensor:
    """[B, kv, Q, n] @ [B, kv, n, m], or @ [kv, n, m] of all the batch: [B, kv, Q, m]."""
    rows, kv, count, n = x.shape
    if y.ndim == 4:
        return _bmm(x.flatten(0, 1), y.flatten(0, 1), matrices).view(rows, kv, count, -1)
    folded = x.transpose(0, 1).reshape(kv, rows * count, n)
    return _bmm(folded, y, matrices).view(kv, rows, count, -1).transpose(0, 1)


def _bmm(x: torch.Tensor, y: torch.Tensor, matrices: int) -> torch.Tensor:
    """[M, Q, n] @ [M, n, m], computed as at least `matrices` products."""
    given = len(x)
    if given < matrices:
        x = F.pad(x, (0, 0, 0, 0, 0, matrices - given))
        y = torch.cat([y, y[:1].expand(matrices - given, -1, -1)])
    return torch.bmm(x, y)[:given]

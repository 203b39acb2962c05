"""Keys and values of many sequences, and attention over them that gives the same bits whatever else runs.

One row a sequence: `keys[layer][row, kv_head, position]`. A row holds the tokens it was computed from, so
that a new request finds the longest prefix any row shares with it. Because every operation on a token's row
of numbers is independent of the rows beside it (measured: GEMM rows under MKL_CBWR=...,STRICT; activations
as in activation.py; attention as below), what the cache holds is a function of the tokens alone: reusing,
evicting or recomputing a prefix changes time, never results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

# Sums over positions are cut at absolute multiples of BLOCK: longer sums are regrouped by the GEMM kernels
# depending on how much padding follows. LANES pads the last block for the vectorised softmax.
BLOCK, LANES = 256, 64
# Matrix products of fewer multiplications than this go to a loop of torch's own, which rounds differently.
SMALL = 400


@dataclass
class Row:
    """A sequence in the cache: `tokens[:computed]` have their keys, values and outputs."""

    index: int
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    computed: int = 0
    busy: bool = False
    last_used: int = 0


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one row in a packed step: positions [start, stop)."""

    row: int
    start: int
    stop: int


class KvCache:
    """Storage and prefix lookup. Memory grows with use, up to `rows` sequences of `context` tokens.

    `outputs` are the final hidden states, some 5 % on top of keys and values: with them a prompt that is
    known to its last token needs no computing at all.
    """

    def __init__(self, config: Any, *, rows: int, context: int, dtype: torch.dtype, device: torch.device):
        text = config.get_text_config()
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.layers = text.num_hidden_layers
        self.width = text.hidden_size
        self.context = context
        self.dtype, self.device = dtype, device
        self.rows = [Row(i) for i in range(rows)]
        self.keys: list[torch.Tensor] = []  # a layer: [rows, kv_heads, T, d]
        self.values: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []  # one: [rows, 1, T, D]
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        """Forget every key and value (the weights changed) and give the memory back.

        Busy rows keep their tokens, to be computed again.
        """
        self.keys = [self._zeros(0, self.kv_heads, 0, self.head_dim) for _ in range(self.layers)]
        self.values = [self._zeros(0, self.kv_heads, 0, self.head_dim) for _ in range(self.layers)]
        self.outputs = [self._zeros(0, 1, 0, self.width)]
        for row in self.rows:
            row.computed = 0
            if row.busy:
                self._reserve(row.index + 1, len(row.tokens))
            else:
                row.tokens = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self.keys, *self.values, *self.outputs))

    def longest_prefix(self, tokens: np.ndarray) -> tuple[Row | None, int]:
        """The row sharing the longest prefix with `tokens` (planned tokens count), and its length."""
        best, length = None, 0
        for row in self.rows:
            n = min(len(row.tokens), len(tokens))
            if n <= length or row.tokens[length] != tokens[length]:
                continue
            differs = row.tokens[:n] != tokens[:n]
            shared = int(differs.argmax()) if differs.any() else n
            if shared > length:
                best, length = row, shared
        return best, length

    def acquire(self, source: Row | None, shared: int, tokens: np.ndarray) -> tuple[Row, int] | None:
        """A row for `tokens` whose first `shared` positions come from `source`; None while all are busy.

        Returns the row and how many positions it already has. A finished sequence that `tokens`
        continues is taken over in place; any other prefix is copied.
        """
        self._clock += 1
        if source is not None and not source.busy and shared == len(source.tokens):
            row = source
        else:
            idle = [r for r in self.rows if not r.busy and r is not source]
            if idle:
                row = min(idle, key=lambda r: (len(r.tokens) > 0, r.last_used, r.index))
            elif source is not None and not source.busy:
                row = source
            else:
                return None
        self._reserve(row.index + 1, len(tokens))
        if row is not source and source is not None and shared:
            for store in (*self.keys, *self.values, *self.outputs):
                store[row.index, :, :shared] = store[source.index, :, :shared]
        if source is not None:
            source.last_used = self._clock
        row.tokens, row.computed, row.busy, row.last_used = tokens, shared, True, self._clock
        return row, shared

    def release(self, row: Row) -> None:
        """The sequence has ended; what was computed stays for reuse until the row is needed."""
        row.tokens = row.tokens[: row.computed]
        row.busy = False
        row.last_used = self._clock

    def append(self, row: Row, token: int) -> None:
        row.tokens = np.append(row.tokens, token)
        self._reserve(row.index + 1, len(row.tokens))

    def _reserve(self, rows: int, length: int) -> None:
        have_rows, _, have_length, _ = self.keys[0].shape
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:
            rows = min(len(self.rows), max(rows, 2 * have_rows))
        if length > have_length:
            length = min(_padded(self.context), _padded(max(length, have_length * 3 // 2)))
        rows, length = max(rows, have_rows), max(length, have_length)
        for stores in (self.keys, self.values, self.outputs):
            for i, old in enumerate(stores):
                stores[i] = self._zeros(rows, old.shape[1], length, old.shape[3])
                stores[i][:have_rows, :, :have_length] = old

    def _zeros(self, *shape: int) -> torch.Tensor:
        """Zeros, not garbage: masked positions are multiplied by a weight of 0."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class PackedStep:
    """Attention of one packed step: single new tokens (decoding) first, then longer spans (prompts).

    Decoding rows that lie side by side are attended together; a prompt's span is attended on its own.

    Args:
        decode: spans of one token, ascending by row.
        prefill: spans of any length.
    """

    def __init__(self, cache: KvCache, decode: Sequence[Span], prefill: Sequence[Span]):
        self.cache = cache
        spans = [*decode, *prefill]
        self.rows = torch.tensor([s.row for s in spans for _ in range(s.start, s.stop)], device=cache.device)
        self.positions = torch.tensor([p for s in spans for p in range(s.start, s.stop)], device=cache.device)
        self.decode = [_decode_run(cache, decode, a, b) for a, b in _neighbours([s.row for s in decode])]
        self.prefill = [(s, _span_bias(cache, s)) for s in prefill]
        self.decoded = len(decode)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, heads, N, d], key and value [1, kv_heads, N, d] -> [1, N, heads, d]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = key[0].transpose(0, 1)
        values[self.rows, :, self.positions] = value[0].transpose(0, 1)
        heads, n, d = query.shape[1:]
        kv = keys.shape[1]
        q = query[0].view(kv, heads // kv, n, d).permute(2, 0, 1, 3)  # [N, kv, heads per kv, d]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for run in self.decode:
            mine = q[run.tokens]
            if run.holes:
                spread = q.new_zeros((run.rows.stop - run.rows.start, *q.shape[1:]))
                spread[run.index] = mine
                mine = spread
            length = run.bias.shape[-1]
            o = blocked_attention(
                mine, keys[run.rows, :, :length], values[run.rows, :, :length], run.bias, scaling
            )
            out[run.tokens] = o[run.index] if run.holes else o
        at = self.decoded
        for span, bias in self.prefill:
            here, row = slice(at, at + span.stop - span.start), slice(span.row, span.row + 1)
            count, length = here.stop - here.start, bias.shape[-1]
            mine = q[here].permute(1, 2, 0, 3).reshape(1, kv, -1, d)  # [1, kv, heads per kv * count, d]
            o = blocked_attention(mine, keys[row, :, :length], values[row, :, :length], bias, scaling)
            out[here] = o.view(kv, -1, count, d).permute(2, 0, 1, 3)
            at = here.stop
        return out.view(1, n, heads, d)


def blocked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Softmax attention whose every query row has the same bits for any batch, padding or chunking.

    query [B, kv, Q, d], key and value [B, kv, T, d], bias [B or 1, 1, Q or 1, T] of 0 and -inf; T a
    multiple of LANES.
    """
    length, count = key.shape[2], query.shape[2]
    missing = -(-SMALL // (LANES * query.shape[3])) - count
    if missing > 0:  # one query of a head of 6 numbers or fewer
        query = F.pad(query, (0, 0, 0, missing))
        bias = F.pad(bias, (0, 0, 0, missing if bias.shape[2] > 1 else 0))
    blocks = range(0, length, BLOCK)
    transposed = key.transpose(2, 3)
    scores = [torch.matmul(query, transposed[..., b : b + BLOCK]) for b in blocks]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, -1)).mul_(scaling).add_(bias)
    weights = weights.softmax(-1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(value.dtype)
    out = torch.matmul(weights[..., :BLOCK], value[:, :, :BLOCK])
    for b in blocks[1:]:
        out += torch.matmul(weights[..., b : b + BLOCK], value[:, :, b : b + BLOCK])
    return out[:, :, :count]


@dataclass(frozen=True)
class _DecodeRun:
    tokens: slice  # of the packed step
    rows: slice  # of the cache
    index: torch.Tensor  # of each token within `rows`
    bias: torch.Tensor  # [rows, 1, 1, T]
    holes: bool  # idle rows between the decoding ones: attended too, and dropped


def _neighbours(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending row numbers into ranges; holes are bridged while at most half of a range is idle."""
    ranges, first = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] - rows[first] + 1 > 2 * (i - first + 1):
            ranges.append((first, i))
            first = i
    return ranges


def _decode_run(cache: KvCache, spans: Sequence[Span], a: int, b: int) -> _DecodeRun:
    mine = spans[a:b]
    first, last = mine[0].row, mine[-1].row
    length = _padded(max(s.stop for s in mine))
    index = torch.tensor([s.row - first for s in mine], device=cache.device)
    seen = torch.ones(last - first + 1, dtype=torch.int64, device=cache.device)
    seen[index] = torch.tensor([s.stop for s in mine], device=cache.device)
    bias = _bias(cache, torch.arange(length, device=cache.device) >= seen[:, None])
    return _DecodeRun(slice(a, b), slice(first, last + 1), index, bias[:, None, None], len(seen) > len(mine))


def _span_bias(cache: KvCache, span: Span) -> torch.Tensor:
    """[1, 1, heads per kv * count, T]"""
    positions = torch.arange(span.start, span.stop, device=cache.device)
    hidden = torch.arange(_padded(span.stop), device=cache.device) > positions[:, None]
    return _bias(cache, hidden).repeat(cache.heads // cache.kv_heads, 1)[None, None]


def _bias(cache: KvCache, hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device).masked_fill_(
        hidden, float("-inf")
    )


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES

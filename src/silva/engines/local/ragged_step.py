"""Attention over the cache for one step of the engine, with the same bits for a token whatever else is in it.

The new tokens of many sequences go through the model as one packed row. Sums over positions are cut at
absolute multiples of BLOCK, and tokens, queries and matrices are filled up as `RowRules` say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from silva.engines.local.kv_cache import KvCache
from silva.engines.local.same_bits import BLOCK, RowRules

# Spans of up to this many tokens are attended together, filled up to the longest of them.
SHORT = 64


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one row in a packed step: positions [start, stop)."""

    row: int
    start: int
    stop: int


class RaggedStep:
    """Attention of one packed step: the new tokens of many rows, one span a row.

    The step goes through the model as `size` tokens: the real ones first, then as many as `KvCache.rules` ask
    for, whose states mean nothing. `rows` [count] are those of the real ones, `positions` [size] of all.

    Spans of like length in rows that lie side by side are attended together: all that decode, and all
    short spans (the next turns of dialogues); a long one is attended on its own.

    Args:
        least: tokens that the step has at least.
    """

    def __init__(self, cache: KvCache, spans: Sequence[Span], least: int = 0):
        self.cache = cache
        counts = np.array([s.stop - s.start for s in spans])
        rows = np.repeat([s.row for s in spans], counts)
        self.count = len(rows)
        self.size = cache.rules.linear.padded(max(self.count, least))
        positions = np.zeros(self.size, np.int64)
        positions[: self.count] = np.concatenate([np.arange(s.start, s.stop) for s in spans])
        self.rows = torch.from_numpy(rows).to(cache.device)
        self.positions = torch.from_numpy(positions).to(cache.device)
        offsets = np.cumsum(counts) - counts
        self._runs = [
            _run(cache, [spans[i] for i in part], [int(offsets[i]) for i in part], len(rows))
            for part in _together(cache, spans)
        ]

    def compute(
        self, decoder: Callable[[torch.Tensor, RaggedStep], torch.Tensor], tokens: np.ndarray
    ) -> torch.Tensor:
        """Send the tokens [count] through a `decoder.Decoder`; keys, values and outputs go into the cache.

        Returns:
            [count, D], the last hidden states.
        """
        filled = np.zeros(self.size, np.int64)
        filled[: self.count] = tokens
        states = decoder(torch.from_numpy(filled).to(self.cache.device), self)[: self.count]
        self.cache.outputs[0][self.rows, 0, self.positions[: self.count]] = states
        return states

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, heads, size, d], key and value [1, kv_heads, size, d] -> [1, size, heads, d]."""
        query, key, value = (part[0].transpose(0, 1) for part in (query * scaling, key, value))
        return self.attend_rows(layer, query, key, value)[None]

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query, scaled already, [size, heads, d], key and value [size, kv_heads, d] -> [size, heads, d]."""
        filled, real = self.size - self.count, slice(self.count)
        if filled:
            query, key, value = query[real], key[real], value[real]
        out = self._attend(layer, query, key, value)
        return F.pad(out, (0, 0, 0, 0, 0, filled)) if filled else out

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache.store(layer, self.rows, self.positions[: self.count], key, value)
        heads, d = query.shape[1:]
        kv = key.shape[1]
        out = query.new_empty(query.shape)
        for run in self._runs:
            rows, count = run.shape
            mine = query if run.whole else query[run.index]  # [rows * count, heads, d]
            mine = mine.view(rows, count, kv, heads // kv, d).permute(0, 2, 3, 1, 4)
            mine = mine.reshape(rows, kv, -1, d)  # [rows, kv, heads per kv * count, d]
            pairs = [
                (keys[owner, :, b : b + BLOCK], values[owner, :, b : b + BLOCK])
                for b, owner in zip(range(0, run.own, BLOCK), run.owners, strict=True)
            ]
            for b in range(run.own, run.bias.shape[-1], BLOCK):
                block = slice(b, min(b + BLOCK, run.bias.shape[-1]))
                pairs.append((keys[run.rows, :, block], values[run.rows, :, block]))
            o = blocked_attention(mine, pairs, run.bias, self.cache.rules)
            o = o.view(rows, kv, heads // kv, count, d).permute(0, 3, 1, 2, 4).reshape(-1, heads, d)
            if run.whole:
                return o
            out[run.places] = o[run.real]
        return out


def blocked_attention(
    query: torch.Tensor,
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor,
    rules: RowRules,
) -> torch.Tensor:
    """Softmax attention whose every query row has the same bits for any batch, padding or chunking.

    Args:
        query: [B, kv, Q, d], scaled already.
        blocks: keys and values of BLOCK positions each (the last: a multiple of `rules.lanes`),
            [B, kv, L, d], or [kv, L, d] where all of the batch share them: then they are read once.
        bias: [B or 1, 1, Q or 1, T] of 0 and -inf.
        rules: how queries and matrices are filled up for that.

    Returns:
        [B, kv, Q, d], on CPU computed in float32 or wider: narrow products are slow there.
    """
    count, dtype = query.shape[2], query.dtype
    if query.device.type == "cpu":
        wide = torch.promote_types(dtype, torch.float32)
        query, blocks = query.to(wide), [(key.to(wide), value.to(wide)) for key, value in blocks]
    missing = rules.attention.padded(count) - count
    if missing:
        query = F.pad(query, (0, 0, 0, missing))
        if bias.shape[2] > 1:
            bias = F.pad(bias, (0, 0, 0, missing))
    scores = [_product(query, key.transpose(-1, -2), rules.matrices) for key, _ in blocks]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, -1)).add_(bias)
    weights = weights.softmax(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    parts = weights.to(query.dtype).split(BLOCK, -1)
    out = _product(parts[0], blocks[0][1], rules.matrices)
    for part, (_, value) in zip(parts[1:], blocks[1:], strict=True):
        out += _product(part, value, rules.matrices)
    return out[:, :, :count].to(dtype)


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


@dataclass(frozen=True)
class _Run:
    """Spans attended together, filled up to the longest; rows between them that have none are idle."""

    rows: slice  # of the cache
    owners: tuple[int, ...]  # rows that hold the first blocks of all of them
    shape: tuple[int, int]  # rows, and tokens of each: the slots
    index: torch.Tensor  # [slots] places in the packed step; 0 where nothing real stands
    real: torch.Tensor  # [N'] the slots that hold a token
    places: torch.Tensor  # [N'] and its place
    whole: bool  # the slots are the packed step
    bias: torch.Tensor  # [rows, 1, heads per kv * count, or 1 for all, T]

    @property
    def own(self) -> int:
        """The position from which each row has keys and values of its own."""
        return len(self.owners) * BLOCK


def _together(cache: KvCache, spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans of each run, ascending by row: alike in length and in the blocks that are not
    their own. At most half of a run's rows are idle."""
    runs: list[list[int]] = []
    kinds: dict[Any, list[int]] = {}
    for i, span in enumerate(spans):
        count = span.stop - span.start
        if count > SHORT:
            runs.append([i])
        else:
            kinds.setdefault((count == 1, cache.rows[span.row].owners), []).append(i)
    for kind in kinds.values():
        run: list[int] = []
        for i in sorted(kind, key=lambda i: spans[i].row):
            if run and spans[i].row - spans[run[0]].row + 1 > 2 * (len(run) + 1):
                runs.append(run)
                run = []
            run.append(i)
        runs.append(run)
    return runs


def _run(cache: KvCache, spans: Sequence[Span], offsets: Sequence[int], tokens: int) -> _Run:
    first, last = spans[0].row, spans[-1].row
    count = max(s.stop - s.start for s in spans)
    index = np.zeros((last - first + 1, count), np.int64)
    seen = np.ones_like(index)  # positions a query may look at; what is not real looks at the first
    real = np.zeros(index.shape, bool)
    for span, offset in zip(spans, offsets, strict=True):
        here = (span.row - first, slice(0, span.stop - span.start))
        index[here] = np.arange(offset, offset + span.stop - span.start)
        seen[here] = np.arange(span.start + 1, span.stop + 1)
        real[here] = True
    length = cache.rules.positions(max(s.stop for s in spans))
    if count > 1:  # a single token's heads see the same
        seen = np.tile(seen, (1, cache.heads // cache.kv_heads))
    hidden = np.arange(length) >= seen[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    filled = np.flatnonzero(real)
    places = index.ravel()[filled]
    return _Run(
        slice(first, last + 1),
        cache.rows[first].owners,
        index.shape,
        torch.from_numpy(index.ravel()).to(cache.device),
        torch.from_numpy(filled).to(cache.device),
        torch.from_numpy(places).to(cache.device),
        len(filled) == index.size == tokens and bool((places == np.arange(tokens)).all()),
        bias[:, None].to(cache.device),
    )

"""Attention over the cache for one step of the engine, with the same bits for a token whatever else is in it.

The new tokens of many sequences go through the model as one packed row, and attend as
models/blocked_attention.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from silva.engines.local.kv_cache import KvCache
from silva.models.blocked_attention import KvBlock, blocked_attention
from silva.models.same_bits import BLOCK

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
            for part in _together(spans)
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
            blocks = [
                KvBlock(part.readers, part.start, keys[part.held], values[part.held]) for part in run.parts
            ]
            o = blocked_attention(mine, blocks, run.bias, self.cache.rules)
            o = o.view(rows, kv, heads // kv, count, d).permute(0, 3, 1, 2, 4).reshape(-1, heads, d)
            if run.whole:
                return o
            out[run.places] = o[run.real]
        return out


class _Part(NamedTuple):
    """A `KvBlock` of any layer: who sees it, its first position, and where the cache has it."""

    readers: slice | torch.Tensor
    start: int
    held: tuple[slice | int, slice, slice]


@dataclass(frozen=True)
class _Run:
    """Spans attended together, filled up to the longest; some rows between theirs have none and are idle."""

    shape: tuple[int, int]  # rows, and tokens of each: the slots
    index: torch.Tensor  # [slots] places in the packed step; 0 where nothing real stands
    real: torch.Tensor  # [N'] the slots that hold a token
    places: torch.Tensor  # [N'] and its place
    whole: bool  # the slots are the packed step
    bias: torch.Tensor  # [rows, 1, heads per kv * count, or 1 for all, T]
    parts: Sequence[_Part]


def _together(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans of each run, ascending by row: alike in length."""
    runs: list[list[int]] = []
    kinds: dict[int, list[int]] = {}
    for i, span in enumerate(spans):
        count = span.stop - span.start
        if count > SHORT:
            runs.append([i])
        else:
            kinds.setdefault((count - 1).bit_length(), []).append(i)
    return runs + [sorted(kind, key=lambda i: spans[i].row) for kind in kinds.values()]


def _run(cache: KvCache, spans: Sequence[Span], offsets: Sequence[int], tokens: int) -> _Run:
    rows = _with_idle([span.row for span in spans])
    count = max(s.stop - s.start for s in spans)
    index = np.zeros((len(rows), count), np.int64)
    seen = np.ones_like(index)  # positions a query may look at; what is not real looks at the first
    real = np.zeros(index.shape, bool)
    stops = [0] * len(rows)
    places = {row: place for place, row in enumerate(rows)}
    for span, offset in zip(spans, offsets, strict=True):
        here = (places[span.row], slice(0, span.stop - span.start))
        index[here] = np.arange(offset, offset + span.stop - span.start)
        seen[here] = np.arange(span.start + 1, span.stop + 1)
        real[here] = True
        stops[places[span.row]] = span.stop
    length = cache.rules.positions(max(stops))
    if count > 1:  # a single token's heads see the same
        seen = np.tile(seen, (1, cache.heads // cache.kv_heads))
    hidden = np.arange(length) >= seen[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    filled = np.flatnonzero(real)
    placed = index.ravel()[filled]
    return _Run(
        index.shape,
        torch.from_numpy(index.ravel()).to(cache.device),
        torch.from_numpy(filled).to(cache.device),
        torch.from_numpy(placed).to(cache.device),
        len(filled) == index.size == tokens and bool((placed == np.arange(tokens)).all()),
        bias[:, None].to(cache.device),
        _parts(cache, rows, stops, length),
    )


def _with_idle(rows: Sequence[int]) -> list[int]:
    """These rows, ascending, and those between them while at most half are idle: products take rows that lie
    side by side."""
    found: list[int] = []
    first = given = 0
    for row in rows:
        if found and row - found[first] + 1 <= 2 * (given + 1):
            found += range(found[-1] + 1, row)
            given += 1
        else:
            first, given = len(found), 1
        found.append(row)
    return found


def _parts(cache: KvCache, rows: Sequence[int], stops: Sequence[int], length: int) -> list[_Part]:
    """What these rows of the cache see, up to `stops` each: a block that several share is read once, blocks
    that rows have alone are one product where the rows lie side by side."""
    parts: list[_Part] = []
    for start in range(0, length, BLOCK):
        positions = slice(start, min(start + BLOCK, length))
        readers: dict[int, list[int]] = {}
        for place, (row, stop) in enumerate(zip(rows, stops, strict=True)):
            if stop > start:
                readers.setdefault(cache.rows[row].owner(start // BLOCK), []).append(place)
        alone, other = [], set()
        for holder, places in readers.items():
            if len(places) == 1 and rows[places[0]] == holder:
                alone += places
            else:
                other.update(places)
                parts.append(_Part(_indices(places, cache), start, (holder, slice(None), positions)))
        for first, last in _stretches(alone, rows, other):
            held = slice(rows[first], rows[last] + 1), slice(None), positions
            parts.append(_Part(slice(first, last + 1), start, held))
    return parts


def _indices(places: Sequence[int], cache: KvCache) -> slice | torch.Tensor:
    """A slice if it can be one: it copies nothing."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places, device=cache.device)


def _stretches(
    places: Sequence[int], rows: Sequence[int], other: Collection[int]
) -> Iterator[tuple[int, int]]:
    """The first and last places of products that have all of these, at most half of each computed for nothing
    and none of the others."""
    members: list[int] = []
    for place in places:
        if members:
            first, last = members[0], members[-1]
            beside = rows[place] - rows[first] == place - first
            if (
                not beside
                or place - first + 1 > 2 * (len(members) + 1)
                or any(between in other for between in range(last + 1, place))
            ):
                yield first, last
                members = []
        members.append(place)
    if members:
        yield members[0], members[-1]

"""Attention over a packed trie, segment by segment: every token sees what stands above it and nothing else.

    own     [a, b)   of a piece, causal            queries of siblings that lie side by side are batched
    above   the pieces over it, all of them        their keys and values are put in front of the piece's own

A trie is attended whole, or chunk by chunk in packed order: a chunk sees the keys and values that earlier
chunks have left in `outside`.

On a GPU many small products take as long as their launches, ten times what the model takes. So there a
chunk is one product with a mask of all pairs, and a whole trie goes through FlexAttention, whose block mask
says the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from silva.models.blocked_attention import causal_attention, computed_in, plain_attention
from silva.models.same_bits import RowRules
from silva.models.trie import Trie

KeyValue = tuple[torch.Tensor, torch.Tensor]  # [1, kv_heads, tokens, d] each
Layers = Sequence[KeyValue] | Mapping[int, KeyValue]
FLEX_MIN_TOKENS = 1024
"""Tokens of a trie below which FlexAttention's set-up costs more than it saves."""
ONE_PRODUCT = {"cuda": 2**26}
"""Pairs of a query and a key up to which a chunk is attended in one product, by the type of the device: in
float32 a mask of 256 MiB."""
FLEX_BLOCK = 128
"""Tokens of a side of FlexAttention's blocks, what its kernels are tuned for."""
FILL = 1.25
"""Siblings are batched while padding them to the longest costs at most this factor."""


@dataclass(frozen=True)
class NodePiece:
    """A node or a part of one; `above` numbers the pieces over it, root first."""

    start: int
    stop: int
    above: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces, numbers [first, last) of `pieces`; `kept`: those that later chunks look at."""

    pieces: Sequence[NodePiece]
    first: int
    last: int
    kept: frozenset[int] = frozenset()

    @property
    def start(self) -> int:
        return self.pieces[self.first].start if self.last > self.first else self.stop

    @property
    def stop(self) -> int:
        return self.pieces[self.last - 1].stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def outside(self) -> list[int]:
        """Pieces of earlier chunks that this one looks at."""
        seen = {n for piece in self.pieces[self.first : self.last] for n in piece.above}
        return sorted(n for n in seen if n < self.first)


def chunks(trie: Trie, budget: int | None = None) -> list[Chunk]:
    """Cut a trie into runs of at most `budget` packed tokens (None: one run of all)."""
    return [share for (share,) in shares(trie, budget)]


def shares(trie: Trie, budget: int | None = None, ranks: int = 1) -> list[list[Chunk]]:
    """Runs of at most `budget` packed tokens, each cut into a share for every rank; the last may be empty."""
    most = len(trie) if budget is None else budget
    runs = [min(most, len(trie) - start) for start in range(0, len(trie), most)]
    sizes = [size // ranks + (rank < size % ranks) for size in runs for rank in range(ranks)]
    pieces: list[NodePiece] = []
    of_node: list[tuple[int, ...]] = []  # the pieces over and of each node, root first
    stops, firsts = np.cumsum(sizes).tolist(), [0]
    for node in trie.nodes:
        above = of_node[node.parent] if node.parent >= 0 else ()
        start = node.start
        while start < node.stop:
            stop = min(node.stop, stops[len(firsts) - 1])
            pieces.append(NodePiece(start, stop, above))
            above = (*above, len(pieces) - 1)
            start = stop
            while len(firsts) <= len(stops) and stop == stops[len(firsts) - 1]:
                firsts.append(len(pieces))
        of_node.append(above)
    made = [Chunk(pieces, a, b) for a, b in itertools.pairwise(firsts)]
    looked_at = frozenset(n for chunk in made for n in chunk.outside)
    kept = [Chunk(pieces, c.first, c.last, looked_at & frozenset(range(c.first, c.last))) for c in made]
    return [kept[at : at + ranks] for at in range(0, len(kept), ranks)]


class TrieAttention:
    """What `attention.attend` calls for one forward pass over one chunk.

    Args:
        outside: keys and values of each piece in `chunk.outside`, one pair a layer.
        rules: attend with the bits of sampling; None: as torch does.

    `found` holds after the pass those of the pieces in `chunk.kept`.
    """

    def __init__(
        self,
        chunk: Chunk,
        outside: Mapping[int, Layers],
        *,
        dtype: torch.dtype,
        device: torch.device,
        rules: RowRules | None = None,
    ) -> None:
        self.chunk, self.outside, self._rules = chunk, outside, rules
        self.found: dict[int, dict[int, KeyValue]] = {n: {} for n in chunk.kept}
        outer, length = sum(len(chunk.pieces[n]) for n in chunk.outside), chunk.stop - chunk.start
        one = length * (outer + length) <= ONE_PRODUCT.get(device.type, 0) and chunk.last > chunk.first + 1
        dtype = computed_in(dtype, device)
        self._runs = [_one_run(chunk, dtype, device)] if one else _runs(chunk, dtype, device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [1, heads, N, d], key and value [1, kv_heads, N, d] -> [1, N, heads, d]."""
        pieces, start = self.chunk.pieces, self.chunk.start
        for number, found in self.found.items():
            place = slice(pieces[number].start - start, pieces[number].stop - start)
            found.setdefault(layer, (key[:, :, place], value[:, :, place]))
        outs = []
        for run in self._runs:
            q, k, v = run.rows(query), run.rows(key), run.rows(value)
            if run.above:
                pairs = [self._above(n, layer, key, value) for n in run.above]
                shared_k, shared_v = (torch.cat([p[i] for p in pairs], 2) for i in (0, 1))
                k = torch.cat([shared_k.expand(len(q), -1, -1, -1), k], 2)
                v = torch.cat([shared_v.expand(len(q), -1, -1, -1), v], 2)
            if self._rules is None:
                o = plain_attention(q, k, v, run.bias, scaling)
            else:
                o = causal_attention(q, k, v, run.bias, scaling, self._rules)
            o = o.transpose(1, 2).flatten(0, 1)  # [rows * length, heads, d]
            outs.append(o if run.real is None else o[run.real])
        return torch.cat(outs)[None]

    def _above(self, number: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> KeyValue:
        if number < self.chunk.first:
            return self.outside[number][layer]
        piece = self.chunk.pieces[number]
        place = slice(piece.start - self.chunk.start, piece.stop - self.chunk.start)
        return key[:, :, place], value[:, :, place]


class SharedContextAttention:
    """The same for a rank that has a share of a chunk's tokens: what others have is outside of its share.

    Args:
        shares: of all ranks that share the context, in order; one that is empty takes a token to fill up.
        rank: whose tokens go through the model here.
        gather: x [2, kv_heads, n, d] of this rank -> [2, kv_heads, ranks * n, d] of all, with a gradient.
    """

    def __init__(
        self,
        shares: Sequence[Chunk],
        rank: int,
        outside: Mapping[int, Layers],
        gather: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._share, self._outside, self._gather = shares[rank], outside, gather
        self._n = max(1, *(len(share) for share in shares))
        self._rank = rank
        pieces = self._share.pieces
        self._places = {
            number: slice(at * self._n + pieces[number].start - share.start,
                          at * self._n + pieces[number].stop - share.start)
            for at, share in enumerate(shares) for number in range(share.first, share.last)
        }  # fmt: skip
        self.found: dict[int, dict[int, KeyValue]] = {n: {} for share in shares for n in share.kept}
        if len(self._share):
            self._inner = TrieAttention(self._share, {}, dtype=dtype, device=device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Shapes as of `TrieAttention.attend`, of this rank's tokens."""
        both = torch.cat([key, value])
        of_all = self._gather(F.pad(both, (0, 0, 0, self._n - both.shape[2])))
        keys, values = of_all[:1], of_all[1:]
        pairs = {n: (keys[:, :, place], values[:, :, place]) for n, place in self._places.items()}
        for number, found in self.found.items():
            found.setdefault(layer, pairs[number])
        if not len(self._share):  # the token that fills up sees itself
            own = values[:, :, self._rank * self._n :][:, :, :1].transpose(1, 2)
            return own.repeat_interleave(query.shape[1] // value.shape[1], 2)
        mine = slice(self._rank * self._n, self._rank * self._n + len(self._share))
        self._inner.outside = {
            n: {layer: pairs[n] if n in pairs else self._outside[n][layer]} for n in self._share.outside
        }
        return self._inner.attend(layer, query, keys[:, :, mine], values[:, :, mine], scaling)


class FlexTrieAttention:
    """The same for a whole trie on a GPU: one kernel a layer, compiled once for all sizes."""

    def __init__(self, trie: Trie, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        # create_block_mask finds the same blocks from every pair of tokens: gigabytes from 20,000 tokens on.
        partial, full = _blocks(trie.ends())
        ends = torch.from_numpy(trie.ends()).to(device, torch.int32)

        def visible(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < ends[k])

        self._mask = BlockMask.from_kv_blocks(
            *_listed(partial, device),
            *_listed(full, device),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=visible,
            seq_lengths=(len(trie), len(trie)),
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Shapes as of `TrieAttention.attend`."""
        gqa = query.shape[1] != key.shape[1]
        out = _flex_attention()(query, key, value, block_mask=self._mask, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2)


@functools.cache
def _flex_attention() -> Callable[..., torch.Tensor]:
    """One kernel for all sizes: `dynamic` makes symbols of lengths, also of what the mask has captured.

    Head counts, head size and scale stay constants: a model whose numbers differ compiles its own.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _blocks(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What blocks of queries see of blocks of keys, a part or all: [blocks, blocks] bool each.

    Blocks are runs of FLEX_BLOCK tokens, the last one shorter; `ends` [N] is as of `Trie.ends`.
    """
    first = np.arange(0, len(ends), FLEX_BLOCK)
    before = first[None] < first[:, None]  # blocks of keys that end before the queries start
    some = before & (np.maximum.reduceat(ends, first)[None] > first[:, None])
    full = before & (np.minimum.reduceat(ends, first)[None] >= first[:, None] + FLEX_BLOCK)
    return (some & ~full) | np.eye(len(first), dtype=bool), full


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries sees [1, 1, Q], and which ones, first [1, 1, Q, K]."""
    which = np.argsort(~blocks, axis=1, kind="stable")
    counts, indices = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (blocks.sum(1), which))
    return counts[None, None], indices[None, None]


@dataclass(frozen=True)
class _Run:
    """Siblings attended together, or a whole chunk: its [start, stop), `count` rows of `length` tokens."""

    start: int
    stop: int
    count: int
    length: int
    above: tuple[int, ...]
    bias: torch.Tensor | None  # [1, 1, length, tokens above + length] of 0 and -inf; None: causal
    index: torch.Tensor | None  # [count * length] places in the chunk, where rows are filled up
    real: torch.Tensor | None  # [count * length] bool: not filling

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, N, d] -> [count, heads, length, d]."""
        mine = x[0, :, self.start : self.stop] if self.index is None else x[0].index_select(1, self.index)
        return mine.unflatten(1, (self.count, self.length)).transpose(0, 1)


def _one_run(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> _Run:
    """All of a chunk as one row, with what it looks at outside above it."""
    outside = chunk.outside
    seen = [*outside, *range(chunk.first, chunk.last)]
    column = {number: place for place, number in enumerate(seen)}
    above = np.eye(len(seen), dtype=bool)[len(outside) :]  # [own pieces, pieces], or the same
    for row, piece in zip(above, chunk.pieces[chunk.first : chunk.last], strict=True):
        row[[column[number] for number in piece.above]] = True
    lengths = [len(chunk.pieces[number]) for number in seen]
    pieces = torch.from_numpy(np.repeat(np.arange(len(seen)), lengths)).to(device)
    length, places = chunk.stop - chunk.start, torch.arange(len(pieces), device=device)
    own = slice(len(pieces) - length, None)
    hidden = ~torch.from_numpy(above).to(device)[pieces[own] - len(outside)][:, pieces]
    hidden |= places > places[own, None]
    return _Run(0, length, 1, length, tuple(outside), _bias(hidden, dtype), None, None)


def _runs(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> list[_Run]:
    biases: dict[tuple[int, int], torch.Tensor] = {}
    made = []
    for siblings in _siblings(chunk):
        above = siblings[0].above
        past = sum(len(chunk.pieces[n]) for n in above)
        lengths = np.array([len(piece) for piece in siblings])
        length, start = int(lengths.max()), siblings[0].start - chunk.start
        index = real = None
        if lengths.min() < length:
            places = np.arange(length)
            starts = np.array([piece.start - chunk.start for piece in siblings])
            filled = starts[:, None] + np.minimum(places, lengths[:, None] - 1)
            index, real = (
                torch.from_numpy(x.reshape(-1)).to(device) for x in (filled, places < lengths[:, None])
            )
        if past and (length, past) not in biases:
            hidden = torch.ones(length, past + length, dtype=torch.bool, device=device).triu_(past + 1)
            biases[length, past] = _bias(hidden, dtype)
        stop = siblings[-1].stop - chunk.start
        bias = biases.get((length, past))
        made.append(_Run(start, stop, len(siblings), length, above, bias, index, real))
    return made


def _bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, queries, keys]: -inf where a key is hidden, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, float("-inf"))[None, None]


def _siblings(chunk: Chunk) -> list[list[NodePiece]]:
    """Consecutive pieces under the same pieces, of like length."""
    groups: list[list[NodePiece]] = []
    longest = total = 0
    for piece in chunk.pieces[chunk.first : chunk.last]:
        group = groups[-1] if groups and groups[-1][0].above == piece.above else None
        longest, total = max(longest, len(piece)), total + len(piece)
        if group is None or (len(group) + 1) * longest > FILL * total:
            groups.append([])
            group, longest, total = groups[-1], len(piece), len(piece)
        group.append(piece)
    return groups

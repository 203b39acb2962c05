"""Keys and values of many sequences, and attention over them that gives the same bits whatever else runs.

One row a sequence: `keys[layer][row, kv_head, position]`. A row holds the tokens it was computed from, so
that a new request finds the longest prefix any row shares with it. Whole blocks of 256 positions of such a
prefix stay where they are and are read from there, once a step for all rows that share them; only what is
left of it is copied.

    row 0   | block 0 | block 1 | 90 positions              owners ()
    row 1   |    (0)  |    (0)  | 90 copied, then its own   owners (0, 0): two blocks of row 0

Every operation on a token's row of numbers gives the same bits whatever rows are beside it: matrix products
under the rules that same_bits.py has probed, activations as in activation.py, attention as below. So what the
cache holds is a function of the tokens alone: reusing, evicting or recomputing a prefix changes time, never
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from silva.models.memory import lazy_zeros
from silva.models.same_bits import BLOCK, LANES, RowRules

# Spans of up to this many tokens are attended together, filled up to the longest of them.
SHORT = 64
# No tokens: where a row has none, and one that no row has.
FREE, NOTHING = -1, -2


class Row:
    """A sequence in the cache: `tokens[:computed]` have their keys, values and outputs."""

    def __init__(self, cache: KvCache, index: int) -> None:
        self.index = index
        self.length = self.computed = 0
        self.busy = False
        self.last_used = 0
        self.owners: tuple[int, ...] = ()  # the rows that hold its first blocks
        self._cache = cache

    @property
    def tokens(self) -> np.ndarray:
        """[length] int64, a view."""
        return self._cache.tokens[self.index, : self.length]

    def owner(self, block: int) -> int:
        return self.owners[block] if block < len(self.owners) else self.index


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one row in a packed step: positions [start, stop)."""

    row: int
    start: int
    stop: int


class KvCache:
    """Storage and prefix lookup. Memory grows with use, up to `rows` sequences of `context` tokens.

    `outputs` are the final hidden states, some 5 % on top of keys and values: with them a prompt that is
    known to its last token needs no computing at all. `rules` say how steps over this cache are filled up;
    before they are probed nothing is.
    """

    def __init__(self, config: Any, *, rows: int, context: int, dtype: torch.dtype, device: torch.device):
        self.rules = RowRules(lanes=LANES if device.type == "cpu" else BLOCK, hold=False)
        text = config.get_text_config()
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.layers = text.num_hidden_layers
        self.width = text.hidden_size
        self.context = context
        self.dtype, self.device = dtype, device
        self.rows = [Row(self, i) for i in range(rows)]
        self.tokens = np.full((rows, 1), FREE)  # of every row; the last column is always free
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
            row.computed, row.owners = 0, ()
            if row.busy:
                self._reserve(row.index + 1, row.length)
            else:
                self._write(row, np.empty(0, np.int64))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self.keys, *self.values, *self.outputs))

    def longest_prefix(self, tokens: np.ndarray) -> tuple[Row | None, int]:
        """The row sharing the longest prefix with `tokens` (planned tokens count), and its length."""
        width = min(len(tokens), self.tokens.shape[1] - 1)
        equal = self.tokens[:, : width + 1] == np.append(tokens[:width], NOTHING)
        shared = equal.argmin(1)  # the first that differs; the last one does in any case
        best = int(shared.argmax())
        return (self.rows[best], int(shared[best])) if shared[best] else (None, 0)

    def acquire(self, source: Row | None, shared: int, tokens: np.ndarray) -> tuple[Row, int] | None:
        """A row for `tokens` whose first `shared` positions come from `source`; None while all are busy.

        Returns the row and how many positions it already has. A finished sequence that `tokens`
        continues is taken over in place; of any other prefix whole blocks are shared, the rest is copied.
        """
        self._clock += 1
        continued = source is not None and not source.busy and shared == source.length
        row = source if continued else self._idle_row(source)
        if row is None:
            return None
        self._reserve(row.index + 1, len(tokens))
        if source is None:
            row.owners = ()
        else:
            source.last_used = self._clock
            whole = shared // BLOCK
            holder, rest = source.owner(whole), slice(whole * BLOCK, shared)
            if holder != row.index:
                for store in (*self.keys, *self.values):
                    store[row.index, :, rest] = store[holder, :, rest]
            if row is source:
                row.owners = row.owners[:whole]
            else:
                row.owners = tuple(source.owner(block) for block in range(whole))
                self.outputs[0][row.index, :, :shared] = self.outputs[0][source.index, :, :shared]
        self._write(row, tokens)
        row.computed, row.busy, row.last_used = shared, True, self._clock
        return row, shared

    def _idle_row(self, source: Row | None) -> Row | None:
        """The row to give up: an empty one, else the one unused for longest; `source` itself as the last.

        Never one that holds blocks of others. Among rows that nobody uses, there is always one that holds
        none: the newest.
        """
        held = {owner for row in self.rows if row.length for owner in row.owners}
        idle = [r for r in self.rows if not r.busy and r.index not in held]
        return min(idle, key=lambda r: (r is source, r.length > 0, r.last_used, r.index), default=None)

    def release(self, row: Row) -> None:
        """The sequence has ended; what was computed stays for reuse until the row is needed."""
        self._write(row, row.tokens[: row.computed])
        row.busy = False
        row.last_used = self._clock

    def append(self, row: Row, token: int) -> None:
        self._reserve(row.index + 1, row.length + 1)
        self.tokens[row.index, row.length] = token
        row.length += 1

    def store(
        self,
        layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put key and value [N, kv_heads, d] of N tokens to their rows and positions [N]; returns all of the
        layer's keys and values."""
        keys, values, where = self.keys[layer], self.values[layer], [rows, None, positions]
        torch.ops.aten.index_put_(keys, where, key)
        torch.ops.aten.index_put_(values, where, value)
        return keys, values

    def _write(self, row: Row, tokens: np.ndarray) -> None:
        self.tokens[row.index, : len(tokens)] = tokens
        self.tokens[row.index, len(tokens) : row.length] = FREE
        row.length = len(tokens)

    def _reserve(self, rows: int, length: int) -> None:
        if length >= self.tokens.shape[1]:
            wider = min(self.context, max(length, 2 * self.tokens.shape[1]))
            kept, self.tokens = self.tokens, np.full((len(self.rows), wider + 1), FREE)
            self.tokens[:, : kept.shape[1]] = kept
        have_rows, _, have_length, _ = self.keys[0].shape
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:
            rows = min(len(self.rows), max(rows, 2 * have_rows))
        if length > have_length:
            length = min(self.context, max(length, have_length * 3 // 2))
            length = _padded(length, self.rules.lanes)
        rows, length = max(rows, have_rows), max(length, have_length)
        for stores in (self.keys, self.values, self.outputs):
            for i, old in enumerate(stores):
                stores[i] = self._zeros(rows, old.shape[1], length, old.shape[3])
                stores[i][:have_rows, :, :have_length] = old

    def _zeros(self, *shape: int) -> torch.Tensor:
        """Zeros, not garbage: masked positions are multiplied by a weight of 0."""
        return lazy_zeros(shape, self.dtype, self.device)


class PackedStep:
    """Attention of one packed step: the new tokens of many rows, one span a row.

    The step goes through the model as `size` tokens: the real ones first, then as many as `KvCache.rules` ask
    for, whose states mean nothing. `rows` [count] are those of the real ones, `positions` [size] of all.

    Spans of like length in rows that lie side by side are attended together: all that decode, and all
    short spans (the next turns of dialogues); a long one is attended on its own.
    """

    def __init__(self, cache: KvCache, spans: Sequence[Span]):
        self.cache = cache
        counts = np.array([s.stop - s.start for s in spans])
        rows = np.repeat([s.row for s in spans], counts)
        self.count = len(rows)
        self.size = cache.rules.linear.padded(self.count)
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
        self, decoder: Callable[[torch.Tensor, PackedStep], torch.Tensor], tokens: np.ndarray
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
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        return self.attend_rows(layer, query, key, value, scaling)[None]

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [size, heads, d], key and value [size, kv_heads, d] -> [size, heads, d]."""
        filled, real = self.size - self.count, slice(self.count)
        if filled:
            query, key, value = query[real], key[real], value[real]
        out = self._attend(layer, query, key, value, scaling)
        return F.pad(out, (0, 0, 0, 0, 0, filled)) if filled else out

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
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
            o = blocked_attention(mine, pairs, run.bias, scaling, self.cache.rules)
            o = o.view(rows, kv, heads // kv, count, d).permute(0, 3, 1, 2, 4).reshape(-1, heads, d)
            if run.whole:
                return o
            out[run.places] = o[run.real]
        return out


def blocked_attention(
    query: torch.Tensor,
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor,
    scaling: float,
    rules: RowRules,
) -> torch.Tensor:
    """Softmax attention whose every query row has the same bits for any batch, padding or chunking.

    Args:
        query: [B, kv, Q, d].
        blocks: keys and values of BLOCK positions each (the last: a multiple of LANES), [B, kv, L, d], or
            [kv, L, d] where all of the batch share them: then they are read once.
        bias: [B or 1, 1, Q or 1, T] of 0 and -inf.
        rules: how queries and matrices are filled up for that.

    Returns:
        [B, kv, Q, d]
    """
    count = query.shape[2]
    missing = rules.attention.padded(count) - count
    if missing:
        query = F.pad(query, (0, 0, 0, missing))
        if bias.shape[2] > 1:
            bias = F.pad(bias, (0, 0, 0, missing))
    scores = [_product(query, key.transpose(-1, -2), rules.matrices) for key, _ in blocks]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, -1)).mul_(scaling).add_(bias)
    weights = weights.softmax(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    parts = weights.to(query.dtype).split(BLOCK, -1)
    out = _product(parts[0], blocks[0][1], rules.matrices)
    for part, (_, value) in zip(parts[1:], blocks[1:], strict=True):
        out += _product(part, value, rules.matrices)
    return out[:, :, :count]


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
    length = _padded(max(s.stop for s in spans), cache.rules.lanes)
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


def _padded(length: int, unit: int) -> int:
    return -(-length // unit) * unit

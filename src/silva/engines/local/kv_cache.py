"""Keys and values of many sequences; ragged_step.py attends to them.

One row a sequence: `keys[layer][row, kv_head, position]`. A row holds the tokens it was computed from, so
that a new request finds the longest prefix any row shares with it. Whole blocks of 256 positions of such a
prefix stay where they are and are read from there, once a step for all rows that share them; only what is
left of it is copied.

    row 0   | block 0 | block 1 | 90 positions              owners ()
    row 1   |    (0)  |    (0)  | 90 copied, then its own   owners (0, 0): two blocks of row 0

Every operation on a token's row of numbers gives the same bits whatever rows are beside it: matrix products
under the rules that same_bits.py has probed, activations as in activation.py, attention as in ragged_step.py.
So what the cache holds is a function of the tokens alone: reusing, evicting or recomputing a prefix changes
time, never results.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from silva.models.attention import head_dim
from silva.models.memory import is_lazy, lazy_zeros
from silva.models.same_bits import BLOCK, LANES, RowRules

ADDRESSES = 2**28
"""Bytes that a store may take at once where only those written to take memory: moving to a larger place costs
time, addresses do not."""
# No tokens: where a row has none, and one that no row has.
FREE, NOTHING = -1, -2
NOBODY = -1
"""In place of an adapter's number: of a row that no request may go on from."""


class CacheRow:
    """A sequence in the cache: `tokens[:computed]` have their keys, values and outputs."""

    def __init__(self, cache: KvCache, index: int) -> None:
        self.index = index
        self.length = self.computed = 0
        self.busy = False
        self.last_used = 0
        self.owners: tuple[int, ...] = ()  # the rows that hold its first blocks
        self.adapter = 0  # the number of the one that it was computed with; 0: the model alone
        self.written = 0  # positions that may hold numbers
        self._cache = cache

    @property
    def tokens(self) -> np.ndarray:
        """[length] int64, a view."""
        return self._cache.tokens[self.index, : self.length]

    def owner(self, block: int) -> int:
        return self.owners[block] if block < len(self.owners) else self.index


class KvCache:
    """Storage and prefix lookup. Memory grows with use, up to `rows` sequences of `context` tokens.

    `outputs` are the final hidden states, some 5 % on top of keys and values: with them a prompt that is
    known to its last token needs no computing at all. `rules` say how steps over this cache are filled up;
    before they are probed nothing is.

    Args:
        routed: how many routes of a token are kept beside them (layers * k), and in which type; None: none.
    """

    def __init__(
        self,
        config: Any,
        *,
        rows: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        routed: tuple[int, torch.dtype] | None = None,
    ) -> None:
        self.rules = RowRules(lanes=LANES if device.type == "cpu" else BLOCK, hold=False)
        text = config.get_text_config()
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_dim = head_dim(config)
        self.layers = text.num_hidden_layers
        self.width = text.hidden_size
        self.context = context
        self.dtype, self.device = dtype, device
        self.rows = [CacheRow(self, i) for i in range(rows)]
        self.tokens = np.full((rows, 1), FREE)  # of every row; the last column is always free
        self.keys: list[torch.Tensor] = []  # a layer: [rows, kv_heads, T, d]
        self.values: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []  # [rows, 1, T, D], and [rows, 1, T, layers * k] of routes
        self._routed = routed
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        """Forget every key and value (the weights changed) and give the memory back.

        Busy rows keep their tokens, to be computed again.
        """
        self.keys = [self._zeros(0, self.kv_heads, 0, self.head_dim) for _ in range(self.layers)]
        self.values = [self._zeros(0, self.kv_heads, 0, self.head_dim) for _ in range(self.layers)]
        self.outputs = [self._zeros(0, 1, 0, self.width)]
        if self._routed is not None:
            count, dtype = self._routed
            self.outputs.append(self._zeros(0, 1, 0, count, dtype=dtype))
        for row in self.rows:
            row.computed, row.owners, row.written = 0, (), 0
        for row in self.rows:
            if row.busy:
                self.reserve(row, row.length)
            else:
                self._write(row, np.empty(0, np.int64))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self.keys, *self.values, *self.outputs))

    def longest_prefix(self, tokens: np.ndarray, adapter: int = 0) -> tuple[CacheRow | None, int]:
        """The row sharing the longest prefix with `tokens` (planned tokens count), and its length.

        Of several the one that has computed the most of it."""
        planned, known = self.prefixes(tokens, adapter)
        best = int((planned * (self.context + 1) + known).argmax())
        return (self.rows[best], int(planned[best])) if planned[best] else (None, 0)

    def prefixes(self, tokens: np.ndarray, adapter: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """How many of the first tokens each row of the adapter has, and how many of those it has computed:
        [rows] each."""
        planned, known = np.zeros((2, len(self.rows)), np.int64)
        found = [row for row in self.rows if row.adapter == adapter and row.length]
        if found:
            all_rows = len(found) == len(self.rows)  # a slice copies nothing
            mine = slice(None) if all_rows else [row.index for row in found]
            width = min(len(tokens), self.tokens.shape[1] - 1)
            equal = self.tokens[mine, : width + 1] == np.append(tokens[:width], NOTHING)
            planned[mine] = equal.argmin(1)  # the first that differs; the last one does in any case
            known[mine] = np.minimum(planned[mine], [row.computed for row in found])
        return planned, known

    def acquire(
        self,
        source: CacheRow | None,
        shared: int,
        tokens: np.ndarray,
        spared: Collection[int] = (),
        adapter: int = 0,
    ) -> tuple[CacheRow, int] | None:
        """A row for `tokens` whose first `shared` positions come from `source`, a row of the same adapter;
        None while all others are busy or spared.

        Returns the row and how many positions it already has. A finished sequence that `tokens`
        continues is taken over in place; of any other prefix whole blocks are shared, the rest is copied.
        """
        self._clock += 1
        continued = source is not None and not source.busy and shared == source.length
        row = source if continued else self._idle_row(source, spared)
        if row is None:
            return None
        if row.adapter != adapter:
            self._erase(row)
            row.adapter = adapter
        self.reserve(row, len(tokens))
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
                for store in self.outputs:
                    store[row.index, :, :shared] = store[source.index, :, :shared]
        self._write(row, tokens)
        row.computed, row.busy, row.last_used = shared, True, self._clock
        return row, shared

    def _idle_row(self, source: CacheRow | None, spared: Collection[int]) -> CacheRow | None:
        """The row to give up: one without use, else the one unused for longest; `source` itself as the last.

        Never one that is spared or holds blocks of others. Among rows that nobody uses, there is always one
        that holds none: the newest.
        """
        held = {owner for row in self.rows if row.length for owner in row.owners}
        idle = [r for r in self.rows if not r.busy and r.index not in held and r.index not in spared]
        return min(
            idle,
            key=lambda r: (r is source, r.length > 0 and r.adapter != NOBODY, r.last_used, r.index),
            default=None,
        )

    def release(self, row: CacheRow, source: CacheRow | None = None) -> None:
        """The sequence has ended; what was computed stays for reuse until the row is needed.

        Args:
            source: the row that holds the rest of what it was made from.
        """
        self._write(row, row.tokens[: row.computed])
        row.busy = False
        row.last_used = self._clock
        if source is not None:
            self._clock += 1
            source.last_used = self._clock

    def forget(self, adapter: int) -> None:
        """No request with this adapter will come again: its idle rows are the next to be given up."""
        for row in self.rows:
            if row.adapter == adapter and not row.busy:
                row.adapter = NOBODY

    def _erase(self, row: CacheRow) -> None:
        """Zeros, as in a new row: another's NaN would count even where its weight is 0."""
        for store in (*self.keys, *self.values, *self.outputs):
            store[row.index : row.index + 1, :, : row.written] = 0  # it may have lost its memory
        row.written = 0

    def copy(self, source: CacheRow, row: CacheRow, stop: int) -> None:
        """Go on with what `source` holds of positions up to `stop`, where `row` has the same tokens."""
        start = row.computed
        for first in range(start - start % BLOCK, stop, BLOCK):
            part = slice(max(start, first), min(stop, first + BLOCK))
            holder = source.owner(first // BLOCK)
            for store in (*self.keys, *self.values):
                store[row.index, :, part] = store[holder, :, part]
        for store in self.outputs:
            store[row.index, :, start:stop] = store[source.index, :, start:stop]
        row.computed = stop

    def append(self, row: CacheRow, token: int) -> None:
        self.reserve(row, row.length + 1)
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

    def _write(self, row: CacheRow, tokens: np.ndarray) -> None:
        self.tokens[row.index, : len(tokens)] = tokens
        self.tokens[row.index, len(tokens) : row.length] = FREE
        row.length = len(tokens)

    def reserve(self, row: CacheRow, length: int) -> None:
        """Memory for so many positions of a row, beyond its tokens too."""
        row.written = max(row.written, length)
        rows = row.index + 1
        if length >= self.tokens.shape[1]:
            wider = min(self.context, max(length, 2 * self.tokens.shape[1]))
            kept, self.tokens = self.tokens, np.full((len(self.rows), wider + 1), FREE)
            self.tokens[:, : kept.shape[1]] = kept
        have_rows, _, have_length, _ = self.keys[0].shape
        if rows <= have_rows and length <= have_length:
            return
        if length > have_length:
            length = min(self.context, max(length, have_length * 3 // 2))
            length = self.rules.positions(length)
        length = max(length, have_length)
        used = max((row.index + 1 for row in self.rows if row.computed or row.busy), default=0)
        rows = max(rows, 2 * have_rows if rows > have_rows else used)
        if is_lazy(self.device):
            rows = max(rows, ADDRESSES // (self.kv_heads * length * self.head_dim * self.dtype.itemsize))
        else:
            rows = max(rows, have_rows)
        rows, used = min(rows, len(self.rows)), min(used, have_rows)
        for stores in (self.keys, self.values, self.outputs):
            for i, old in enumerate(stores):
                stores[i] = self._zeros(rows, old.shape[1], length, old.shape[3], dtype=old.dtype)
                stores[i][:used, :, :have_length] = old[:used]

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Zeros, not garbage: masked positions are multiplied by a weight of 0."""
        return lazy_zeros(shape, dtype or self.dtype, self.device)

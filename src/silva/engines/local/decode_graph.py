"""Decoding on a GPU: a whole step as one CUDA graph, so that no layer waits for Python to launch it.

    inputs [requests, 3 + blocks]     token, row, position, and the row that holds each block of the row
        └─ one copy to the GPU, one launch: embedding, layers, attention through the table, norm

A step is recorded for 8, 16, 32, ... requests and filled up to them; records are remade when the cache has
moved. Attention is FlexAttention over the whole cache as one long sequence, of which a request sees the
blocks in its table: shared prefixes are read where they lie.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from silva.engines.local.kv_cache import CacheRow, KvCache
from silva.models.decoder import Decoder
from silva.models.same_bits import BLOCK

Replay = Callable[[], object]
MIN_ROWS = 8  # requests: for fewer a step takes no less time
_QUERIES = 128  # of a block of the mask: heads that share keys are the queries of a request, and are fewer
_KERNELS = 64  # past its limit torch would go on without a kernel, many times slower and unseen


class DecodeGraphs:
    """Steps in which every request computes one token.

    Args:
        record: makes of a step something to repeat it with; the step reads and writes the same memory each
            time.
    """

    def __init__(
        self, decoder: Decoder, cache: KvCache, record: Callable[[Replay], Replay] | None = None
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._record = record or cuda_graph
        self._recorded: dict[int, tuple[torch.Tensor, Replay]] = {}
        self._of: weakref.ref[torch.Tensor] | None = None  # the memory that the records know

    def __call__(self, rows: Sequence[CacheRow]) -> None:
        """Compute the next token of each row into the cache: keys, values and output."""
        keys = self._cache.keys[0]
        if self._of is None or self._of() is not keys:
            self.forget()
            self._of = weakref.ref(keys)
        size = max(MIN_ROWS, 1 << (len(rows) - 1).bit_length())
        table = np.empty((size, 3 + keys.shape[2] // BLOCK), np.int64)
        for i, row in enumerate(rows):
            table[i, :3] = row.tokens[row.computed], row.index, row.computed
            table[i, 3:] = row.index
            table[i, 3 : 3 + len(row.owners)] = row.owners
        table[len(rows) :] = table[len(rows) - 1]  # the same numbers again, to the same places
        if size not in self._recorded:
            self._recorded[size] = self._step(torch.from_numpy(table).to(keys.device))
        inputs, replay = self._recorded[size]
        inputs.copy_(torch.from_numpy(table))
        replay()

    def forget(self) -> None:
        """Drop the records and their memory."""
        self._recorded.clear()

    def _step(self, inputs: torch.Tensor) -> tuple[torch.Tensor, Replay]:
        def step() -> None:
            packed = DecodeStep(self._cache, inputs)
            states = self._decoder(inputs[:, 0], packed)
            self._cache.outputs[0][packed.rows, 0, packed.positions] = states

        return inputs, self._record(step)


class DecodeStep:
    """Attention of one token a row, like RaggedStep, in tensors whose shapes depend on how many rows alone.

    Args:
        inputs: [B, 3 + blocks] int64 as above, on the device.
    """

    def __init__(self, cache: KvCache, inputs: torch.Tensor) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        self.cache = cache
        self.rows, self.positions = inputs[:, 1], inputs[:, 2]
        kv, here = cache.kv_heads, inputs.device
        slots, _, length, _ = cache.keys[0].shape
        blocks = length // BLOCK  # of a row
        # [row, kv head, position] as one sequence: which of its blocks a head of a request sees, in order.
        ranks = torch.arange(blocks, device=here)
        heads = torch.arange(kv, device=here)[:, None]
        seen = ((inputs[:, None, 3:] * kv + heads) * blocks + ranks).flatten(0, 1).int()  # [B * kv, blocks]
        last = self.positions.repeat_interleave(kv, output_size=kv * len(inputs)).int()  # [B * kv]
        rank_of = ranks.int().repeat(slots * kv)

        def visible(b: torch.Tensor, _h: Any, _q: Any, k: torch.Tensor) -> torch.Tensor:
            block = k // BLOCK
            rank = rank_of[block]
            return (seen[b, rank] == block) & (rank * BLOCK + k % BLOCK <= last[b])

        # Without a list of whole blocks, which need no mask: with one the kernel shares out the whole
        # cache among its programs, and not the blocks that a request sees.
        self._mask = BlockMask.from_kv_blocks(
            (last // BLOCK + 1)[:, None, None],
            seen[:, None, None],
            BLOCK_SIZE=(_QUERIES, BLOCK),
            mask_mod=visible,
            seq_lengths=(cache.heads // kv, slots * kv * length),
            compute_q_blocks=False,
        )

    def attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query, scaled already, [B, heads, d], key and value [B, kv_heads, d] -> [B, heads, d]."""
        keys, values = self.cache.store(layer, self.rows, self.positions, key, value)
        requests, heads, d = query.shape
        kv = key.shape[1]
        out = _attention()(
            query.reshape(requests * kv, 1, heads // kv, d),
            keys.view(1, 1, -1, d),
            values.view(1, 1, -1, d),
            block_mask=self._mask,
            scale=1.0,
        )
        return out.reshape(requests, heads, d)


def cuda_graph(step: Replay) -> Replay:
    """Record what `step` launches on the GPU; the result launches it all again with one call."""
    ahead = torch.cuda.Stream()
    ahead.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(ahead):  # compiles, and lets libraries set themselves up: neither can be recorded
        step()
        step()
    torch.cuda.current_stream().wait_stream(ahead)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


@functools.cache
def _attention() -> Callable[..., torch.Tensor]:
    """One kernel for each number of requests, which decides how the work is shared out; the length of the
    cache is a symbol."""
    from torch.nn.attention.flex_attention import flex_attention

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _KERNELS)
    compiled = torch.compile(flex_attention, dynamic=True)

    def attend(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        torch._dynamo.mark_static(query)
        return compiled(query, *rest, **options)

    return attend

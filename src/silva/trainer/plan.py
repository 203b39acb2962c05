"""How the rows of an update are cut into micro-batches. Pure: made before any tensor or collective.

    rows in lexicographic order   aab aac | aad | xy xz      neighbours share the most
    tokens each one adds            3   1   1      2  1      of the trie of a micro-batch
    a cut before it repeats         .   2   2      0  1      what it shares with the row before

The cut changes memory and speed, never the gradient: loss weights are normalised over the whole update
before it is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from silva.models.trie import MIN_SHARED, sort_rows

MicroBatch = list[int]  # indices of samples
START = 64
"""Tokens that a micro-batch costs beside its own: small ones are merged where the budget allows."""
WALK = 1.4
"""A token's cost in a trie that is walked chunk by chunk: one forward pass more, of three."""


def plan(
    rows: Sequence[np.ndarray], budget: int, ranks: int = 1, *, least: int = MIN_SHARED
) -> list[list[MicroBatch]]:
    """Micro-batches of sample indices for each rank.

    A micro-batch's trie holds at most `budget` tokens, tokens that its rows share counted once. Rows that
    share a prefix stay together; where a family exceeds the budget it is cut where the least is repeated, or
    kept whole, to be walked, where that costs less. With several ranks no micro-batch exceeds a rank's fair
    share either, so that a small update still uses all of them.

    Args:
        rows: tokens of each row.
        budget: tokens of one micro-batch.
        ranks: how many processes share the update.
        least: shortest prefix of unrelated rows that is shared.

    Returns:
        One list per rank, all of the same length (padded with empty micro-batches at the end), largest first
        and balanced by tokens; every index of `rows` exactly once.

    Raises:
        ValueError: budget or ranks below 1, or an empty row.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"plan: got budget {budget} and ranks {ranks}, expected 1 or more of both")
    lengths = [len(row) for row in rows]
    if any(length < 1 for length in lengths):
        raise ValueError(f"plan: row {min(range(len(lengths)), key=lengths.__getitem__)} holds no token")
    order, shared = sort_rows(rows, least)
    added = np.array([lengths[i] for i in order], dtype=np.int64) - shared
    if ranks > 1:
        budget = max(1, min(budget, -(-int(added.sum()) // ranks)))
    bounds = _cut(added, shared, budget)
    micro_batches = [sorted(order[a:b]) for a, b in bounds]
    sizes = [int(shared[a] + added[a:b].sum()) for a, b in bounds]
    return _deal(micro_batches, sizes, ranks)


def _cut(added: np.ndarray, shared: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """The cheapest cut of n rows in order, by dynamic programming over where the last micro-batch begins."""
    n = len(added)
    families = [*(i for i in range(n) if shared[i] == 0), n]
    family_of_end = {end: start for start, end in itertools.pairwise(families)}
    cost, begin = [0.0] * (n + 1), [0] * (n + 1)
    for end in range(1, n + 1):
        best, size = float("inf"), 0
        for start in range(end - 1, -1, -1):
            size += int(added[start])
            tokens = size + int(shared[start])
            if size > budget:
                break
            if tokens <= budget and cost[start] + START + tokens < best:
                best, begin[end] = cost[start] + START + tokens, start
        start = family_of_end.get(end, end)
        tokens = int(added[start:end].sum())
        if tokens > budget and cost[start] + START + WALK * tokens < best:
            best, begin[end] = cost[start] + START + WALK * tokens, start
        cost[end] = best
    bounds = []
    while n:
        bounds.append((begin[n], n))
        n = begin[n]
    return bounds[::-1]


def _deal(micro_batches: list[MicroBatch], sizes: Sequence[int], ranks: int) -> list[list[MicroBatch]]:
    """Largest first (memory runs out at once or never) to the rank with the fewest tokens among those with
    room (LPT scheduling)."""
    rounds = -(-len(micro_batches) // ranks)
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for size, micro_batch in sorted(zip(sizes, micro_batches, strict=True), key=lambda pair: -pair[0]):
        rank = min((r for r in range(ranks) if len(dealt[r]) < rounds), key=load.__getitem__)
        dealt[rank].append(micro_batch)
        load[rank] += size
    for micro_batches_of_rank in dealt:
        micro_batches_of_rank.extend([] for _ in range(rounds - len(micro_batches_of_rank)))
    return dealt

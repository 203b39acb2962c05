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
from typing import NamedTuple

import numpy as np

from silva.models.trie import MIN_SHARED, sort_rows

MicroBatch = list[int]  # indices of samples


class RankWork(NamedTuple):
    """What a rank does in one round.

    `passes`: chunks of the largest trie of the round, 1 for one that is not walked. A model that is divided
    among the ranks makes as many on each of them, also for smaller tries and for no rows. `tokens`: of its
    own trie. `cost`: of these, see `plan`.
    """

    rows: MicroBatch
    passes: int
    tokens: int
    cost: float


START = 64
"""Tokens that a micro-batch costs beside its own: small ones are merged where the budget allows."""
WALK = 1.4
"""A token's cost in a trie that is walked chunk by chunk: one forward pass more, of three."""


def plan(
    rows: Sequence[np.ndarray],
    budget: int,
    ranks: int = 1,
    *,
    least: int = MIN_SHARED,
    walk: bool = True,
    attention: float = 0.0,
) -> list[list[RankWork]]:
    """Micro-batches of sample indices for each rank, in rounds that all ranks make together.

    A micro-batch's trie holds at most `budget` tokens, tokens that its rows share counted once. Rows that
    share a prefix stay together; where a family exceeds the budget it is cut where the least is repeated, or
    kept whole, to be walked, where that costs less. With several ranks no micro-batch exceeds a rank's fair
    share either, so that a small update still uses all of them.

    Args:
        rows: tokens of each row.
        budget: tokens of one micro-batch.
        ranks: how many processes share the update.
        least: shortest prefix of unrelated rows that is shared.
        walk: whether a trie above the budget may be walked chunk by chunk.
        attention: what a token costs more for each one that it attends to; 1 is what it costs without.

    Returns:
        One list per rank, all with the same passes: largest first, balanced by cost. In the last round some
        ranks may be left without rows. Every index of `rows` exactly once.

    Raises:
        ValueError: budget or ranks below 1, an empty row, or one above the budget that may not be walked.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"plan: got budget {budget} and ranks {ranks}, expected 1 or more of both")
    lengths = [len(row) for row in rows]
    if 0 in lengths:
        raise ValueError(f"plan: row {lengths.index(0)} holds no token")
    longest = max(lengths, default=0)
    if not walk and longest > budget:
        raise ValueError(f"plan: a row holds {longest} tokens, expected at most {budget}")
    order, shared = sort_rows(rows, least)
    added = np.array([lengths[i] for i in order], dtype=np.int64) - shared
    fair = budget if ranks == 1 else max(1, min(budget, -(-int(added.sum()) // ranks)))
    bounds = _cut(added, shared, fair if walk else max(fair, longest), walk)
    micro_batches = [sorted(order[a:b]) for a, b in bounds]
    sizes = [int(shared[a] + added[a:b].sum()) for a, b in bounds]
    above = np.square(shared + added) - np.square(shared)  # twice the pairs that each row adds
    pairs = [float(shared[a] ** 2 + above[a:b].sum()) / 2 for a, b in bounds]
    costs = [size + attention * more for size, more in zip(sizes, pairs, strict=True)]
    return _deal(micro_batches, sizes, costs, budget, ranks)


def imbalance(dealt: Sequence[Sequence[RankWork]]) -> float:
    """How many times as long an update takes as if every round were divided evenly; 1 or more."""
    rounds = itertools.zip_longest(*dealt, fillvalue=RankWork([], 0, 0, 0.0))
    costs = [[work.cost for work in together] for together in rounds]
    total = sum(map(sum, costs))
    return len(dealt) * sum(map(max, costs)) / total if total else 1.0


def _cut(added: np.ndarray, shared: np.ndarray, budget: int, walk: bool) -> list[tuple[int, int]]:
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
        if walk and tokens > budget and cost[start] + START + WALK * tokens < best:
            best, begin[end] = cost[start] + START + WALK * tokens, start
        cost[end] = best
    bounds = []
    while n:
        bounds.append((begin[n], n))
        n = begin[n]
    return bounds[::-1]


def _deal(
    micro_batches: list[MicroBatch], sizes: Sequence[int], costs: Sequence[float], budget: int, ranks: int
) -> list[list[RankWork]]:
    """Rounds of similar costs, largest first (memory runs out at once or never), and within a round the
    largest to the rank with the least so far (LPT scheduling)."""
    dealt: list[list[RankWork]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    ordered = sorted(zip(costs, sizes, micro_batches, strict=True), key=lambda each: -each[0])
    for start in range(0, len(ordered), ranks):
        together = ordered[start : start + ranks]
        together += [(0.0, 0, [])] * (ranks - len(together))
        passes = -(-max(size for _, size, _ in together) // budget)
        least = sorted(range(ranks), key=load.__getitem__)
        for (cost, size, rows), rank in zip(together, least, strict=True):
            dealt[rank].append(RankWork(rows, passes, size, cost))
            load[rank] += cost
    return dealt

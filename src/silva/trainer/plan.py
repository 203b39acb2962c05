"""How the rows of an update are cut into micro-batches. Pure: made before any tensor or collective.

The cut changes memory and speed, never the gradient: loss weights are normalised over the whole update
before it is made.
"""

from __future__ import annotations

from collections.abc import Sequence

MicroBatch = list[int]  # indices of samples


def plan(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[MicroBatch]]:
    """Micro-batches of sample indices for each rank.

    Rows are sorted by length, longest first (memory runs out at once or never), ties in given order.
    A micro-batch is padded to its longest row and then holds at most `budget` tokens; a row longer than
    the budget stands alone. With several ranks no micro-batch exceeds a rank's fair share either, so that
    a small update still uses all of them.

    Args:
        lengths: tokens of each row.
        budget: tokens of one micro-batch, padding counted.
        ranks: how many processes share the update.

    Returns:
        One list per rank, all of the same length (padded with empty micro-batches at the end) and balanced
        by padded tokens; every index of `lengths` exactly once.

    Raises:
        ValueError: budget or ranks below 1, or an empty row.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"plan: got budget {budget} and ranks {ranks}, expected 1 or more of both")
    if any(length < 1 for length in lengths):
        raise ValueError(f"plan: row {min(range(len(lengths)), key=lengths.__getitem__)} holds no token")
    if ranks > 1:
        budget = max(1, min(budget, -(-sum(lengths) // ranks)))
    return _deal(_cut(lengths, budget), lengths, ranks)


def padded_tokens(micro_batch: MicroBatch, lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch once every row is as long as its longest."""
    return len(micro_batch) * max((lengths[index] for index in micro_batch), default=0)


def _cut(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Consecutive runs of the sorted rows; the first row of a run sets its width."""
    micro_batches: list[MicroBatch] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not micro_batches or (len(micro_batches[-1]) + 1) * width > budget:
            micro_batches.append([])
            width = lengths[index]
        micro_batches[-1].append(index)
    return micro_batches


def _deal(micro_batches: list[MicroBatch], lengths: Sequence[int], ranks: int) -> list[list[MicroBatch]]:
    """Largest first to the rank with the fewest tokens among those with room (LPT scheduling)."""
    rounds = -(-len(micro_batches) // ranks)
    dealt: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for micro_batch in sorted(micro_batches, key=lambda m: -padded_tokens(m, lengths)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < rounds), key=load.__getitem__)
        dealt[rank].append(micro_batch)
        load[rank] += padded_tokens(micro_batch, lengths)
    for micro_batches_of_rank in dealt:
        micro_batches_of_rank.extend([] for _ in range(rounds - len(micro_batches_of_rank)))
    return dealt

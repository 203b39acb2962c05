"""The cut into micro-batches: fixed numbers, then properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.trainer.plan import padded_tokens, plan

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def test_longest_first_within_the_budget() -> None:
    assert plan([3, 10, 4, 9, 2], budget=20) == [[[1, 3], [2, 0, 4]]]


def test_a_row_over_the_budget_stands_alone() -> None:
    assert plan([5, 30, 5], budget=10) == [[[1], [0, 2]]]


def test_equal_lengths_keep_their_order() -> None:
    assert plan([4, 4, 4, 4], budget=8) == [[[0, 1], [2, 3]]]


def test_nothing_to_do_is_no_micro_batch() -> None:
    assert plan([], budget=8, ranks=2) == [[], []]


def test_a_small_update_uses_every_rank() -> None:
    assert plan([4, 4, 4, 4], budget=1000, ranks=2) == [[[0, 1]], [[2, 3]]]


def test_fewer_rows_than_ranks_leaves_empty_micro_batches() -> None:
    assert plan([4, 2], budget=100, ranks=3) == [[[0]], [[1]], [[]]]


@pytest.mark.parametrize(("lengths", "budget", "ranks"), [([1], 0, 1), ([1], 4, 0), ([1, 0], 4, 1)])
def test_impossible_requests_are_refused(lengths: list[int], budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="plan:"):
        plan(lengths, budget, ranks)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 5))
def test_every_row_once_within_budget_and_equally_many(lengths: list[int], budget: int, ranks: int) -> None:
    dealt = plan(lengths, budget, ranks)
    micro_batches = [m for rank in dealt for m in rank]
    assert sorted(i for m in micro_batches for i in m) == list(range(len(lengths)))
    assert all(padded_tokens(m, lengths) <= budget or len(m) == 1 for m in micro_batches)
    assert len(dealt) == ranks and len({len(rank) for rank in dealt}) == 1
    assert plan(lengths, budget, ranks) == dealt


@given(LENGTHS, st.integers(1, 100), st.integers(2, 5))
def test_no_rank_is_ahead_by_more_than_all_rounds_allow(lengths: list[int], budget: int, ranks: int) -> None:
    """Dealt largest first, two ranks differ by at most the largest micro-batch of each round."""
    dealt = plan(lengths, budget, ranks)
    loads = [sum(padded_tokens(m, lengths) for m in rank) for rank in dealt]
    largest = max((padded_tokens(m, lengths) for rank in dealt for m in rank), default=0)
    assert max(loads) - min(loads) <= largest * max(1, len(dealt[0]))

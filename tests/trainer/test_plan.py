"""The cut into micro-batches: fixed numbers, then properties."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.models.trie import build, sort_rows
from silva.models.trie_attention import chunks
from silva.trainer import plan as planning


def plan(rows: list[np.ndarray], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """The rows of each rank's work."""
    return [[work.rows for work in share] for share in planning.plan(rows, budget, ranks, least=1)]


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "START", 1)


def distinct(*lengths: int) -> list[np.ndarray]:
    """Rows that share nothing, in lexicographic order."""
    return [np.full(length, number) for number, length in enumerate(lengths)]


def family(prefix: int, *answers: int) -> list[np.ndarray]:
    """Rows that share their first `prefix` tokens."""
    return [
        np.concatenate([np.full(prefix, 7), np.full(length, 10 + number)])
        for number, length in enumerate(answers)
    ]


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(np.array), max_size=24)


def test_largest_first_within_the_budget() -> None:
    assert plan(distinct(3, 10, 4, 9, 2), budget=20) == [[[0, 1, 2], [3, 4]]]


def test_a_shared_part_is_counted_once() -> None:
    assert plan(family(10, 5, 5, 5, 5), budget=30) == [[[0, 1, 2, 3]]]


def test_families_stay_together() -> None:
    rows = [*family(10, 5, 5), *distinct(12)]  # the stranger would fit beside either half
    assert plan(rows, budget=25) == [[[0, 1], [2]]]


def test_a_family_over_the_budget_is_cut_where_least_is_repeated() -> None:
    trunk, left, right = np.full(4, 1), np.full(20, 2), np.full(20, 3)
    leaves = [np.full(10, 4), np.full(10, 5)]
    rows = [np.concatenate([trunk, side, leaf]) for side in (left, right) for leaf in leaves]
    assert plan(rows, budget=50) == [[[0, 1], [2, 3]]]


def test_a_family_is_walked_where_a_cut_would_repeat_too_much() -> None:
    rows = family(90, *[10] * 8)  # 170 tokens; cut in tens it would be 800
    assert plan(rows, budget=100) == [[list(range(8))]]


def test_a_row_over_the_budget_is_walked_alone() -> None:
    assert plan(distinct(5, 30, 5), budget=10) == [[[1], [0, 2]]] or plan(distinct(5, 30, 5), budget=10) == [
        [[1], [0], [2]]
    ]


def test_nothing_to_do_is_no_micro_batch() -> None:
    assert plan([], budget=8, ranks=2) == [[], []]


def test_a_small_update_uses_every_rank() -> None:
    assert plan(distinct(4, 4, 4, 4), budget=1000, ranks=2) == [[[0, 1]], [[2, 3]]]


def test_fewer_rows_than_ranks_leaves_empty_micro_batches() -> None:
    assert plan(distinct(2, 2), budget=100, ranks=3) == [[[0]], [[1]], [[]]]


@pytest.mark.parametrize(("rows", "budget", "ranks"), [([[1]], 0, 1), ([[1]], 4, 0), ([[1], []], 4, 1)])
def test_impossible_requests_are_refused(rows: list[list[int]], budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="plan:"):
        plan([np.array(row) for row in rows], budget, ranks)


def size(rows: list[np.ndarray], micro_batch: list[int]) -> int:
    return len(build([rows[i] for i in micro_batch], 1)) if micro_batch else 0


@given(ROWS, st.integers(1, 60), st.integers(1, 4))
def test_every_row_once_and_equally_many_micro_batches(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    dealt = plan(rows, budget, ranks)
    micro_batches = [m for rank in dealt for m in rank]
    assert sorted(i for m in micro_batches for i in m) == list(range(len(rows)))
    assert len(dealt) == ranks and len({len(rank) for rank in dealt}) == 1
    assert plan(rows, budget, ranks) == dealt


@given(ROWS, st.integers(1, 60), st.integers(1, 4))
def test_all_ranks_make_the_passes_of_the_largest_trie_of_a_round(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    for together in zip(*planning.plan(rows, budget, ranks, least=1), strict=True):
        chunks_of = [len(chunks(build([rows[i] for i in w.rows], 1), budget)) for w in together if w.rows]
        assert {w.passes for w in together} == {max(chunks_of)}


@given(ROWS, st.integers(1, 60))
def test_only_a_whole_family_exceeds_the_budget(rows: list[np.ndarray], budget: int) -> None:
    (micro_batches,) = plan(rows, budget)
    for micro_batch in micro_batches:
        if size(rows, micro_batch) > budget:
            first = {int(rows[i][0]) for i in micro_batch}
            assert len(first) == 1
            assert micro_batch == [i for i, row in enumerate(rows) if int(row[0]) in first]


@given(ROWS.filter(lambda rows: 0 < len(rows) <= 8), st.integers(1, 40))
def test_no_other_cut_of_the_sorted_rows_is_cheaper(rows: list[np.ndarray], budget: int) -> None:
    """Against every cut there is, one by one."""

    def cost(cut: list[list[int]]) -> float:
        total = 0.0
        for micro_batch in cut:
            tokens = size(rows, micro_batch)
            family = {int(rows[i][0]) for i in micro_batch}
            whole = sorted(micro_batch) == [i for i, r in enumerate(rows) if int(r[0]) in family]
            if tokens > budget and not (len(family) == 1 and whole):
                return float("inf")
            total += planning.START + tokens * (planning.WALK if tokens > budget else 1)
        return total

    order, _ = sort_rows(rows, 1)
    cuts = []
    for count in range(len(rows)):
        for inner in combinations(range(1, len(rows)), count):
            bounds = [0, *inner, len(rows)]
            cuts.append([order[a:b] for a, b in pairwise(bounds)])
    (ours,) = plan(rows, budget)
    assert cost(ours) == pytest.approx(min(map(cost, cuts)))


@given(ROWS, st.integers(1, 60), st.integers(2, 4))
def test_no_rank_is_ahead_by_more_than_all_rounds_allow(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    """Dealt largest first, two ranks differ by at most the largest micro-batch of each round."""
    dealt = plan(rows, budget, ranks)
    loads = [sum(size(rows, m) for m in rank) for rank in dealt]
    largest = max((size(rows, m) for rank in dealt for m in rank), default=0)
    assert max(loads) - min(loads) <= largest * max(1, len(dealt[0]))

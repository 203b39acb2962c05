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


def tree(trunk: int, branch: int, leaf: int) -> list[np.ndarray]:
    """A trunk with two branches, each with the same two leaves."""
    return [
        np.concatenate([np.full(trunk, 1), np.full(branch, side), np.full(leaf, end)])
        for side in (2, 3)
        for end in (4, 5)
    ]


@pytest.mark.parametrize(
    ("rows", "budget", "ranks", "expected"),
    [
        (distinct(3, 10, 4, 9, 2), 20, 1, [[[0, 1, 2], [3, 4]]]),  # largest first, within the budget
        (family(10, 5, 5, 5, 5), 30, 1, [[[0, 1, 2, 3]]]),  # a shared part is counted once
        ([*family(10, 5, 5), *distinct(12)], 25, 1, [[[0, 1], [2]]]),  # the stranger would fit beside either
        (tree(4, 20, 10), 50, 1, [[[0, 1], [2, 3]]]),  # cut where least is repeated
        (
            family(90, *[10] * 8),
            100,
            1,
            [[list(range(8))]],
        ),  # walked: 170 tokens, cut up 800
        (distinct(5, 30, 5), 10, 1, [[[1], [0], [2]]]),  # a row over the budget is walked alone
        ([], 8, 2, [[], []]),
        (distinct(4, 4, 4, 4), 1000, 2, [[[0, 1]], [[2, 3]]]),  # a small update uses every rank
        (distinct(2, 2), 100, 3, [[[0]], [[1]], [[]]]),  # fewer rows than ranks
    ],
)
def test_cuts(rows: list[np.ndarray], budget: int, ranks: int, expected: list[list[list[int]]]) -> None:
    assert plan(rows, budget, ranks) == expected


@pytest.mark.parametrize(("rows", "budget", "ranks"), [([[1]], 0, 1), ([[1]], 4, 0), ([[1], []], 4, 1)])
def test_impossible_requests_are_refused(rows: list[list[int]], budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="plan:"):
        plan([np.array(row) for row in rows], budget, ranks)


def size(rows: list[np.ndarray], micro_batch: list[int]) -> int:
    return len(build([rows[i] for i in micro_batch], 1)) if micro_batch else 0


@pytest.mark.slow
@given(ROWS, st.integers(1, 60), st.integers(1, 4))
def test_every_row_once_and_equally_many_micro_batches(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    dealt = plan(rows, budget, ranks)
    micro_batches = [m for rank in dealt for m in rank]
    assert sorted(i for m in micro_batches for i in m) == list(range(len(rows)))
    assert len(dealt) == ranks and len({len(rank) for rank in dealt}) == 1
    assert plan(rows, budget, ranks) == dealt


@given(ROWS, st.integers(9, 30), st.integers(1, 4))
def test_nothing_is_above_the_budget_where_nothing_is_walked(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    dealt = planning.plan(rows, budget, ranks, least=1, walk=False)
    micro_batches = [work.rows for share in dealt for work in share]
    assert sorted(i for m in micro_batches for i in m) == list(range(len(rows)))
    assert all(size(rows, m) <= budget for m in micro_batches)
    with pytest.raises(ValueError, match="a row holds 31 tokens, expected at most 30"):
        planning.plan([np.zeros(31)], 30, walk=False)


@pytest.mark.slow
@given(ROWS, st.integers(1, 60), st.integers(1, 4))
def test_all_ranks_make_the_passes_of_the_largest_trie_of_a_round(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    for together in zip(*planning.plan(rows, budget, ranks, least=1), strict=True):
        chunks_of = [len(chunks(build([rows[i] for i in w.rows], 1), budget)) for w in together if w.rows]
        assert {w.passes for w in together} == {max(chunks_of)}


@pytest.mark.slow
@given(ROWS, st.integers(1, 60))
def test_only_a_whole_family_exceeds_the_budget(rows: list[np.ndarray], budget: int) -> None:
    (micro_batches,) = plan(rows, budget)
    for micro_batch in micro_batches:
        if size(rows, micro_batch) > budget:
            first = {int(rows[i][0]) for i in micro_batch}
            assert len(first) == 1
            assert micro_batch == [i for i, row in enumerate(rows) if int(row[0]) in first]


@pytest.mark.slow
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


@pytest.mark.slow
@given(ROWS, st.integers(1, 60), st.integers(2, 4))
def test_no_rank_is_ahead_by_more_than_all_rounds_allow(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    """Dealt largest first, two ranks differ by at most the largest micro-batch of each round."""
    dealt = plan(rows, budget, ranks)
    loads = [sum(size(rows, m) for m in rank) for rank in dealt]
    largest = max((size(rows, m) for rank in dealt for m in rank), default=0)
    assert max(loads) - min(loads) <= largest * max(1, len(dealt[0]))


@pytest.mark.slow
@given(ROWS, st.integers(1, 60), st.integers(1, 4))
def test_a_cost_is_that_of_every_token_and_of_what_it_attends_to(
    rows: list[np.ndarray], budget: int, ranks: int
) -> None:
    """Token by token; a token attends to those above it, and half to itself (as an integral does)."""
    for share in planning.plan(rows, budget, ranks, least=1, attention=0.25):
        for work in share:
            positions = build([rows[i] for i in work.rows], 1).positions if work.rows else []
            assert work.cost == sum(1 + 0.25 * (int(position) + 0.5) for position in positions)


def test_costs_and_what_waiting_for_the_largest_of_a_round_costs() -> None:
    """Worked by hand: n tokens cost n + 0.25 * n * n / 2, so 8, 6 and 4 + 4 cost 16, 10.5 and 12."""
    rows = distinct(8, 6, 4, 4)
    (first, second) = planning.plan(rows, 8, 2, least=1, attention=0.25)
    assert [[work.cost for work in share] for share in (first, second)] == [[16.0, 0.0], [12.0, 10.5]]
    assert planning.imbalance((first, second)) == pytest.approx(2 * (16 + 10.5) / (16 + 12 + 10.5))


def test_an_update_of_equal_rounds_is_balanced_and_of_one_micro_batch_as_bad_as_there_are_ranks() -> None:
    assert planning.imbalance(planning.plan(distinct(5, 5, 5, 5), 5, 4, least=1)) == 1.0
    assert planning.imbalance(planning.plan(distinct(1), 5, 4, least=1)) == 4.0
    assert planning.imbalance(planning.plan([], 5, 4)) == 1.0

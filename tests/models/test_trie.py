"""Every shared token once: the trie of a batch against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.models.trie import build, sort_rows
from silva.models.trie_attention import chunks

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=10)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def test_a_picture_of_one() -> None:
    made = build(arrays([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [9]]), 1)
    assert made.tokens.tolist() == [9, 1, 2, 7, 3, 4, 5, 6]  # what has nothing below it first, by length
    assert made.positions.tolist() == [0, 0, 1, 2, 2, 3, 3, 4]
    assert [row.tolist() for row in made.rows] == [[1, 2, 4, 5], [1, 2, 4, 6, 7], [1, 2, 3], [0]]
    assert [(n.start, n.stop, n.end, n.parent) for n in made.nodes] == [
        (0, 1, 1, -1), (1, 3, 8, -1), (3, 4, 4, 1), (4, 5, 8, 1), (5, 6, 6, 3), (6, 8, 8, 3)
    ]  # fmt: skip
    assert made.above(made.nodes[5]) == [1, 3]


@given(ROWS)
def test_every_prefix_once_and_every_row_spelled(rows: list[list[int]]) -> None:
    made = build(arrays(rows), 1)
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(made) == len(prefixes)
    for row, path in zip(rows, made.rows, strict=True):
        assert made.tokens[path].tolist() == row
        assert made.positions[path].tolist() == list(range(len(row)))


@given(ROWS)
def test_a_token_sees_its_own_prefix_and_nothing_else(rows: list[list[int]]) -> None:
    made = build(arrays(rows), 1)
    ends = made.ends()
    for path in made.rows:
        for place, q in enumerate(path):
            seen = [k for k in range(len(made)) if k <= q < ends[k]]
            assert seen == path[: place + 1].tolist()


@pytest.mark.slow
@given(ROWS, st.integers(1, 12))
def test_chunks_keep_the_budget_and_know_what_is_above(rows: list[list[int]], budget: int) -> None:
    made = build(arrays(rows), 1)
    cut = chunks(made, budget)
    assert [c.start for c in cut] == list(range(0, len(made), budget))
    assert cut[-1].stop == len(made)
    pieces = cut[0].pieces
    for chunk in cut:
        assert all(n < chunk.first and any(n in c.kept for c in cut) for n in chunk.outside)
    ends = made.ends()
    for piece in pieces:
        above = [k for n in piece.above for k in range(pieces[n].start, pieces[n].stop)]
        assert above == [k for k in range(piece.start) if k <= piece.start < ends[k]]


def test_short_beginnings_are_not_shared() -> None:
    rows = arrays([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6], [1, 2], [1, 2]])
    order, shared = sort_rows(rows, 3)
    assert order == [3, 4, 0, 2, 1]
    assert shared.tolist() == [0, 0, 0, 3, 0]
    assert len(build(rows, 3)) == 2 + 2 + 5 + 3


@pytest.mark.parametrize("rows", [[], [[]], [[1], []]])
def test_empty_rows_are_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="build: got"):
        build(arrays(rows), 1)

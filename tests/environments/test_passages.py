"""Parts of a text, and their ranking worked by hand."""

from __future__ import annotations

import itertools
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments.passages import Passages, parts


def test_parts_overlap() -> None:
    text = "a b  c\nd e f g"
    assert parts(text, 3, 1) == ["a b  c", "c\nd e", "e f g"]
    assert parts(text, 4, 0) == ["a b  c\nd", "e f g"]
    assert parts(text, 7, 2) == parts(text, 50, 2) == [text]
    assert parts("  ", 3, 1) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(count=st.integers(1, 60), size=st.integers(1, 12), overlap=st.integers(0, 11))
def test_every_word_is_in_a_part_and_neighbours_share_the_overlap(
    count: int, size: int, overlap: int
) -> None:
    overlap = min(overlap, size - 1)
    found = [
        [int(word) for word in part.split()]
        for part in parts(" ".join(map(str, range(count))), size, overlap)
    ]
    assert found[0][0] == 0 and found[-1][-1] == count - 1
    for one, other in itertools.pairwise(found):
        assert len(one) == size and one[len(one) - overlap :] == other[:overlap]
        assert other[0] == one[0] + size - overlap
        assert len(other) > overlap  # something is new in it


def test_scores_worked_by_hand() -> None:
    found = Passages(["red fish, Red boat", "blue fish", "a blue sky over a blue sea"])
    mean = (4 + 2 + 7) / 3
    rarity_red = log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    rarity_blue = log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert found.scores("red") == pytest.approx({0: rarity_red * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / mean))})
    assert found.scores("BLUE?") == pytest.approx(
        {
            1: rarity_blue * 1 / (1 + 1.5 * (0.25 + 0.75 * 2 / mean)),
            2: rarity_blue * 2 / (2 + 1.5 * (0.25 + 0.75 * 7 / mean)),
        }
    )
    assert (found.best("blue fish"), found.best("sea"), found.best("green"), found.best("")) == (
        1,
        2,
        None,
        None,
    )


def test_of_equal_parts_the_first_is_the_best() -> None:
    assert Passages(["x", "a b", "a c", "a d"]).best("a") == 1
    assert Passages([]).best("a") is None

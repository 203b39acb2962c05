"""Ranking and windows against numbers worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.data.retrieval import Ranking, best_window, parts, words

TEXTS = ["red mug", "red red hat blue"]


def test_scores_follow_the_formula() -> None:
    """N = 2, average length 3. "mug" is in one text, of length 2: idf = ln(1 + 1.5 / 1.5), the word counts
    2.2 / (1 + 1.2 (0.25 + 0.75 * 2 / 3)). "red" is in both: idf = ln(1 + 0.5 / 2.5), twice in the second."""
    ranking = Ranking(TEXTS)
    assert ranking.scores("mug") == {0: pytest.approx(math.log(2) * 2.2 / 1.9)}
    assert ranking.scores("red") == {
        0: pytest.approx(math.log(1.2) * 2.2 / 1.9),
        1: pytest.approx(math.log(1.2) * 4.4 / (2 + 1.2 * 1.25)),
    }
    both = ranking.scores("red mug")[0]
    assert both == pytest.approx((math.log(2) + math.log(1.2)) * 2.2 / 1.9)
    assert ranking.scores("red mug mug")[0] == both


def test_the_best_come_first_and_equal_ones_keep_their_order() -> None:
    ranking = Ranking(["a lake", "a river", "the river Ems", "a river", "nothing"])
    assert ranking.best("river", 9) == [1, 3, 2]
    assert ranking.best("river ems", 2) == [2, 1]
    assert ranking.best("sea", 9) == ranking.best("", 9) == Ranking([]).best("a", 1) == []


@given(st.lists(st.text("abc ", max_size=12), max_size=6), st.text("abc ", max_size=6))
def test_only_texts_with_a_word_of_the_query_are_found(texts: list[str], query: str) -> None:
    wanted = set(query.split())
    expected = [i for i, text in enumerate(texts) if wanted & set(text.split())]
    assert sorted(Ranking(texts).best(query, len(texts))) == expected


@pytest.mark.parametrize(
    ("plural", "singular"),
    [
        ("mugs", "mug"),
        ("berries", "berry"),
        ("shoes", "shoe"),
        ("glass", "glass"),
        ("bus", "bus"),
        ("gas", "gas"),
    ],
)
def test_plurals_are_found_as_singulars(plural: str, singular: str) -> None:
    assert words(plural) == [singular]


def test_words_are_split_at_all_but_letters_and_digits() -> None:
    assert words("Gluten-free, 12oz_Mug; ÉTÉ!") == ["gluten", "free", "12oz", "mug", "été"]


@pytest.mark.parametrize(
    ("query", "size", "expected"),
    [("c e", 3, (2, 5)), ("e f", 2, (4, 6)), ("x", 2, (0, 2)), ("a", 99, (0, 6)), ("f", 1, (5, 6))],
)
def test_the_window_shows_most_words_of_the_query(query: str, size: int, expected: tuple[int, int]) -> None:
    assert best_window("a b c d e f", query, size) == expected


def test_a_window_counts_different_words() -> None:
    assert best_window("a a a b a", "a b", 2) == (2, 4)
    assert best_window("", "a", 5) == (0, 0)


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

"""What follows a text: against a search through all texts, and with a memory that forgets the oldest."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from silva.engines.local.history import ORDERS, VOTERS, Guess, History, Trail


def test_the_longest_known_context_decides() -> None:
    history = History(1 << 12)
    for text in ([1, 2, 3, 4, 5, 60], [9, 9, 9, 4, 5, 70], [8, 8, 8, 4, 5, 70]):
        Trail(history).extend(text)
    after = Trail(history, [1, 2, 3, 4, 5])
    assert after.guesses(4) == [Guess(60, ORDERS.index(4), 1, 1)]
    assert Trail(history, [7, 4, 5]).guesses(1) == [Guess(70, ORDERS.index(2), 2, 3)]
    assert Trail(history, [5]).guesses(4) == [] and Trail(history, [7, 7]).guesses(4) == []


def test_guesses_go_on_with_the_texts_that_agree() -> None:
    history = History(1 << 12)
    for end in ([30, 40, 50], [30, 41, 51], [30, 41, 52], [31, 99, 99]):
        Trail(history).extend([1, 2, *end])
    guesses = Trail(history, [1, 2]).guesses(9)
    assert [(g.token, g.votes, g.voters) for g in guesses] == [(30, 3, 4), (41, 2, 3), (52, 1, 2)]


def test_texts_that_grow_side_by_side_go_on_over_their_blocks() -> None:
    history = History(1 << 12)
    trails, texts = [Trail(history) for _ in range(3)], [list(range(i, i + 2000, 10)) for i in range(3)]
    for place in range(0, 200, 7):
        for trail, text in zip(trails, texts, strict=True):
            trail.extend(text[place : place + 7])
    for text in texts:
        assert [g.token for g in Trail(history, text[:50]).guesses(120)] == text[50:170]


def test_the_text_of_a_request_itself_is_known() -> None:
    """A name in the prompt is copied."""
    trail = Trail(History(1 << 12))
    trail.extend([5, 6, 11, 12, 13, 14, 7, 8, 9, 11, 12])
    assert [g.token for g in trail.guesses(2)] == [13, 14]


def test_the_oldest_is_forgotten_first_and_memory_stays_as_it_is() -> None:
    history = History(1 << 10)
    sizes = [len(index.hashes) for index in history.indices], len(history.tokens)
    first = list(range(5000, 5100))
    Trail(history).extend(first)
    assert Trail(history, first[:40]).guesses(1)[0].token == first[40]
    for text in range(40):
        Trail(history).extend(range(100 * text, 100 * text + 90))
    assert Trail(history, first[:40]).guesses(1) == []
    assert Trail(history, range(3900, 3950)).guesses(1)[0].token == 3950
    assert ([len(index.hashes) for index in history.indices], len(history.tokens)) == sizes


def test_a_trail_whose_blocks_were_overwritten_goes_on() -> None:
    history = History(1 << 10)
    slow = Trail(history)
    slow.extend(range(40))
    for text in range(40):
        Trail(history).extend(range(1000 + 100 * text, 1000 + 100 * text + 90))
    slow.extend(range(40, 80))
    assert [g.token for g in Trail(history, range(30, 45)).guesses(5)] == [45, 46, 47, 48, 49]
    assert all(-1 <= follow < len(history.follow) for follow in history.follow)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_guesses_equal_a_search_through_all_texts(seed: int) -> None:
    """Few different tokens, so that contexts come often; texts grow in turns of random length."""
    rng, history = random.Random(seed), History(1 << 12)
    texts: list[list[int]] = [[] for _ in range(4)]
    trails = [Trail(history) for _ in texts]
    written: list[tuple[tuple[int, ...], int]] = []  # each token with all before it, in the order of writing
    for _ in range(60):
        number = rng.randrange(len(texts))
        for token in (rng.randrange(3) for _ in range(rng.randrange(1, 8))):
            written.append((tuple(texts[number]), token))
            texts[number].append(token)
            trails[number].extend([token])
    for text, trail in zip(texts, trails, strict=True):
        assert trail.guesses(1) == searched(written, text)


def searched(written: list[tuple[tuple[int, ...], int]], text: list[int]) -> list[Guess]:
    for number, order in enumerate(ORDERS):
        if len(text) < order:
            continue
        found = [t for before, t in reversed(written) if before[-order:] == tuple(text[-order:])][:VOTERS]
        if found:
            counts = Counter(found)
            most = max(counts.values())
            token = next(t for t in found if counts[t] == most)  # of several: the newest
            return [Guess(token, number, most, len(found))]
    return []

"""Rows of the cache: found, taken, released, evicted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silva.engines.local import kv_cache
from silva.engines.local.kv_cache import CacheRow, KvCache
from silva.models.same_bits import BLOCK, LANES


def make_cache(rows: int = 4, *, heads: int = 4, kv_heads: int = 2, width: int = 32) -> KvCache:
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=width, num_hidden_layers=1
    )
    config.get_text_config = lambda: config
    return KvCache(config, rows=rows, context=1024, dtype=torch.float64, device=torch.device("cpu"))


def take(cache: KvCache, *tokens: int, computed: bool = True) -> CacheRow:
    """A row for `tokens`, found and acquired as an engine does, computed by writing each token's number."""
    array = np.array(tokens)
    got = cache.acquire(*cache.longest_prefix(array), array)
    assert got is not None
    row, shared = got
    assert row.busy and row.computed == shared
    if computed:
        for store in (*cache.keys, *cache.values, *cache.outputs):
            store[row.index, :, shared : len(tokens)] = torch.tensor(array[shared:], dtype=store.dtype)[
                :, None
            ]
        row.computed = len(tokens)
    return row


def held(cache: KvCache, row: CacheRow) -> list[list[float]]:
    """What keys, values and outputs hold for the row's tokens."""
    stores = (*cache.keys, *cache.values, *cache.outputs)
    return [store[row.index, -1, : row.computed, 0].tolist() for store in stores]


def test_the_longest_prefix_is_found_among_planned_and_finished_rows() -> None:
    cache = make_cache()
    assert cache.longest_prefix(np.array([1, 2])) == (None, 0)
    short = take(cache, 1, 2, 3)
    planned = take(cache, 1, 2, 9, 4, computed=False)
    other = take(cache, 7, 8)
    cache.release(short)
    assert cache.longest_prefix(np.array([1, 2, 3, 5])) == (short, 3)
    assert cache.longest_prefix(np.array([1, 2, 9, 4, 4])) == (planned, 4)
    assert cache.longest_prefix(np.array([7])) == (other, 1)
    assert cache.longest_prefix(np.array([1, 2])) == (short, 2)
    assert cache.longest_prefix(np.array([2, 1])) == (None, 0)


def test_a_finished_sequence_is_continued_in_place() -> None:
    cache = make_cache()
    first = take(cache, 1, 2, 3)
    cache.release(first)
    again = take(cache, 1, 2, 3, 4)
    assert again is first
    assert held(cache, again) == [[1.0, 2.0, 3.0, 4.0]] * 3


def test_a_prefix_in_use_is_copied() -> None:
    cache = make_cache()
    first = take(cache, 1, 2, 3)
    second = take(cache, 1, 2, 8)
    assert second is not first and held(cache, second) == [[1.0, 2.0, 8.0]] * 3
    assert held(cache, first) == [[1.0, 2.0, 3.0]] * 3
    third = take(cache, 1, 2, 3)
    assert third.computed == 3 and third not in (first, second)


def test_a_finished_sequence_that_differs_later_is_kept_and_copied() -> None:
    cache = make_cache()
    first = take(cache, 1, 2, 3)
    cache.release(first)
    second = take(cache, 1, 2, 8)
    assert second is not first and first.tokens.tolist() == [1, 2, 3]


def test_the_row_unused_for_longest_is_evicted_first() -> None:
    cache = make_cache(3)
    for token in (1, 2, 3):
        cache.release(take(cache, token, token))
    cache.release(take(cache, 1, 1, 7))  # continues the first row: now the newest
    evicting = take(cache, 9)
    assert sorted(row.tokens.tolist() for row in cache.rows) == [[1, 1, 7], [3, 3], [9]]
    cache.release(evicting)


def test_a_row_that_is_copied_from_counts_as_used() -> None:
    cache = make_cache(3)
    for token in (1, 2):
        cache.release(take(cache, token, token))
    cache.release(take(cache, 1, 5))  # copies from the first
    take(cache, 9)
    assert sorted(row.tokens.tolist() for row in cache.rows) == [[1, 1], [1, 5], [9]]


def test_a_row_that_is_copied_from_is_given_up_as_the_last() -> None:
    """Also if the others were used later."""
    cache = make_cache(2)
    cache.release(take(cache, 1, 2, 3))
    cache.release(take(cache, 9))
    take(cache, 1, 2, 8)
    assert sorted(row.tokens.tolist() for row in cache.rows) == [[1, 2, 3], [1, 2, 8]]


def test_no_row_where_all_are_busy_but_the_last_idle_one_is_cut_to_the_shared_part() -> None:
    cache = make_cache(2)
    take(cache, 5)
    finished = take(cache, 1, 2, 3)
    cache.release(finished)
    cut = take(cache, 1, 2, 8)
    assert cut is finished and held(cache, cut) == [[1.0, 2.0, 8.0]] * 3
    tokens = np.array([1, 2])
    assert cache.acquire(*cache.longest_prefix(tokens), tokens) is None


def test_of_rows_with_the_same_tokens_the_one_that_has_computed_more_is_found() -> None:
    cache = make_cache()
    for computed in (1, 3, 2):
        row, _ = cache.acquire(None, 0, np.array([1, 2, 3]))  # type: ignore[misc]
        row.computed = computed
    assert cache.longest_prefix(np.array([1, 2, 3, 4])) == (cache.rows[1], 3)
    planned, known = cache.prefixes(np.array([1, 2, 9]))
    assert planned.tolist() == [2, 2, 2, 0] and known.tolist() == [1, 2, 2, 0]


def test_a_row_that_is_spared_is_not_given_up() -> None:
    cache = make_cache(2)
    cache.release(take(cache, 5))
    take(cache, 1, 2, 3)
    stranger = np.array([9])
    assert cache.acquire(None, 0, stranger, spared={0}) is None
    assert cache.rows[0].tokens.tolist() == [5]
    assert cache.acquire(None, 0, stranger, spared={1}) == (cache.rows[0], 0)


def test_a_row_that_was_followed_outlives_its_follower() -> None:
    """What the follower had of its own is part of it."""
    cache = make_cache(2)
    source = take(cache, 1, 2, 3, 4)
    cache.release(source)
    follower = take(cache, 1, 2)
    cache.release(follower, source)
    assert take(cache, 9) is follower
    assert source.tokens.tolist() == [1, 2, 3, 4]


def test_whole_blocks_of_a_prefix_stay_where_they_are() -> None:
    cache = make_cache(5)
    tokens = list(range(2 * BLOCK + 10))
    first = take(cache, *tokens)
    second = take(cache, *tokens[: BLOCK + 30], 9999)
    third = take(cache, *tokens, 7777)
    of_second = take(cache, *tokens[: BLOCK + 30], 9999, 1)
    assert [row.owners for row in (first, second, third, of_second)] == [(), (0,), (0, 0), (0,)]
    assert cache.keys[0][second.index, 0, :BLOCK, 0].count_nonzero() == 0  # nothing was copied there
    assert cache.keys[0][second.index, 0, BLOCK : BLOCK + 31, 0].tolist() == [
        *tokens[BLOCK : BLOCK + 30],
        9999,
    ]
    assert cache.keys[0][of_second.index, 0, BLOCK : BLOCK + 32, 0].tolist()[-2:] == [9999, 1]


def test_a_row_that_holds_blocks_of_others_is_not_given_up() -> None:
    cache = make_cache(2)
    tokens = list(range(BLOCK + 5))
    first = take(cache, *tokens)
    second = take(cache, *tokens, 1)
    cache.release(first)
    stranger = np.array([5000])
    assert cache.acquire(*cache.longest_prefix(stranger), stranger) is None  # the second is busy
    cache.release(second)
    assert take(cache, 5000) is second  # the first may still be of use, and could now go
    assert take(cache, 6000) is first


def test_a_sequence_cut_inside_shared_blocks_gets_its_part_of_them() -> None:
    cache = make_cache(2)
    tokens = list(range(2 * BLOCK + 5))
    take(cache, *tokens)  # stays busy
    follower = take(cache, *tokens, 1)
    cache.release(follower)
    again = take(cache, *tokens[: BLOCK + 3], 8888)
    assert again is follower and again.owners == (0,)
    assert cache.keys[0][again.index, 0, BLOCK : BLOCK + 4, 0].tolist() == [*tokens[BLOCK : BLOCK + 3], 8888]


def test_released_before_it_was_computed_only_the_computed_part_is_kept() -> None:
    cache = make_cache()
    row = take(cache, 1, 2, 3, 4, computed=False)
    row.computed = 2
    cache.release(row)
    assert row.tokens.tolist() == [1, 2] and not row.busy


def test_clearing_forgets_numbers_and_memory_but_not_what_is_running() -> None:
    cache = make_cache()
    done, running = take(cache, 1, 2, 3), take(cache, 4, 5)
    cache.release(done)
    cache.append(running, 6)
    assert cache.nbytes == 4 * LANES * (2 * 2 * 8 + 32) * 8  # addresses for all rows at once
    cache.clear()
    assert (done.tokens.tolist(), running.tokens.tolist(), running.computed) == ([], [4, 5, 6], 0)
    cache.release(running)
    cache.clear()
    assert cache.nbytes == 0


def test_growing_keeps_what_is_there() -> None:
    cache = make_cache(8)
    first = take(cache, *range(10))
    take(cache, *range(100, 700))
    for i in range(5):
        take(cache, 20 + i)
    assert held(cache, first) == [[float(i) for i in range(10)]] * 3
    assert all(len(store) <= 8 for store in cache.keys)


def test_addresses_are_taken_at_once_only_while_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * LANES * 8 * 8  # bytes of a store
    for most, expected in ((8 * row, 8), (3 * row, 3), (row, 1)):
        monkeypatch.setattr(kv_cache, "ADDRESSES", most)
        cache = make_cache(8)
        take(cache, 1, 2, 3)
        assert len(cache.keys[0]) == expected
        take(cache, *range(100, 100 + 3 * LANES))
        assert len(cache.keys[0]) == max(2, expected // 3)  # longer rows, so fewer of them
    monkeypatch.setattr(kv_cache, "is_lazy", lambda device: False)  # memory that is taken is memory used
    monkeypatch.setattr(kv_cache, "ADDRESSES", 8 * row)
    cache = make_cache(8)
    for i, expected in enumerate((1, 2, 4, 4, 8)):
        take(cache, 20 + i)
        assert len(cache.keys[0]) == expected


def test_longer_rows_leave_room_for_those_that_wait_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "ADDRESSES", 8 * 2 * LANES * 8 * 8)
    cache = make_cache(8)
    for i in range(4):
        waits = take(cache, 20 + i, computed=False)
    cache.reserve(cache.rows[0], 4 * LANES)  # two rows of that length are as many bytes
    assert waits.index < len(cache.keys[0]) < 8

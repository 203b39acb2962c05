"""Rows of the cache: found, taken, released, evicted; attention over them against torch's own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from silva.models import same_bits
from silva.models.kv_cache import BLOCK, LANES, KvCache, PackedStep, Row, Span, blocked_attention


def make_cache(rows: int = 4, *, heads: int = 4, kv_heads: int = 2, width: int = 32) -> KvCache:
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=width, num_hidden_layers=1
    )
    config.get_text_config = lambda: config
    return KvCache(config, rows=rows, context=1024, dtype=torch.float64, device=torch.device("cpu"))


def take(cache: KvCache, *tokens: int, computed: bool = True) -> Row:
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


def held(cache: KvCache, row: Row) -> list[list[float]]:
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


def test_no_row_where_all_are_busy_but_the_last_idle_one_is_cut_to_the_shared_part() -> None:
    cache = make_cache(2)
    take(cache, 5)
    finished = take(cache, 1, 2, 3)
    cache.release(finished)
    cut = take(cache, 1, 2, 8)
    assert cut is finished and held(cache, cut) == [[1.0, 2.0, 8.0]] * 3
    tokens = np.array([1, 2])
    assert cache.acquire(*cache.longest_prefix(tokens), tokens) is None


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
    assert cache.nbytes == 2 * LANES * (2 * 2 * 8 + 32) * 8
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


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("length", [LANES, BLOCK, BLOCK + LANES, 3 * BLOCK])
@pytest.mark.parametrize("dim", [4, 16])
def test_blocked_attention_equals_torch_s(count: int, length: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = draw(3, 2, count, dim), draw(3, 2, length, dim), draw(3, 2, length, dim)
    hidden = torch.rand(3, 1, count, length, generator=generator) < 0.5
    hidden[..., 0] = False
    bias = torch.zeros_like(hidden, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    cuts = [slice(b, min(b + BLOCK, length)) for b in range(0, length, BLOCK)]
    pairs = [(key[:, :, c], value[:, :, c]) for c in cuts]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=0.3)
    four = same_bits.RowRule(4, 4)
    for rules in (same_bits.RowRules(), same_bits.RowRules(attention=four), same_bits.RowRules(matrices=7)):
        got = blocked_attention(query, pairs, bias, 0.3, rules)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.same_bits
@pytest.mark.parametrize("dim", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_queries_have_the_same_bits_in_any_number(dim: int, kv_heads: int) -> None:
    """A decoded token's numbers are those of the same token in a prompt."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, kv_heads, n, dim, generator=generator) for n in (70, 320, 320))
    bias, blocks = torch.zeros(1, 1, 1, 320), (slice(0, BLOCK), slice(BLOCK, 320))
    rules = same_bits.probe(nn.Module(), head_dim=dim, dtype=torch.float32)

    def attend(rows: int, queries: slice) -> torch.Tensor:
        pairs = [(key[:rows, :, block], value[:rows, :, block]) for block in blocks]
        return blocked_attention(query[:rows, :, queries], pairs, bias, 0.3, rules)

    expected = attend(5, slice(0, 70))
    for rows, count in itertools.product((1, 2, 5), (1, 2, 3, 17, 64)):
        for start in (0, 70 - count):
            mine = slice(start, start + count)
            assert torch.equal(attend(rows, mine), expected[:rows, :, mine]), f"{rows} rows of {count}"


@pytest.mark.same_bits
def test_shared_blocks_have_the_bits_of_copies() -> None:
    rules = same_bits.probe(nn.Module(), head_dim=16, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, n, 16, generator=generator) for n in (3, 320, 320))
    key[:, :, :BLOCK], value[:, :, :BLOCK] = key[:1, :, :BLOCK].clone(), value[:1, :, :BLOCK].clone()
    bias = torch.zeros(1, 1, 1, 320)
    own = (key[:, :, BLOCK:], value[:, :, BLOCK:])
    copied = blocked_attention(query, [(key[:, :, :BLOCK], value[:, :, :BLOCK]), own], bias, 0.3, rules)
    shared = blocked_attention(query, [(key[0, :, :BLOCK], value[0, :, :BLOCK]), own], bias, 0.3, rules)
    assert torch.equal(shared, copied)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1)])
def test_a_packed_step_is_causal_attention_of_each_sequence(heads: int, kv_heads: int) -> None:
    """Prefill in chunks, then decode with an idle row between: the same as whole sequences."""
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(5, heads=heads, kv_heads=kv_heads, width=heads * 8)
    lengths = {0: 300, 1: 40, 2: 7, 4: 260}
    rows = {i: take(cache, *range(1000 * i, 1000 * i + n), computed=False) for i, n in lengths.items()}
    for i, n in lengths.items():  # row numbers follow the order of arrival
        assert len(rows[i].tokens) == n
    whole = {
        i: [
            torch.randn(h, n, 8, generator=generator, dtype=torch.float64)
            for h in (heads, kv_heads, kv_heads)
        ]
        for i, n in lengths.items()
    }
    expected = {
        i: F.scaled_dot_product_attention(*(x[None] for x in qkv), is_causal=True, enable_gqa=True)[0]
        for i, qkv in whole.items()
    }

    def step(decode: list[tuple[int, int]], prefill: list[tuple[int, int, int]]) -> None:
        spans = [(i, p, p + 1) for i, p in decode] + prefill
        packed = PackedStep(cache, [Span(rows[i].index, a, b) for i, a, b in spans])
        q, k, v = (torch.cat([whole[i][part][:, a:b] for i, a, b in spans], 1)[None] for part in range(3))
        out, at = packed.attend(0, q, k, v, 8**-0.5)[0].transpose(0, 1), 0
        for i, a, b in spans:
            torch.testing.assert_close(out[:, at : at + b - a], expected[i][:, a:b], rtol=0, atol=1e-12)
            at += b - a

    step([], [(0, 0, 290), (1, 0, 30), (2, 0, 6)])
    step([(2, 6)], [(4, 0, 255), (1, 30, 39)])
    step([(0, 290), (1, 39)], [(4, 255, 256)])
    step([(0, 291), (4, 256)], [])
    for position in range(292, 300):
        step([(0, position)], [(4, position - 35, position - 34)] if position < 295 else [])

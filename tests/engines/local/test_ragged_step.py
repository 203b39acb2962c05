"""Attention of a packed step against torch's own, and its bits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.engines.local.test_kv_cache import make_cache, take
from torch import nn

from silva.engines.local.ragged_step import RaggedStep, Span
from silva.models import row_rules, same_bits
from silva.models.blocked_attention import KvBlock, blocked_attention
from silva.models.same_bits import BLOCK, LANES, RowRules


@pytest.mark.slow
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
    blocks = [KvBlock(slice(None), c.start, key[:, :, c], value[:, :, c]) for c in cuts]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=1.0)
    four = row_rules.RowRule(4, 4)
    for rules in (same_bits.RowRules(), same_bits.RowRules(attention=four), same_bits.RowRules(matrices=7)):
        got = blocked_attention(query, blocks, bias, rules)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.same_bits
@pytest.mark.parametrize("dim", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_queries_have_the_same_bits_in_any_number(dim: int, kv_heads: int) -> None:
    """A decoded token's numbers are those of the same token in a prompt."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, kv_heads, n, dim, generator=generator) for n in (70, 320, 320))
    bias, cuts = torch.zeros(1, 1, 1, 320), (slice(0, BLOCK), slice(BLOCK, 320))
    rules = same_bits.probe(nn.Module(), head_dim=dim, dtype=torch.float32)

    def attend(rows: int, queries: slice) -> torch.Tensor:
        blocks = [KvBlock(slice(None), cut.start, key[:rows, :, cut], value[:rows, :, cut]) for cut in cuts]
        return blocked_attention(query[:rows, :, queries], blocks, bias, rules)

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
    own = KvBlock(slice(None), BLOCK, key[:, :, BLOCK:], value[:, :, BLOCK:])
    copies = KvBlock(slice(None), 0, key[:, :, :BLOCK], value[:, :, :BLOCK])
    copied = blocked_attention(query, [copies, own], bias, rules)
    for readers in (slice(None), torch.arange(5)):
        block = KvBlock(readers, 0, key[0, :, :BLOCK], value[0, :, :BLOCK])
        assert torch.equal(blocked_attention(query, [block, own], bias, rules), copied)


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
        packed = RaggedStep(cache, [Span(rows[i].index, a, b) for i, a, b in spans])
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


def test_attention_of_narrow_numbers_is_computed_in_float32() -> None:
    """And rounded once, so that sampling and training, which sums in another order, differ by little."""
    query, key, value = (torch.randn(2, 3, n, 16).bfloat16() for n in (4, 64, 64))
    bias = torch.zeros(1, 1, 1, 64)
    bias[..., 50:] = float("-inf")
    found = blocked_attention(query, [KvBlock(slice(None), 0, key, value)], bias.bfloat16(), RowRules())
    exact = (query.double() @ key.double().mT + bias).softmax(-1) @ value.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_samples_of_several_prompts_are_attended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts, with an idle row between: a block that several share is one product, and so are those
    that rows have alone, whose lengths differ."""
    cache, generator = make_cache(7), torch.Generator().manual_seed(0)

    def draw(length: int) -> list[torch.Tensor]:
        return [torch.randn(h, length, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2)]

    prompts, spans, expected, given = (draw(300), draw(300)), [], [], []
    for number, (prompt, start, stop) in enumerate(
        [(0, 300, 301), (1, 520, 521), (0, 0, 0), (0, 310, 313), (1, 600, 601), (0, 301, 302), (1, 515, 516)]
    ):
        row = take(cache, *range(1000 * prompt, 1000 * prompt + 300), -9 - number)
        cache.reserve(row, 601)
        qkv = [torch.cat(both, 1) for both in zip(prompts[prompt], draw(301), strict=True)]
        own = slice(BLOCK * len(row.owners), start)
        for store, part in zip((cache.keys, cache.values), qkv[1:], strict=True):
            store[0][row.index, :, own] = part[:, own]
        if stop:
            seen = [qkv[0][:, start:stop], *(part[:, :stop] for part in qkv[1:])]
            hidden = torch.ones(stop - start, stop).tril(start) > 0
            out = F.scaled_dot_product_attention(*(x[None] for x in seen), attn_mask=hidden, enable_gqa=True)
            spans.append(Span(row.index, start, stop))
            expected.append(out[0])
            given.append([part[:, start:stop] for part in qkv])
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: products.append(x.shape) or bmm(x, y))
    packed = [torch.cat(parts, 1)[None] for parts in zip(*given, strict=True)]
    got = RaggedStep(cache, spans).attend(0, *packed, 8**-0.5)[0].transpose(0, 1)
    torch.testing.assert_close(got, torch.cat(expected, 1), rtol=0, atol=1e-12)
    assert len(products) == 2 * (2 + 1 + 1) + 2 * 2  # of single tokens: two blocks shared, two alone

"""Ranks that exchange tokens for heads: together they compute what one alone does, of any trie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig

from silva.errors import CapabilityError
from silva.models import trie_attention
from silva.models.trie import Trie, build
from silva.models.trie_attention import TrieAttention, chunks, shares
from silva.models.ulysses import UlyssesAttention, check_heads

ABOUT: Any = {"dtype": torch.float64, "device": torch.device("cpu")}


def forest(seed: int) -> Trie:
    """Random rows that share random prefixes."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 99, rng.integers(1, 12))]
    for _ in range(5):
        above = rows[rng.integers(len(rows))]
        kept = above[: rng.integers(0, len(above) + 1)]
        rows.append(np.concatenate([kept, rng.integers(0, 99, rng.integers(1, 9))]))
    return build(rows, 1)


def attended(
    trie: Trie, given: list[torch.Tensor], ranks: int, budget: int, flex: Trie | None = None
) -> torch.Tensor:
    """[1, N, heads, d] by ranks that are threads; what they exchange keeps its graph."""
    slots: list[Any] = [None] * ranks
    barrier = Barrier(ranks, timeout=60)

    def on(rank: int) -> list[torch.Tensor]:
        def exchange(x: torch.Tensor) -> torch.Tensor:
            slots[rank] = x
            barrier.wait()
            found = torch.stack([each[rank] for each in slots])
            barrier.wait()
            return found

        outside, outs = dict[int, Any](), []
        for of_pass in shares(trie, budget, ranks):
            mine = of_pass[rank]
            own = slice(mine.start, mine.stop) if len(mine) else slice(1)
            attention = UlyssesAttention(of_pass, rank, outside, exchange, flex=flex, **ABOUT)
            out = attention.attend(0, *(x[:, :, own] for x in given), 0.3)
            assert out.shape == (1, max(1, len(mine)), given[0].shape[1], given[0].shape[3])
            outs.append(out[:, : len(mine)])
            outside |= {piece: [layers[0]] for piece, layers in attention.found.items()}
        return outs

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(on, range(ranks)))
    return torch.cat([out for of_pass in zip(*found, strict=True) for out in of_pass], 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ranks", "heads", "of_keys", "budget"),
    [(2, 4, 2, 999), (2, 4, 1, 7), (3, 6, 3, 10), (4, 8, 2, 5), (4, 4, 4, 3)],
)
def test_ranks_attend_as_one_does(seed: int, ranks: int, heads: int, of_keys: int, budget: int) -> None:
    """Outputs and gradients, also with fewer heads of keys than ranks, in several passes, of empty shares."""
    trie, draw = forest(seed), torch.Generator().manual_seed(seed)
    given = [
        torch.randn(1, n, len(trie), 4, generator=draw, dtype=torch.float64).requires_grad_()
        for n in (heads, of_keys, of_keys)
    ]
    weights = torch.randn(1, len(trie), heads, 4, generator=draw, dtype=torch.float64)
    (whole,) = chunks(trie)
    expected = TrieAttention(whole, {}, **ABOUT).attend(0, *given, 0.3)
    found = attended(trie, given, ranks, budget)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), given) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_whole_trie_goes_through_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_attention, "_flex_attention", lambda: flex_attention)  # not compiled
    trie, draw = forest(0), torch.Generator().manual_seed(0)
    given = [torch.randn(1, n, len(trie), 16, generator=draw, dtype=torch.float64) for n in (8, 4, 4)]
    expected, found = (attended(trie, given, 2, 999, flex) for flex in (None, trie))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "tp", "words"),
    [
        (
            3,
            1,
            r"cp = 3 with cp_style = \"ulysses\": .* the model has 8 \(num_attention_heads\); expected a div",
        ),
        (8, 2, r"the model has 4 on each of 2 ranks of tp \(num_attention_heads\)"),
        (4, 1, r"the model has 6 \(num_key_value_heads\); expected a divisor or a multiple"),
    ],
)
def test_heads_that_do_not_divide(ranks: int, tp: int, words: str) -> None:
    heads, of_keys = (12, 6) if "key" in words else (8, 2)
    config = LlamaConfig(hidden_size=96, num_attention_heads=heads, num_key_value_heads=of_keys)
    with pytest.raises(CapabilityError, match=words):
        check_heads(config, ranks, tp)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 1), (8, 1), (4, 2)])
def test_heads_that_divide(ranks: int, tp: int) -> None:
    check_heads(LlamaConfig(num_attention_heads=8, num_key_value_heads=2), ranks, tp)

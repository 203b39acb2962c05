"""FlexAttention's view of a trie, on a machine without a GPU: its mask, and its plain forward pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from silva.config.sections import TinyModel
from silva.models import trie_attention
from silva.models.loading import load_model
from silva.models.trie import Trie, build
from silva.models.trie_attention import FlexTrieAttention, TrieAttention, chunks

CPU = torch.device("cpu")
BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
          "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


def forest(prompt: int, branches: int, answer: int, seed: int = 0) -> Trie:
    """Two levels of branches, the last ones of random lengths."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 99, prompt)
    middle = [np.concatenate([start, rng.integers(0, 99, answer)]) for _ in range(branches)]
    lengths = rng.integers(1, 2 * answer, 3 * branches)
    rows = [np.concatenate([middle[i % branches], rng.integers(0, 99, n)]) for i, n in enumerate(lengths)]
    return build(rows)


TRIES = [
    forest(100, 2, 30),
    forest(128, 2, 128),
    forest(17, 4, 100),
    build([np.arange(k) + 1000 * k for k in (50, 128, 300, 1, 77)]),
    build([np.arange(1)]),
]


@pytest.mark.parametrize("trie", TRIES, ids=len)
def test_the_block_mask_is_the_one_found_by_looking_at_every_pair(trie: Trie) -> None:
    ends = torch.from_numpy(trie.ends())
    n = len(trie)

    def visible(_b: object, _h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < ends[k])

    expected = create_block_mask(visible, None, None, n, n, device="cpu")
    mask = FlexTrieAttention(trie, CPU)._mask
    assert mask.shape == expected.shape
    for name in BLOCKS:
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("trie", TRIES[:4], ids=len)
def test_flex_and_segments_agree(trie: Trie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_attention, "_flex_attention", lambda: flex_attention)  # not compiled
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, len(trie), 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    (whole,) = chunks(trie)
    segments = TrieAttention(whole, {}, dtype=torch.float64, device=CPU)
    expected = segments.attend(0, query, key, value, 0.25)
    found = FlexTrieAttention(trie, CPU).attend(0, query, key, value, 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: python -m pytest -m gpu")
@pytest.mark.parametrize("trie", TRIES[:4], ids=len)
def test_all_ways_agree_on_a_gpu(trie: Trie, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and back, with fewer heads of keys than of queries, against the first way on the CPU."""
    gpu = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, len(trie), 16, generator=generator) for heads in (4, 2, 2)]
    weights = torch.randn(1, len(trie), 4, 16, generator=generator)
    (whole,) = chunks(trie)

    def run(attention: FlexTrieAttention | TrieAttention, device: torch.device) -> list[torch.Tensor]:
        inputs = [x.to(device).detach().requires_grad_() for x in given]
        out = attention.attend(0, *inputs, 0.25)
        return [
            x.detach().cpu() for x in (out, *torch.autograd.grad((out * weights.to(device)).sum(), inputs))
        ]

    expected = run(TrieAttention(whole, {}, dtype=torch.float32, device=CPU), CPU)
    ways: dict[str, FlexTrieAttention | TrieAttention] = {
        "flex": FlexTrieAttention(trie, gpu),
        "one product": TrieAttention(whole, {}, dtype=torch.float32, device=gpu),
    }
    monkeypatch.setattr(trie_attention, "ONE_PRODUCT", {})
    ways["segments"] = TrieAttention(whole, {}, dtype=torch.float32, device=gpu)
    for way, attention in ways.items():
        found = run(attention, gpu)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, msg=lambda m, w=way: f"{w}: {m}")


def test_a_chunk_is_one_product_where_that_is_allowed_and_its_mask_is_not_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trie = TRIES[2]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, len(trie), 16, generator=generator).double() for heads in (4, 2, 2)]
    first, second = chunks(trie, len(trie) - 200)
    assert second.outside

    def attend(most: int) -> list[tuple[int, torch.Tensor]]:
        """How many products each chunk takes, and what comes of them."""
        monkeypatch.setattr(trie_attention, "ONE_PRODUCT", {"cpu": most})
        found, outside = [], {}
        for chunk in (first, second):
            own = [x[:, :, chunk.start : chunk.stop] for x in given]
            attention = TrieAttention(chunk, outside, dtype=torch.float64, device=CPU)
            found.append((len(attention._runs), attention.attend(0, *own, 0.25)))
            outside.update({number: [layers[0]] for number, layers in attention.found.items()})
        return found

    pairs = 200 * (200 + sum(len(second.pieces[n]) for n in second.outside))
    for (several, expected), (one, ours) in zip(attend(0), attend(len(trie) ** 2), strict=True):
        assert several > 1 and one == 1
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    assert attend(pairs)[1][0] == 1 and attend(pairs - 1)[1][0] > 1


def test_a_single_piece_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_attention, "ONE_PRODUCT", {"cpu": 10**6})
    (whole,) = chunks(build([np.arange(50)]))
    (run,) = TrieAttention(whole, {}, dtype=torch.float64, device=CPU)._runs
    assert run.bias is None


@pytest.mark.parametrize(
    ("width", "device", "dtype", "expected"),
    [(64, "cuda", "float32", True), (32, "cuda", "float32", False), (64, "cuda", "float64", False),
     (64, "cpu", "float32", False)],
)  # fmt: skip
def test_flex_attention_serves_heads_of_16_on_a_gpu(
    width: int, device: str, dtype: str, expected: bool
) -> None:
    loaded = load_model(TinyModel(layers=1, width=width, heads=4, kv_heads=2, dtype=dtype), seed=0)
    assert dataclasses.replace(loaded, device=torch.device(device)).flex is expected


def test_on_cpu_narrow_numbers_are_attended_in_float32() -> None:
    """And rounded once."""
    trie = TRIES[0]
    (chunk,) = chunks(trie)
    query, key, value = (torch.randn(1, 4, len(trie), 16).bfloat16() for _ in range(3))
    narrow = TrieAttention(chunk, {}, dtype=torch.bfloat16, device=CPU)
    exact = TrieAttention(chunk, {}, dtype=torch.float64, device=CPU)
    found = narrow.attend(0, query, key, value, 0.25)
    assert found.dtype == torch.bfloat16
    expected = exact.attend(0, query.double(), key.double(), value.double(), 0.25)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)

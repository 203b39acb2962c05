"""Training on the trie against one row at a time: the same numbers and the same gradient, in float64.

Rows come from random forests: shared runs, branches at any depth, duplicates, a row that is a prefix of
another, rows that differ in the first token. Whole, or chunk by chunk with chunks that end anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.forests import MODELS, forests
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from silva.config.sections import Lora
from silva.models import trie_attention
from silva.models.loading import LoadedModel, load_model
from silva.trainer.gradients import summed_in_place
from silva.trainer.policy import pack, token_logprobs
from silva.types import Sample


def gradient(loaded: LoadedModel, samples: list[Sample], values: Callable) -> list[torch.Tensor]:
    """Of a loss that weighs every (row, token) pair by itself and is not linear in its log-probability."""
    weights, advantages = (
        torch.from_numpy(np.concatenate([array[s.loss_weights > 0] for s, array in pairs]))
        for pairs in ([(s, s.loss_weights) for s in samples], [(s, s.advantages) for s in samples])
    )
    loaded.model.zero_grad()
    logprobs, entropies = values()
    (weights * (advantages * (logprobs + 5).clamp(-1, 1).exp() + 0.1 * entropies)).sum().backward()
    return [p.grad.clone() for p in loaded.model.parameters() if p.requires_grad and p.grad is not None]


def check(loaded: LoadedModel, samples: list[Sample], budget: int | None, naive: Callable) -> None:
    batch = pack(loaded, samples, least=1)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        found = token_logprobs(loaded, batch, budget=budget, entropy_grad=True)
        return found.logprobs, found.entropies

    for mine, true in zip(ours(), naive(loaded, samples), strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-11)
    with summed_in_place(loaded.model):  # as the trainer does
        mine = gradient(loaded, samples, ours)
    true = gradient(loaded, samples, lambda: naive(loaded, samples))
    assert len(mine) == len(true) > 0
    gap = torch.stack([(a - b).norm() for a, b in zip(mine, true, strict=True)]).norm()
    assert float(gap / torch.stack([b.norm() for b in true]).norm()) < 1e-10


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(
    samples=forests(),
    name=st.sampled_from(sorted(MODELS)),
    budget=st.none() | st.integers(1, 20),
    product=st.booleans(),
)
def test_whole_or_chunk_by_chunk_in_segments_or_in_one_product_as_on_a_gpu(
    models: dict[str, LoadedModel],
    naive: Callable,
    samples: list[Sample],
    name: str,
    budget: int | None,
    product: bool,
) -> None:
    with mock.patch.dict(trie_attention.ONE_PRODUCT, {"cpu": 2**22} if product else {}):
        check(models[name], samples, budget, naive)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(samples=forests(), budget=st.sampled_from([None, 5]))
def test_with_gradient_checkpointing(
    models: dict[str, LoadedModel], naive: Callable, samples: list[Sample], budget: int | None
) -> None:
    model = models["full"].model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        check(models["full"], samples, budget, naive)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


@pytest.mark.parametrize("budget", [None, 7])
def test_dropout_of_a_walk_is_the_same_both_ways(budget: int | None) -> None:
    """Finite differences through the same masks: a walk draws them a second time for its backward pass."""
    loaded = load_model(MODELS["lora"].model_copy(update={"lora": Lora(rank=4, alpha=8.0, dropout=0.3)}),
                        seed=1, device="cpu")  # fmt: skip
    weight = loaded.model.get_parameter("model.layers.0.self_attn.q_proj.lora_B.default.weight")
    samples = forests_of([12, 20])
    batch = pack(loaded, samples, least=1)
    loaded.model.train()

    def total() -> torch.Tensor:
        torch.manual_seed(3)
        return token_logprobs(loaded, batch, budget=budget).logprobs.sum()

    total().backward()
    assert weight.grad is not None
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight += step * direction
            values.append(float(total().detach()))
            weight -= step * direction
    assert float((weight.grad * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def forests_of(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 250, 8)
    return [
        Sample(
            tokens=np.concatenate([shared, rng.integers(0, 250, n - 8)]),
            loss_weights=np.where(np.arange(n) >= 4, 1.0, 0.0),
            logprobs=np.full(n, -5.0),
            temperatures=np.ones(n),
            versions=np.zeros(n, np.int64),
            trajectory="t",
            group="g",
        )
        for n in lengths
    ]


def test_a_walk_leaves_the_random_numbers_where_a_whole_pass_would_not_move_them() -> None:
    loaded = load_model(MODELS["full"], seed=1, device="cpu")
    batch = pack(loaded, forests_of([12, 20]), least=1)
    before = torch.get_rng_state()
    token_logprobs(loaded, batch, budget=5).logprobs.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_walk_keeps_one_chunk_and_what_lies_above_others() -> None:
    """Keys and values of leaves are gone after the forward pass."""
    from silva.models.trie_attention import shares
    from silva.trainer.head import Head
    from silva.trainer.walk import Walk

    loaded = load_model(MODELS["full"], seed=1, device="cpu")
    batch = pack(loaded, forests_of([40, 40, 40]), least=1)  # 8 shared tokens, then three times 32
    walk = Walk(loaded, Head(loaded), batch, shares(batch.trie, 8))
    walk.forward(graph=True)
    kept = sum(k.shape[2] for layers in walk.kept.values() for k, _ in layers[:1])
    assert kept == 8 + 3 * 24  # the last eighth of each answer has nothing below it


SIZES = {"vocab_size": 262, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
     Qwen3Config(**SIZES), Gemma2Config(**SIZES, attn_logit_softcapping=None),
     Gemma3TextConfig(**SIZES, sliding_window=64)],
    ids=lambda config: config.model_type if config else "whole",
)  # fmt: skip
def test_families(config: PreTrainedConfig, budget: int | None, naive: Callable) -> None:
    """In float32, since their norms round to it; each alone goes through its own unpacked path."""
    torch.manual_seed(0)
    model = Auto.from_config(config, attn_implementation="silva").eval()
    loaded = LoadedModel(model, None, "t", torch.device("cpu"), torch.float32, 128, False)  # type: ignore[arg-type]
    samples = forests_of([12, 20, 20, 9])
    batch = pack(loaded, samples, least=1)
    results = []
    for way, values in (
        (summed_in_place(model), lambda: token_logprobs(loaded, batch, budget=budget).logprobs),
        (contextlib.nullcontext(), lambda: naive(loaded, samples)[0]),
    ):
        model.zero_grad()
        with way:
            logprobs = values()
            logprobs.square().sum().backward()
        results.append(
            (logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    (mine, mine_grads), (true, true_grads) = results
    torch.testing.assert_close(mine, true, rtol=0, atol=1e-5)
    gap = torch.stack([(a - b).norm() for a, b in zip(mine_grads, true_grads, strict=True)]).norm()
    assert float(gap / torch.stack([b.norm() for b in true_grads]).norm()) < 1e-5

"""The short way through a decoder has the states of transformers' own, for every family that takes it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from silva.compute import set_threads
from silva.engines.local.kv_cache import CacheRow, KvCache
from silva.engines.local.ragged_step import RaggedStep, Span
from silva.models import attention, prepacked
from silva.models.activation import steady_activations
from silva.models.decoder import AnyDecoder, Decoder, LlamaDecoder, decoder_of
from silva.models.prepacked import PrepackedLinears
from silva.models.same_bits import probe

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
)  # fmt: skip
CONFIGS = [
    LlamaConfig(**SIZES),
    LlamaConfig(
        **SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0}, attention_bias=True, mlp_bias=True
    ),
    MistralConfig(**SIZES),
    Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    Qwen3Config(**SIZES),
]


def make(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config._attn_implementation = attention.NAME
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # norms and biases of their own, and states that differ
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def sequences(model: PreTrainedModel) -> tuple[KvCache, list[np.ndarray], list[CacheRow]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50, n) for n in (70, 9, 31)]
    cache = KvCache(model.config, rows=4, context=512, dtype=model.dtype, device=torch.device("cpu"))
    cache.rules = probe(model, head_dim=cache.head_dim, dtype=model.dtype)
    rows = []
    for sequence in tokens:
        got = cache.acquire(None, 0, sequence)
        assert got is not None
        rows.append(got[0])
    return cache, tokens, rows


def run(model: PreTrainedModel, decoder: Decoder | None = None) -> list[torch.Tensor]:
    """States of three sequences: prompts packed in one step, then six tokens decoded side by side."""
    decoder, (cache, tokens, rows) = decoder or decoder_of(model), sequences(model)
    states: list[list[torch.Tensor]] = [[] for _ in rows]
    ends = [[len(t) - n for t in tokens] for n in range(6, -1, -1)]
    for starts, stops in zip([[0] * len(rows), *ends], ends, strict=False):
        spans = list(zip(starts, stops, strict=True))
        step = RaggedStep(cache, [Span(r.index, *span) for r, span in zip(rows, spans, strict=True)])
        ids = np.concatenate([t[slice(*span)] for t, span in zip(tokens, spans, strict=True)])
        with torch.inference_mode():
            found = step.compute(decoder, ids)
        for of_row, part in zip(states, found.split([b - a for a, b in spans]), strict=True):
            of_row.append(part.clone())
    return [torch.cat(parts) for parts in states]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_states_are_those_of_transformers(config: Any) -> None:
    model = make(config)
    assert isinstance(decoder_of(model), LlamaDecoder)
    found, (_, tokens, _) = run(model), sequences(model)
    for states, sequence in zip(found, tokens, strict=True):
        with torch.no_grad():
            expected = model.get_decoder()(input_ids=torch.from_numpy(sequence)[None]).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_rounds_where_transformers_does() -> None:
    """Norms are computed in float32: the gap to the float32 model is that of transformers' bfloat16."""
    model, wide = make(LlamaConfig(**SIZES), torch.bfloat16), make(LlamaConfig(**SIZES))
    wide.load_state_dict(model.state_dict())
    gaps = []
    for states, sequence in zip(run(model), sequences(model)[1], strict=True):
        ids = torch.from_numpy(sequence)[None]
        with torch.no_grad():
            exact, theirs = (
                m.get_decoder()(input_ids=ids).last_hidden_state[0].float() for m in (wide, model)
            )
        gaps.append((float((states.float() - exact).norm()), float((theirs - exact).norm())))
    assert all(0 < ours < 1.3 * theirs for ours, theirs in gaps), gaps


def computed(
    decoder: Decoder, model: PreTrainedModel, sequences: list[np.ndarray], cuts: random.Random | None
) -> list:
    """Keys, values and states of each, computed side by side in spans of random lengths, or all at once."""
    cache = KvCache(
        model.config, rows=len(sequences), context=512, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.rules = probe(model, head_dim=cache.head_dim, dtype=torch.float32)
    got = [cache.acquire(None, 0, sequence) for sequence in sequences]
    rows, done = [one[0] for one in got if one], [0] * len(sequences)
    while any(n < len(tokens) for n, tokens in zip(done, sequences, strict=True)):
        spans: dict[int, Span] = {}
        for i, tokens in enumerate(sequences):
            left = len(tokens) - done[i]
            if left and (cuts is None or cuts.random() < 0.8):
                count = left if cuts is None else 1 if cuts.random() < 0.6 else min(left, cuts.randint(1, 90))
                spans[i] = Span(rows[i].index, done[i], done[i] + count)
                done[i] += count
        if spans:
            step = RaggedStep(cache, list(spans.values()))
            ids = np.concatenate([sequences[i][s.start : s.stop] for i, s in spans.items()])
            with torch.inference_mode():
                step.compute(decoder, ids)
    stores = [*cache.keys, *cache.values, *cache.outputs]
    return [[store[r.index, :, : len(t)] for store in stores] for r, t in zip(rows, sequences, strict=True)]


UNSHARED = SIZES | {"num_key_value_heads": 4}


@pytest.mark.slow
@pytest.mark.same_bits
@pytest.mark.parametrize(
    "config",
    [*CONFIGS, LlamaConfig(**UNSHARED), Gemma2Config(**UNSHARED, attn_logit_softcapping=None)],
    ids=lambda c: c.model_type,
)
@pytest.mark.parametrize("threads", [1, 3])  # shares of three threads end within a vector
def test_what_is_computed_of_a_sequence_does_not_depend_on_its_company(config: Any, threads: int) -> None:
    before = torch.get_num_threads()
    model = make(config)
    steady_activations(model)
    decoder, rng, cuts = decoder_of(model), np.random.default_rng(0), random.Random(0)
    tokens = [rng.integers(0, 50, n) for n in (*rng.integers(20, 150, 12), 64, 65, 257, 300)]
    try:
        set_threads(threads)
        alone = [computed(decoder, model, [sequence], None)[0] for sequence in tokens]
        for _ in range(3):
            for got, expected in zip(computed(decoder, model, tokens, cuts), alone, strict=True):
                assert all(map(torch.equal, got, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.same_bits
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=lambda c: c.model_type)
def test_packed_weights_leave_the_bits(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "made_by_amd", lambda: False)  # with MKL
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    model = make(type(config)(**sizes))
    plain = run(model)
    decoder = decoder_of(model)
    packed = PrepackedLinears(model, decoder.linears, sequences(model)[0].rules.linear)
    packed.refresh()
    held = sum(linear.packed is not None for linear in decoder.linears)
    assert held == len(decoder.linears) or packed.nbytes == 0  # a machine whose products differ packs nothing
    assert all(map(torch.equal, run(model, decoder), plain))


def test_other_families_go_through_transformers() -> None:
    gemma = make(Gemma3TextConfig(**SIZES, sliding_window=64))
    assert isinstance(decoder_of(gemma), AnyDecoder)
    config = LlamaConfig(**SIZES, hidden_act="gelu")
    assert isinstance(decoder_of(make(config)), AnyDecoder)

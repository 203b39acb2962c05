"""Decoding in recorded steps computes what packed steps compute. On CPU a record is the step itself, reading
nothing that changes but its table, and attention is not compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from silva.config.sections import TinyModel
from silva.engines.local import decode_graph
from silva.engines.local.decode_graph import DecodeGraphs, DecodeStep, Replay
from silva.engines.local.engine import LocalEngine
from silva.engines.local.kv_cache import KvCache
from silva.models.loading import LoadedModel, load_model
from silva.models.same_bits import BLOCK, RowRules
from silva.types import Completion, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graph, "_attention", lambda: flex_attention)


@pytest.fixture(scope="module")
def wide_model() -> LoadedModel:
    settings = TinyModel(layers=2, width=48, heads=6, kv_heads=2, context=1024, dtype="float64")
    return load_model(settings, seed=0)


def prompts() -> list[list[int]]:
    """A group of three on 300 tokens, one that continues another of 600, and some alone."""
    rng = np.random.default_rng(0)
    shared, long = rng.integers(0, 256, 300).tolist(), rng.integers(0, 256, 600).tolist()
    others = [rng.integers(0, 256, n).tolist() for n in (1, 40, 255, 256, 257)]
    return [shared, shared, shared, long, [*long, 7], *others]


def play(engine: LocalEngine) -> list[Completion]:
    async def run() -> list[Completion]:
        lengths = [3 + 2 * i for i in range(len(prompts()))]  # so that fewer and fewer decode
        params = [SamplingParams(n, seed=i) for i, n in enumerate(lengths)]
        return await asyncio.gather(*map(engine.sample, prompts(), params))

    return asyncio.run(run())


def recorded(engine: LocalEngine) -> list[Replay]:
    """Makes the engine decode as on a GPU; what is recorded appears in the list."""
    found: list[Replay] = []

    def record(step: Replay) -> Replay:
        found.append(step)
        return step

    engine.cache.rules = RowRules(lanes=BLOCK)
    engine.batch.graphs, engine.batch.drafts = DecodeGraphs(engine.batch.decoder, engine.cache, record), None
    return found


@pytest.mark.slow
def test_recorded_steps_sample_what_packed_steps_do(
    wide_model: LoadedModel, make_engine: Callable[..., LocalEngine]
) -> None:
    expected = play(make_engine(wide_model))
    engine = make_engine(wide_model)
    records = recorded(engine)
    found = play(engine)
    assert records
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_one_record_serves_all_steps_of_a_size_until_the_cache_moves(
    wide_model: LoadedModel, make_engine: Callable[..., LocalEngine]
) -> None:
    engine = make_engine(wide_model, max_concurrent=16, cached_sequences=0)
    records = recorded(engine)
    first = play(engine)
    at_first = len(records)
    assert 2 <= at_first < engine.stats.steps / 2  # for 16 requests and 8, again where the cache grew
    play(engine)
    assert len(records) == at_first
    asyncio.run(engine.sleep())
    assert not engine.batch.graphs._recorded  # type: ignore[union-attr]
    assert [c.tokens for c in play(engine)] == [c.tokens for c in first]
    assert len(records) > at_first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: python -m pytest -m gpu")
def test_a_recorded_step_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., LocalEngine]
) -> None:
    monkeypatch.undo()  # attention is compiled here
    settings = TinyModel(layers=2, width=96, heads=6, kv_heads=2, context=1024)  # kernels need 16 a head
    loaded = load_model(settings, seed=0, device="cuda")
    engine, plain = make_engine(loaded), make_engine(loaded)
    assert engine.batch.graphs is not None
    plain.batch.graphs = None
    for ours, theirs in zip(play(engine), play(plain), strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: python -m pytest -m gpu")
def test_heads_too_narrow_for_kernels_are_sampled_without_records(
    make_engine: Callable[..., LocalEngine],
) -> None:
    settings = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=1024)
    engine = make_engine(load_model(settings, seed=0, device="cuda"))
    assert engine.batch.graphs is None
    expected = play(make_engine(load_model(settings, seed=0)))
    for ours, theirs in zip(play(engine), expected, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)


def test_the_table_lists_the_blocks_that_the_mask_shows(wide_model: LoadedModel) -> None:
    cache = KvCache(wide_model.model.config, rows=4, context=1024, dtype=torch.float64, device=CPU)
    cache.rules = RowRules(lanes=BLOCK)
    first = cache.acquire(None, 0, np.arange(600))
    assert first is not None
    second = cache.acquire(first[0], 590, np.arange(595))
    assert second is not None
    assert second[0].owners == (first[0].index,) * 2
    owner, fork = first[0].index, second[0].index
    #                      token, row, position, who holds each block
    table = torch.tensor(
        [[0, owner, 599, *[owner] * 3], [0, fork, 590, owner, owner, fork], [0, fork, 255, *[owner] * 3]]
    )
    mask = DecodeStep(cache, table)._mask
    slots, kv, length, _ = cache.keys[0].shape
    pairs = create_block_mask(
        mask.mask_mod, len(table) * kv, None, 3, slots * kv * length, device="cpu", BLOCK_SIZE=(128, BLOCK)
    )
    for request in range(len(table) * kv):
        seen = {
            int(index)
            for counts, indices in (
                (pairs.kv_num_blocks, pairs.kv_indices),
                (pairs.full_kv_num_blocks, pairs.full_kv_indices),
            )
            for index in indices[request, 0, 0, : counts[request, 0, 0]]
        }
        count = mask.kv_num_blocks[request, 0, 0]
        listed = mask.kv_indices[request, 0, 0, :count].tolist()
        assert len(listed) == len(seen) == (3, 3, 1)[request // kv]
        assert set(listed) == seen

"""What one of several runs sees of their engine is the engine that it would have alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import moe

from silva.compute import ComputeThread
from silva.config.sections import Lora, PretrainedModel
from silva.engines.local.engine import LocalEngine
from silva.engines.one_adapter import OneAdapter
from silva.engines.settings import LocalEngineSettings
from silva.errors import ModelError
from silva.models.loading import LoadedModel, load_model
from silva.models.lora_runs import LoraRuns, adapters_in
from silva.protocols import Engine
from silva.seeds import with_adapters
from silva.types import SamplingParams, Snapshot

SETTINGS = LocalEngineSettings(context=64)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    made = ComputeThread(1)
    yield made
    made.shutdown()


def adapted(plain: LoadedModel, rank: int, seed: int) -> LoadedModel:
    loaded = with_adapters(plain, Lora(rank=rank, alpha=32.0), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return loaded


@pytest.mark.same_bits
@pytest.mark.parametrize("rank", [4, 12])
def test_its_samples_are_those_of_the_model_with_the_adapter_in_it(
    tiny_model: LoadedModel, compute: ComputeThread, rank: int
) -> None:
    """32 / 12 is no power of two, so it rounds."""
    models = [adapted(tiny_model, rank, seed) for seed in range(2)]
    shared = compute.run(LocalEngine, tiny_model, SETTINGS, compute)
    views = [OneAdapter(shared, f"{seed}", model) for seed, model in enumerate(models)]
    single = [compute.run(LocalEngine, model, SETTINGS, compute) for model in models]

    async def said(engine: Engine) -> list[tuple[object, ...]]:
        await engine.load(Snapshot(5))
        done = [engine.sample([7, 8, 9 + n], SamplingParams(8, seed=n)) for n in range(3)]
        scored = await engine.score([1, 2, 3, 4], 2)
        return [(each.tokens, each.logprobs, each.versions) for each in await asyncio.gather(*done)] + [
            (scored.logprobs, scored.version)
        ]

    async def together() -> list[list[tuple[object, ...]]]:
        return list(await asyncio.gather(*map(said, views)))

    found = asyncio.run(together())
    assert found == [asyncio.run(said(engine)) for engine in single] and found[0] != found[1]
    assert [view.version for view in views] == [5, 5]


def test_adapters_of_other_layers_are_refused(tiny_model: LoadedModel) -> None:
    mine = adapters_in(adapted(tiny_model, 4, 0).model)
    assert len(mine) == 14
    runs = LoraRuns(with_adapters(tiny_model, Lora(targets=("q_proj",)), seed=0).model, ["lm_head"])
    with pytest.raises(ModelError, match="got an adapter of"):
        runs.adopt("a", mine)


def test_adapters_of_experts_are_refused_by_their_key(tmp_path: Path) -> None:
    experts = load_model(PretrainedModel(name=str(moe.folder(tmp_path / "experts"))), seed=0)
    with pytest.raises(
        ModelError, match=r"model\.lora\.targets: got experts \(.*expected linear layers alone"
    ):
        adapters_in(with_adapters(experts, Lora(), seed=0).model)

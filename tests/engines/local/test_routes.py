"""Routes that the engine records: against what transformers' own routers choose for the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.local.test_drafts import AnyDrafts
from tests.moe import folder

from silva.config.sections import PretrainedModel, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.errors import ModelError
from silva.models.loading import LoadedModel, load_model
from silva.models.routing import Routing
from silva.types import Completion, SamplingParams, Snapshot

Stepped = Callable[..., tuple[LocalEngine, Any]]
Job = tuple[list[int], SamplingParams]


@pytest.fixture
def moe(tmp_path: Path) -> LoadedModel:
    model = folder(tmp_path / "m", experts=8, max_position_embeddings=512)
    return load_model(PretrainedModel(name=str(model)), seed=0)


def jobs() -> list[Job]:
    """Twins, siblings, a prompt that goes on with another, one over two blocks of the cache, another text."""
    rng = np.random.default_rng(0)
    common, long = rng.integers(1, 250, 20).tolist(), rng.integers(1, 250, 300).tolist()
    prompts = [common, common, common, [*common, 7, 8], long, [*long[:280], 9], [5, 6]]
    return [(p, SamplingParams(max_tokens=10, seed=n // 2)) for n, p in enumerate(prompts)]


def own_experts(loaded: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """[T, layers, k], each token's experts in order of their numbers."""
    routing = Routing(loaded.model)
    with torch.no_grad(), routing.recorded() as found:
        loaded.model.get_decoder()(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return np.sort(torch.stack(found, 1).numpy())


def check(loaded: LoadedModel, job: Job, found: Completion, kept: int = 0) -> None:
    """All but the first `kept` tokens went to the experts that these weights choose."""
    assert found.routes is not None and found.prompt_routes is not None
    routes = np.concatenate([found.prompt_routes, found.routes])
    tokens = [*job[0], *found.tokens]
    assert routes.shape == (len(tokens), 2, 2) and routes.dtype == np.uint8 and (routes[0] == 255).all()
    expected = own_experts(loaded, tokens)[:-1]
    assert np.array_equal(np.sort(routes[1:])[kept:], expected[kept:])


async def play(engine: LocalEngine, stepper: Any, asked: Sequence[Job]) -> list[Completion]:
    tasks = [asyncio.ensure_future(engine.sample(*job)) for job in asked]
    await stepper.settle()
    while not all(task.done() for task in tasks):
        await stepper.tick()
    return [task.result() for task in tasks]


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"max_concurrent": 2, "cached_sequences": 1, "prefill_tokens": 37}])
def test_recorded_experts_are_those_of_transformers(moe: LoadedModel, stepped: Stepped, limits: dict) -> None:
    """In prefill, decoding, from cached and shared prefixes, for followers and for drafts."""
    engine, stepper = stepped(moe, routes=True, **limits)
    assert engine.capabilities.routes
    first = asyncio.run(play(engine, stepper, jobs()))
    engine.batch.drafts = AnyDrafts(list(zip(jobs(), first, strict=True)), seed=1)  # type: ignore[assignment]
    again = asyncio.run(play(engine, stepper, [*jobs(), ([*jobs()[0][0], 11], SamplingParams(6, seed=9))]))
    for job, *found in zip(jobs(), first, again, strict=False):
        for each in found:
            check(moe, job, each)
    check(moe, ([*jobs()[0][0], 11], SamplingParams(6)), again[-1])
    stats = engine.stats
    assert stats.cached_tokens > 0 and stats.accepted_tokens > 0 and (limits or stats.shared_tokens > 0)
    scores = asyncio.run(_scored(engine, stepper))
    assert len(scores.logprobs) == 3


async def _scored(engine: LocalEngine, stepper: Any) -> Any:
    task = asyncio.ensure_future(engine.score([1, 2, 3, 4], 1))
    await stepper.settle()
    while not task.done():
        await stepper.tick()
    return task.result()


def test_tokens_keep_the_experts_of_the_weights_that_drew_them(moe: LoadedModel, stepped: Stepped) -> None:
    """After a load in the middle of a reply its beginning is computed again, with other experts."""
    engine, stepper = stepped(moe, routes=True)
    job = (list(range(20, 40)), SamplingParams(max_tokens=12, seed=3))
    before: list[np.ndarray] = []

    async def run() -> Completion:
        task = asyncio.ensure_future(engine.sample(*job))
        await stepper.settle()
        await stepper.tick(5)
        (request,) = engine.batch.running
        before.append(own_experts(moe, [*job[0], *request.tokens])[:-1])
        with torch.no_grad():
            for layer in moe.model.model.layers:
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
        loading = asyncio.ensure_future(engine.load(Snapshot(1)))
        while not (task.done() and loading.done()):
            await stepper.tick()
        return task.result()

    found = asyncio.run(run())
    kept = len(before[0])
    assert 20 < kept < len(found.tokens) + 19 and set(found.versions) == {0, 1}
    check(moe, job, found, kept)
    assert found.routes is not None and found.prompt_routes is not None
    routes = np.sort(np.concatenate([found.prompt_routes, found.routes])[1 : kept + 1])
    assert np.array_equal(routes, before[0])
    assert not np.array_equal(own_experts(moe, [*job[0], *found.tokens])[:kept], before[0])


def test_nothing_is_recorded_unless_asked_for(moe: LoadedModel, stepped: Stepped) -> None:
    engine, stepper = stepped(moe)
    assert not engine.capabilities.routes and len(engine.cache.outputs) == 1
    (found,) = asyncio.run(play(engine, stepper, jobs()[:1]))
    assert found.routes is None and found.prompt_routes is None
    recording, stepper = stepped(moe, routes=True)
    (same,) = asyncio.run(play(recording, stepper, jobs()[:1]))
    assert same == found  # every number of it


def test_a_model_without_experts_is_refused(stepped: Stepped) -> None:
    with pytest.raises(ModelError, match="no experts whose choice could be replayed"):
        stepped(load_model(TinyModel(layers=1, width=16, heads=2, kv_heads=1), seed=0), routes=True)

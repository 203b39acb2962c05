"""Sampler and trainer agree on every sampled token, and the gradient does not depend on the cut.

The way of a real batch: episodes of several turns with mixed lengths, temperature 0.7 and stop strings,
written to parquet, read back, turned into rows, scored by the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from silva.algorithms.aggregation import normalise
from silva.config.sections import EpisodeLimits, Sampling, TinyModel
from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.environments.worlds.guess_number import GuessNumber
from silva.environments.worlds.hanoi import Hanoi
from silva.models.loading import LoadedModel, load_model
from silva.protocols import Work
from silva.rendering.renderer import Renderer
from silva.rollouts.linear import Linear
from silva.rollouts.samples import to_samples
from silva.rollouts.settings import LinearRolloutSettings
from silva.storage.rollouts import RolloutRow, read_rollouts, write_rollouts
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Group, LossSpec, Sample

Batch = Callable[..., list[Sample]]
WORLDS = (GuessNumber(eval_size=21), Hanoi(eval_size=4))


async def play(loaded: LoadedModel, compute: ThreadPoolExecutor, stop: tuple[str, ...]) -> list[Group]:
    engine = LocalEngine(loaded, LocalEngineSettings(), compute)
    settings = LinearRolloutSettings(
        group_size=4,
        sampling=Sampling(temperature=0.7, stop=stop),
        limits=EpisodeLimits(max_turns=4, max_turn_tokens=24, max_episode_tokens=1000),
    )
    linear = Linear(settings, engine, Renderer(loaded.tokenizer), seed=3)  # type: ignore[arg-type]

    async def group(world: GuessNumber | Hanoi, number: int) -> Group:
        tasks = world.taskset()
        task, temperature = tasks.tasks("train")[number], settings.sampling.temperature
        return await anext(linear.run(Work(f"0/{world.type}/{number}", task, tasks, temperature)))

    return list(await asyncio.gather(*(group(world, number) for world in WORLDS for number in range(2))))


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """`batch(loaded, stop)`: rows of a played batch that has been to disk and back."""

    def make(loaded: LoadedModel, stop: tuple[str, ...]) -> list[Sample]:
        with ThreadPoolExecutor(1) as compute:
            groups = asyncio.run(play(loaded, compute, stop))
        path = tmp_path / "step_1.parquet"
        rows = [
            RolloutRow(1, g.task.id, g.task.environment, g.key, t, "trained")
            for g in groups
            for t in g.trajectories
        ]
        write_rollouts(path, rows)
        back = iter(read_rollouts(path))
        read = [Group(g.key, g.task, tuple(next(back).trajectory for _ in g.trajectories)) for g in groups]
        stops = {turn.stop_reason for g in read for t in g.trajectories for turn in t.turns}
        turns = {len(t.turns) for g in read for t in g.trajectories}
        assert {"stop_string", "length"} <= stops and max(turns) >= 3
        samples = to_samples(read)
        assert len({len(sample) for sample in samples}) > 4
        return samples

    return make


def differences(loaded: LoadedModel, samples: list[Sample]) -> np.ndarray:
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(micro_batch_tokens=1500), seed=0))
    scored = asyncio.run(trainer.score(samples, frozenset({"logprobs"}))).logprobs
    assert scored is not None
    both = [
        np.stack([s.logprobs, row])[:, s.loss_weights > 0] for s, row in zip(samples, scored, strict=True)
    ]
    sampled, trained = np.concatenate(both, axis=1)
    assert np.isfinite(sampled).all() and np.isfinite(trained).all()
    return np.abs(sampled - trained)


def lively(dtype: str) -> LoadedModel:
    """A random model with preferences, which says more than a nearly uniform one."""
    settings = TinyModel(layers=2, width=32, heads=4, kv_heads=2, context=1024, dtype=dtype)
    loaded = load_model(settings, seed=0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-9)])
def test_tiny_agrees_with_itself(batch: Batch, dtype: str, most: float) -> None:
    loaded = lively(dtype)
    found = differences(loaded, batch(loaded, ("a", "e", "<")))
    assert len(found) > 200 and found.max() < most, (len(found), found.max())


def test_smollm2_agrees_with_itself(smollm2: LoadedModel, batch: Batch) -> None:
    found = differences(smollm2, batch(smollm2, (".", " the")))
    assert len(found) > 200, len(found)
    assert found.mean() < 2e-5 and found.max() < 1e-3, (found.mean(), found.max())


def test_smollm2_s_gradient_does_not_depend_on_the_cut(smollm2: LoadedModel, batch: Batch) -> None:
    """All rows on one trie, against micro-batches of a few hundred tokens, whole or walked in chunks."""
    rng = np.random.default_rng(0)
    samples = [s.replace(advantages=rng.normal(size=len(s))) for s in batch(smollm2, (".", " the"))[::4]]
    samples = normalise(samples, "token_mean")
    gradients = []
    for budget in (100_000, 400):
        trainer = LocalTrainer(Learner(smollm2, LocalTrainerSettings(micro_batch_tokens=budget), seed=0))
        asyncio.run(trainer.forward_backward(samples, LossSpec("reinforce")))
        gradients.append(torch.cat([p.grad.flatten() for p in smollm2.model.parameters()]))
        smollm2.model.zero_grad(set_to_none=True)
    one, many = gradients
    error = float((one - many).norm() / many.norm())
    assert error < 2e-4, error

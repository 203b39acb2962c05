"""The probe of the engine's weights: what it measures, and which engines it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from tests.trainer.conftest import make_samples, tiny

from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import EngineError
from silva.orchestrator.probe import Probe, WeightSync
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.transfer import WeightFolders
from silva.types import LossSpec, OptimParams, Snapshot

__all__ = ["make_samples", "tiny"]


@pytest.fixture
def compute() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def made(tiny, compute, tmp_path: Path):
    """A trainer that writes folders, and an engine over a model of its own."""
    policy = tiny(seed=0)
    transfer = WeightFolders(tmp_path / "broadcast", "parameters")
    trainer = LocalTrainer(Learner(policy, LocalTrainerSettings(), seed=0), transfer, compute=compute)
    return trainer, LocalEngine(tiny(seed=1), LocalEngineSettings(), compute)


async def update(trainer, make_samples) -> Snapshot:
    await trainer.forward_backward(make_samples([9, 14]), LossSpec("reinforce"))
    await trainer.optim_step(OptimParams(lr=1e-3))
    return await trainer.publish()


def test_an_engine_with_the_published_weights_differs_by_rounding(made, make_samples) -> None:
    async def run() -> list[dict[str, float]]:
        trainer, engine = made
        probe, found = Probe(256, "float32"), []
        await engine.load(await trainer.snapshot())
        for _ in range(3):
            await probe.ask(trainer)
            found.append(await probe.check(engine))
            await engine.load(await update(trainer, make_samples))
        return found

    for metrics in asyncio.run(run()):
        assert 0 <= metrics["perf/mismatch_kl"] < 1e-10 and metrics["perf/mismatch_max"] < 1e-4


def test_an_engine_that_kept_its_weights_is_refused_however_small_the_update(made, make_samples) -> None:
    async def run() -> None:
        trainer, engine = made
        probe = Probe(256, "float32")
        await engine.load(await trainer.snapshot())
        await probe.ask(trainer)
        await probe.check(engine)
        await trainer.forward_backward(make_samples([9, 14]), LossSpec("reinforce"))
        await trainer.optim_step(OptimParams(lr=1e-6))
        await trainer.publish()
        engine.batch.version = 1  # it says so, and has loaded nothing
        await probe.ask(trainer)
        with pytest.raises(EngineError, match="those of the version before, to the last bit"):
            await probe.check(engine)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "updates"), [(1e-3, 1), (1e-5, 2), (1e-6, 10)])
@pytest.mark.parametrize("half", [False, True])
def test_weights_of_which_half_arrive_are_seen_at_any_learning_rate(
    tiny, compute, make_samples, tmp_path: Path, lr: float, updates: int, half: bool
) -> None:
    """Of adapters, those of the second layer stay as they were."""
    policy, other = tiny(seed=0, lora=True), tiny(seed=0, lora=True)
    trainer = LocalTrainer(Learner(policy, LocalTrainerSettings(), seed=0), compute=compute)
    engine = LocalEngine(other, LocalEngineSettings(), compute)

    def arrive() -> None:
        theirs = dict(other.model.named_parameters())
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if not (half and "layers.1." in name):
                    theirs[name].copy_(parameter)

    async def run() -> None:
        probe = Probe(256, "float32")
        await probe.ask(trainer)
        await probe.check(engine)
        for _ in range(updates):
            await trainer.forward_backward(make_samples([9, 14]), LossSpec("reinforce"))
            await trainer.optim_step(OptimParams(lr=lr))
            snapshot = await trainer.publish()
            arrive()
            await engine.load(Snapshot(snapshot.version))
            await probe.ask(trainer)
            await probe.check(engine)

    if half:
        with pytest.raises(EngineError, match=r"Some of its weights are old|It has other weights"):
            asyncio.run(run())
    else:
        asyncio.run(run())


def test_whoever_gives_an_engine_weights_learns_that_it_has_kept_the_old_ones(
    made, make_samples, monkeypatch
):
    """Also in supervised training, which has no other way to see it."""
    trainer, engine = made

    async def kept(snapshot: Snapshot) -> None:
        engine.batch.version = snapshot.version

    async def run() -> None:
        sync = WeightSync(trainer, engine, Probe(256, "float32"))
        assert (await sync.load(await trainer.snapshot()))["perf/mismatch_max"] < 1e-4
        monkeypatch.setattr(engine, "load", kept)
        await update(trainer, make_samples)
        with pytest.raises(EngineError, match="The engine still has old weights"):
            await sync.publish()

    asyncio.run(run())


def test_an_engine_with_another_model_or_version_is_refused(made) -> None:
    async def run() -> None:
        (trainer, engine), probe = made, Probe(256, "float32")
        await probe.ask(trainer)
        with pytest.raises(EngineError, match=r"differ from the trainer's by up to \d"):
            await probe.check(engine)  # of another seed
        await engine.load(await trainer.snapshot())
        engine.batch.version = 5
        with pytest.raises(EngineError, match="it computes with version 5"):
            await probe.check(engine)

    asyncio.run(run())


def test_the_estimate_is_the_kl_in_expectation() -> None:
    """E_q[r - 1 - ln r] = KL(q || p), with scipy's KL of two distributions over 1,000 tokens."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(1000)), rng.dirichlet(np.ones(1000))
    gap = np.log(p) - np.log(q)
    assert np.sum(q * (np.expm1(gap) - gap)) == pytest.approx(np.sum(rel_entr(q, p)), rel=1e-12)

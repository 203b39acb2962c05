"""What every trainer does. A new one adds itself to the fixture `make`.

Not here: `TinkerTrainer`. It has no weights that `make` could seed, no full fine-tuning, critic, entropies or
folder to export. tests/server/tinker/test_runs_of_silva.py holds it to the local trainer's numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.doubles import Slow
from tests.trainer.trainer_server import client, serving
from transformers import AutoModelForCausalLM

from silva.assembly import connected
from silva.errors import CapabilityError, CheckpointError, RecordError
from silva.models.loading import LoadedModel
from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedTrainer
from silva.protocols import Trainer
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.remote import Open
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.transfer import WeightFolders
from silva.types import LossSpec, OptimParams, Sample

pytestmark = pytest.mark.slow

Tiny = Callable[..., LoadedModel]
Make = Callable[[int], Trainer]  # seed of the weights
LOSS = LossSpec("reinforce")
PARAMS = OptimParams(lr=1e-2)


@pytest.fixture(params=["local", "local on a thread", "slow local", "traced", "folders", "remote"])
def make(request: pytest.FixtureRequest, tiny: Tiny, tmp_path: Path) -> Iterator[Make]:
    kind, numbers = request.param, count()
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))

        def local(seed: int, transfer: WeightFolders | None = None) -> Trainer:
            learner = Learner(tiny(seed=seed), LocalTrainerSettings(), seed=0, reference=True)
            compute = None if kind in ("local", "slow local") else thread
            made: Any = LocalTrainer(learner, transfer, compute=compute)
            return Slow(made) if kind == "slow local" else made

        def folders(seed: int) -> Trainer:
            return local(seed, WeightFolders(tmp_path / f"broadcast-{next(numbers)}", "parameters"))

        def remote(seed: int) -> Trainer:
            async def build(asked: Open, say: Callable[[str], None]) -> Trainer:
                return folders(seed)

            return asyncio.run(connected(client(stack.enter_context(serving(build)), tmp_path)))

        def traced(seed: int) -> Trainer:
            return TracedTrainer(local(seed), Trace(None))

        yield {"folders": folders, "remote": remote, "traced": traced}.get(kind, local)


@pytest.fixture
def rows(make_samples: Callable[..., list[Sample]]) -> list[Sample]:
    return make_samples([9, 14, 30])


def update(trainer: Trainer, rows: list[Sample], params: OptimParams = PARAMS) -> dict[str, float]:
    async def run() -> dict[str, float]:
        metrics = await trainer.forward_backward(rows, LOSS)
        return {**metrics, **await trainer.optim_step(params)}

    return asyncio.run(run())


def logprobs(trainer: Trainer, rows: list[Sample]) -> np.ndarray:
    found = asyncio.run(trainer.score(rows, frozenset({"logprobs"}))).logprobs
    assert found is not None
    return np.concatenate(found)


def test_an_update_changes_the_policy_and_says_how(make: Make, rows: list[Sample]) -> None:
    trainer = make(0)
    before = logprobs(trainer, rows)
    metrics = update(trainer, rows)
    trained = sum(int((row.loss_weights > 0).sum()) for row in rows)
    assert metrics["trained_tokens"] == trained and metrics["grad_norm"] > 0
    assert (metrics["lr"], metrics["nonfinite"]) == (0.01, 0.0)
    assert not np.allclose(before, logprobs(trainer, rows), equal_nan=True)


def test_a_learning_rate_of_0_changes_nothing(make: Make, rows: list[Sample]) -> None:
    trainer = make(0)
    before = logprobs(trainer, rows)
    update(trainer, rows, OptimParams(lr=0.0))
    assert np.array_equal(before, logprobs(trainer, rows), equal_nan=True)


def test_gradients_add_up_until_the_step(make: Make, rows: list[Sample]) -> None:
    whole, parts = make(0), make(0)
    norm = update(whole, rows)["grad_norm"]
    for row in rows[:-1]:
        asyncio.run(parts.forward_backward([row], LOSS))
    assert update(parts, rows[-1:])["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_each_token_is_clipped_or_not(make: Make, rows: list[Sample]) -> None:
    """Where the ratio to what was sampled has moved the way the advantage wants, by more than 0.2."""
    trainer, rng = make(0), np.random.default_rng(0)
    rows = [row.replace(advantages=rng.choice([-1.0, 1.0], len(row))) for row in rows]
    now = asyncio.run(trainer.score(rows, frozenset({"logprobs"}))).logprobs
    assert now is not None
    moved = [rng.choice([-0.5, -0.1, 0.1, 0.5], len(row)) for row in rows]
    rows = [row.replace(logprobs=new - by) for row, new, by in zip(rows, now, moved, strict=True)]
    unused = rows[0].replace(loss_weights=np.zeros(len(rows[0])))

    async def clipped(loss: LossSpec) -> list[list[bool]]:
        await trainer.forward_backward([unused, *rows], loss)
        return [flags.tolist() for flags in await trainer.clipped()]

    expected = [
        (row.loss_weights > 0) & (((a > 0) & (by == 0.5)) | ((a < 0) & (by == -0.5)))
        for row, by in zip(rows, moved, strict=True)
        if (a := row.advantages) is not None
    ]
    none, *found = asyncio.run(clipped(LossSpec("clipped")))
    assert not any(none) and found == [flags.tolist() for flags in expected] and any(map(any, found))
    assert not any(map(any, asyncio.run(clipped(LOSS))))  # which clips nothing


def test_scores_are_nan_where_nothing_is_trained(make: Make, rows: list[Sample]) -> None:
    trainer, rows = make(0), [*rows, rows[0].replace(loss_weights=np.zeros(len(rows[0])))]
    signals = asyncio.run(trainer.score(rows, frozenset({"logprobs", "reference_logprobs"})))
    assert signals.logprobs is not None and signals.reference_logprobs is not None
    for row, own, reference in zip(rows, signals.logprobs, signals.reference_logprobs, strict=True):
        assert np.array_equal(np.isnan(own), row.loss_weights == 0)
        assert np.allclose(own, reference, equal_nan=True)  # the policy as it began
    with pytest.raises(CapabilityError, match=r"score: got the needs \['values'\]"):
        asyncio.run(trainer.score(rows, frozenset({"values"})))
    assert "values" not in trainer.capabilities.needs


def test_what_no_model_can_learn_is_refused_and_changes_nothing(make: Make, rows: list[Sample]) -> None:
    """A token outside the vocabulary would end a process with a GPU, and one NaN would be in every weight."""
    trainer, row = make(0), rows[0]
    before = logprobs(trainer, rows)
    for token in (-1, 1 << 20, 2**62):
        wrong = row.replace(tokens=np.where(row.loss_weights > 0, token, row.tokens))
        for call in (
            trainer.forward_backward([wrong], LOSS),
            trainer.score([wrong], frozenset({"logprobs"})),
        ):
            with pytest.raises(
                RecordError, match=f"sample of {row.trajectory}: got token {token}, expected 0 to"
            ):
                asyncio.run(call)
    for numbers, why in (
        ({"lr": math.nan}, "OptimParams.lr: got nan, expected 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas: got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps: got 0.0, expected more than 0"),
        ({"weight_decay": math.inf}, "weight_decay: got inf"),
        ({"max_grad_norm": math.nan}, "max_grad_norm: got nan, expected more than 0, or null"),
    ):
        asyncio.run(trainer.forward_backward(rows, LOSS))
        with pytest.raises(RecordError, match=why):
            asyncio.run(trainer.optim_step(OptimParams(**{"lr": 1e-2, **numbers})))  # type: ignore[arg-type]
    assert np.array_equal(before, logprobs(trainer, rows), equal_nan=True)
    assert update(trainer, rows)["grad_norm"] == pytest.approx(update(make(0), rows)["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("call", ["refresh_reference", "restart"])
def test_the_reference_stays_until_it_is_refreshed(make: Make, rows: list[Sample], call: str) -> None:
    trainer, needs = make(0), frozenset({"reference_logprobs"})

    def reference() -> np.ndarray:
        found = asyncio.run(trainer.score(rows, needs)).reference_logprobs
        assert found is not None
        return np.concatenate(found)

    before = reference()
    update(trainer, rows)
    assert np.array_equal(before, reference(), equal_nan=True)
    asyncio.run(getattr(trainer, call)())
    assert np.allclose(reference(), logprobs(trainer, rows), equal_nan=True)


def test_versions_count_publishes(make: Make, rows: list[Sample]) -> None:
    trainer = make(0)
    assert trainer.version == asyncio.run(trainer.snapshot()).version == 0
    update(trainer, rows)
    update(trainer, rows)
    published = asyncio.run(trainer.publish())
    assert published.version == trainer.version == 1
    assert asyncio.run(trainer.snapshot()) == published
    assert (published.folder is None) == (trainer.capabilities.publishes == "shared")


def test_what_was_saved_goes_on_bit_for_bit(make: Make, rows: list[Sample], tmp_path: Path) -> None:
    trainer = make(0)
    update(trainer, rows)
    asyncio.run(trainer.publish())
    asyncio.run(trainer.save(tmp_path))
    expected = [update(trainer, rows) for _ in range(2)]
    again = make(3)
    asyncio.run(again.load(tmp_path))
    assert again.version == 1
    assert [update(again, rows) for _ in range(2)] == expected
    with pytest.raises(CheckpointError):
        asyncio.run(make(0).load(tmp_path / "nothing"))


def test_a_restart_keeps_only_the_weights(make: Make, rows: list[Sample], tmp_path: Path) -> None:
    trainer, fresh = make(0), make(0)
    update(trainer, rows, OptimParams(lr=0.0))  # moments, but the same weights
    asyncio.run(trainer.restart())
    assert trainer.version == 0
    assert update(trainer, rows) == update(fresh, rows)


def test_an_export_is_a_plain_model(make: Make, rows: list[Sample], tmp_path: Path) -> None:
    trainer = make(0)
    update(trainer, rows)
    asyncio.run(trainer.export(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.from_numpy(rows[0].tokens)[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1] / float(rows[0].temperatures[0])
    plain = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    own = logprobs(trainer, rows[:1])[1:]
    assert np.allclose(plain[~np.isnan(own)], own[~np.isnan(own)], atol=1e-4)
    asyncio.run(trainer.close())

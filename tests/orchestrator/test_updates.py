"""Schedules on numbers worked by hand, and values of the states in which episodes were cut off."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.algorithms.by_hand import group, one_turn, recipe

from silva.config.sections import Optimizer
from silva.orchestrator.parts import Parts
from silva.orchestrator.updates import Updates, lr_at, one_update, optim_params
from silva.protocols import TrainerCapabilities
from silva.types import LossSpec, OptimParams, Sample, Signals, Trajectory


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (Optimizer(lr=0.5), [0.5, 0.5, 0.5]),
        (Optimizer(lr=1.0, warmup=3), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (Optimizer(lr=2.0, schedule="linear", min_lr_ratio=0.5), [2.0, 1.75, 1.5, 1.25, 1.0]),
        # After its warm-up, 0.5 (1 + cos x) for x = 0, a third and two thirds of pi, and pi.
        (Optimizer(lr=1.0, schedule="cosine", warmup=1), [0.5, 1.0, 0.75, 0.25, 0.0]),
    ],
)
def test_schedules(settings: Optimizer, rates: list[float]) -> None:
    found = [lr_at(update, settings, len(rates)) for update in range(len(rates))]
    assert found == pytest.approx(rates, abs=1e-12)


def test_past_the_end_the_rate_stays() -> None:
    settings = Optimizer(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert lr_at(50, settings, 10) == pytest.approx(0.1)
    assert lr_at(0, settings, 1) == 1.0


def test_every_number_of_an_update_comes_from_the_settings() -> None:
    settings = Optimizer(lr=2.0, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, max_grad_norm=None,
                         schedule="linear")  # fmt: skip
    assert optim_params(1, settings, 3) == OptimParams(1.0, (0.8, 0.9), 1e-3, 0.1, None)


class LengthCritic:
    """A value is the length of the row, and the trainer notes what it scored."""

    version = 0

    def __init__(self) -> None:
        self.scored: list[list[int]] = []

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        self.scored.append([len(s) for s in samples])
        return Signals(values=tuple(np.where(s.loss_weights > 0, float(len(s)), np.nan) for s in samples))


def played(id: str, said: int, **changes: Any) -> Trajectory:
    return dataclasses.replace(one_turn(id, said, 1.0), **changes)


@pytest.mark.parametrize(
    ("given", "scored", "returns"),
    [
        # Rows of 2 + 1 and 2 + 2 tokens. The second was cut off with 6 tokens before the next answer: 1 + 7.
        ({}, [3, 4, 7], [1, 8]),
        ({"bootstrap": False}, [3, 4], [1, 1]),
    ],
)
def test_a_cut_off_episode_goes_on_with_the_value_of_its_next_state(
    given: dict[str, Any], scored: list[int], returns: list[float]
) -> None:
    """gamma = lam = 1, so that a return is the reward and what follows."""
    cut_off = played("b", 2, stop_reason="max_turns", next_context=(1,) * 6)
    groups = [group("g", played("a", 1), cut_off)]

    async def sleep() -> None: ...

    trainer = LengthCritic()
    engine = SimpleNamespace(sleep=sleep, capabilities=SimpleNamespace(context=32))
    buffer = SimpleNamespace(work=SimpleNamespace(level=0, idle=True))
    made = recipe("ppo", whiten=None, **given)
    config = SimpleNamespace(environments=())
    parts = SimpleNamespace(recipe=made, trainer=trainer, engine=engine, buffer=buffer, config=config)
    ((_, samples),) = asyncio.run(Updates(cast(Parts, parts)).rows(groups, len(groups), {}))
    assert trainer.scored == [scored]
    assert [s.trajectory for s in samples] == ["a", "b"]
    assert [float(s.returns[-1]) for s in samples if s.returns is not None] == returns


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_service_gets_the_step_before_it_has_answered_for_the_gradient(pipelined: bool) -> None:
    said: list[str] = []

    class Trainer:
        capabilities = TrainerCapabilities(pipelined=pipelined)

        async def forward_backward(self, *given: Any) -> dict[str, float]:
            said.append("asked for a gradient")
            await asyncio.sleep(0.01)
            said.append("gradient")
            return {"loss": 1.0}

        async def optim_step(self, *given: Any) -> dict[str, float]:
            said.append("asked for a step")
            await asyncio.sleep(0.02)
            said.append("step")
            return {"lr": 0.5}

    found = asyncio.run(one_update(cast(Any, Trainer()), [], LossSpec("reinforce"), OptimParams(lr=0.5)))
    assert found == {"loss": 1.0, "lr": 0.5}
    order = ["asked for a gradient", "gradient", "asked for a step", "step"]
    assert said == ([order[0], order[2], order[1], order[3]] if pipelined else order)

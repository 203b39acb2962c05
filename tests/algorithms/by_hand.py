"""Turns, trajectories, groups and recipes made by hand, and the advantages that a recipe gives them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from silva.algorithms import ALGORITHMS
from silva.algorithms.compose import with_advantages
from silva.rollouts.samples import to_samples
from silva.types import Failure, Group, Sample, Segment, Signals, StopReason, Task, Trajectory, Turn


def rewarded(
    key: str,
    rewards: Sequence[float],
    shaped: Sequence[float] | None = None,
    failures: Sequence[Failure | None] | None = None,
) -> Group:
    """A group of trajectories without turns."""
    nothing = [None] * len(rewards)
    given = zip(rewards, shaped or [0.0] * len(rewards), failures or nothing, strict=True)
    return group(
        key,
        *(
            Trajectory(
                f"{key}/{i}", (), "error" if failure else "terminated", rewards={"success": reward},
                shaped={"format": extra}, failure=failure, error="no answer" if failure else None,
            )
            for i, (reward, extra, failure) in enumerate(given)
        ),
        environment="e",
    )  # fmt: skip


def row_of(trajectory: str, weights: Sequence[float]) -> Sample:
    """A sample of a trajectory, with loss weights."""
    length = len(weights)
    return Sample(
        tokens=np.arange(length),
        loss_weights=np.array(weights, dtype=np.float32),
        logprobs=np.full(length, -1.0, dtype=np.float32),
        temperatures=np.ones(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int64),
        trajectory=trajectory,
        group=trajectory.partition("/")[0],
    )


def recipe(name: str, **given: Any) -> Any:
    module, _, attribute = ALGORITHMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)(**given)


def turn(
    id: str, shown: int, said: int, reward: float = 0.0, *, fresh: bool = False, shaped: float = 0.0
) -> Turn:
    policy = Segment("policy", (1,) * said, logprobs=(-1.0,) * said, versions=(0,) * said)
    segments = (Segment("environment", (0,) * shown), policy)
    return Turn(id, segments, rewards={"score": reward}, shaped={"format": shaped}, fresh=fresh)


def trajectory(id: str, turns: Sequence[Turn], *, stop: StopReason = "terminated") -> Trajectory:
    """Rewards summed over turns, as an episode does."""
    turns = (dataclasses.replace(turns[0], fresh=True), *turns[1:])
    rewards = sum(t.rewards["score"] for t in turns)
    shaped = sum(t.shaped["format"] for t in turns)
    return Trajectory(id, turns, stop, rewards={"score": rewards}, shaped={"format": shaped})


def group(key: str, *trajectories: Trajectory, environment: str = "maze") -> Group:
    return Group(key, Task(key, environment, 0, {}), trajectories)


def one_turn(id: str, said: int, reward: float, penalty: float = 0.0) -> Trajectory:
    return trajectory(id, [turn(f"{id}/0", 2, said, reward, shaped=penalty)])


def failed(id: str, reward: float = 99.0) -> Trajectory:
    return dataclasses.replace(one_turn(id, 7, reward), failure="mask", error="late")


def batch(*rewards: float, said: int = 1, key: str = "g") -> Group:
    return group(key, *(one_turn(f"{key}/{i}", said, reward) for i, reward in enumerate(rewards)))


def advantages(samples: Sequence[Sample]) -> list[list[float]]:
    return [s.advantages.tolist() for s in samples if s.advantages is not None]


def trained_advantages(samples: Sequence[Sample]) -> list[list[float]]:
    return [s.advantages[s.loss_weights > 0].tolist() for s in samples if s.advantages is not None]


def assigned(made: Any, *groups: Group, signals: Signals = Signals(), **state: float) -> list[list[float]]:
    """The advantages of the trained tokens of each row."""
    return trained_advantages(with_advantages(made, to_samples(groups), groups, signals, state))


def of_trained(samples: Sequence[Sample], *rows: Sequence[float]) -> tuple[np.ndarray, ...]:
    """[T] per sample: the numbers on its trained tokens, NaN elsewhere, as `Trainer.score` gives them."""
    found = tuple(np.full(len(sample), np.nan) for sample in samples)
    for array, sample, row in zip(found, samples, rows, strict=True):
        array[sample.loss_weights > 0] = row
    return found

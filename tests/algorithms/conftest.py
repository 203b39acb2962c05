"""Small trajectories, groups and samples made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from silva.types import Failure, Group, Sample, Task, Trajectory


@pytest.fixture
def make_group() -> Callable[..., Group]:
    def make(
        key: str,
        rewards: Sequence[float],
        shaped: Sequence[float] | None = None,
        failures: Sequence[Failure | None] | None = None,
    ) -> Group:
        trajectories = tuple(
            Trajectory(
                id=f"{key}/{i}",
                turns=(),
                stop_reason="error" if failure else "terminated",
                rewards={"success": reward},
                shaped={"format": extra},
                failure=failure,
                error="the tool did not answer" if failure else None,
            )
            for i, (reward, extra, failure) in enumerate(
                zip(rewards, shaped or [0.0] * len(rewards), failures or [None] * len(rewards), strict=True)
            )
        )
        return Group(key=key, task=Task(id=key, environment="e", seed=0, data={}), trajectories=trajectories)

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(trajectory: str, weights: Sequence[float]) -> Sample:
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

    return make

"""Values of the states in which episodes were cut off: from the trainer's critic to the advantages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.algorithms.by_hand import group, one_turn, recipe

from silva.orchestrator.parts import Parts
from silva.orchestrator.updates import Updates
from silva.types import Sample, Signals, Trajectory


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
    parts = SimpleNamespace(recipe=made, trainer=trainer, engine=engine, buffer=buffer)
    ((_, samples),) = asyncio.run(Updates(cast(Parts, parts)).rows(groups, len(groups), {}))
    assert trainer.scored == [scored]
    assert [s.trajectory for s in samples] == ["a", "b"]
    assert [float(s.returns[-1]) for s in samples if s.returns is not None] == returns

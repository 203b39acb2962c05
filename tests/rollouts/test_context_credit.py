"""Credit of episodes that a rewritten context spread over several rows: worked by hand, the same in any mode.

Two episodes of three turns, which earn 1, 0, 2 and 0, 0, 1. Each reply is two tokens: a letter and the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from silva.algorithms.aggregation import normalise
from silva.algorithms.assign import assign
from silva.algorithms.credit import assign_gae, assign_turns, hard
from silva.config.sections import (
    ContextSettings,
    EpisodeLimits,
    FullContext,
    HideObservations,
    LastTurns,
    SingleTurn,
)
from silva.models.trie import build
from silva.rollouts.episode import Episode
from silva.rollouts.samples import to_samples
from silva.types import Group, Message, Observation, Sample, Step, Task, Trajectory

MODES: list[tuple[ContextSettings, int]] = [  # with the rows of an episode
    (FullContext(), 1),
    (HideObservations(), 2),
    (LastTurns(turns=1), 2),
    (LastTurns(turns=0), 3),
    (SingleTurn(), 3),
    (FullContext(overflow="drop_oldest"), 2),
]
each_mode = pytest.mark.parametrize(("context", "rows"), MODES, ids=lambda value: getattr(value, "type", ""))


@dataclass
class Pays:
    """Says go on, and pays so much for each turn."""

    payments: Sequence[float]
    taken: int = 0

    async def reset(self) -> Observation:
        return Observation((Message("user", "go"),))

    async def step(self, message: Message) -> Step:
        self.taken += 1
        last = self.taken == len(self.payments)
        shown = Observation((Message("user", f"go {self.taken}"),))
        return Step(shown, {"pay": self.payments[self.taken - 1]}, terminated=last)

    async def fork(self, seed: int) -> Pays:
        return replace(self)

    async def close(self) -> None:
        pass


TASK = Task("t", "pays", 0, {})


@pytest.fixture
def start(world, renderer, policy):
    """`start(context, payments, id)`: an episode that says "y", to be advanced."""
    actor = policy(ScriptedEngine(lambda tokens, params: renderer.encode_reply("y")))
    # The task has 5 tokens with the opening of the reply, a turn 2 + 7: with two turns a reply has no room.
    limits = EpisodeLimits(max_turn_tokens=2, max_episode_tokens=24)

    def make(context: ContextSettings, payments: Sequence[float], id: str) -> Episode:
        drops = context.overflow == "drop_oldest"
        return Episode(TASK, world(lambda task: Pays(payments)), actor, renderer,
                       limits if drops else EpisodeLimits(), id, 1, context=context)  # fmt: skip

    return make


@pytest.fixture
def played(start):
    """`played(context)`: the group of both episodes, and its samples."""

    async def go(context: ContextSettings) -> Group:
        episodes = [start(context, (1.0, 0.0, 2.0), "a"), start(context, (0.0, 0.0, 1.0), "b")]
        for episode in episodes:
            await episode.start()
            while not episode.over:
                await episode.advance()
        return Group("g", TASK, tuple(episode.trajectory() for episode in episodes))

    def make(context: ContextSettings) -> tuple[Group, list[Sample]]:
        group = asyncio.run(go(context))
        return group, to_samples([group])

    return make


def of_trained(samples: Sequence[Sample], name: str = "advantages") -> dict[str, list[float]]:
    """By trajectory, the numbers of its trained tokens in the order of its rows."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        values: Any = getattr(sample, name)
        found.setdefault(sample.trajectory, []).extend(values[sample.loss_weights > 0].tolist())
    return found


@each_mode
def test_each_row_gets_the_advantage_of_its_trajectory(played, context, rows: int) -> None:
    """Rewards 3 and 1, mean 2."""
    group, samples = played(context)
    assert [s.trajectory for s in samples] == ["a"] * rows + ["b"] * rows
    assert of_trained(assign(samples, [group], "mean")) == {"a": [1] * 6, "b": [-1] * 6}


@each_mode
def test_each_turn_gets_its_own_credit_in_whatever_row_it_is(played, context, rows: int) -> None:
    """gamma 0.5. Returns of a: 1.5, 1, 2; of b: 0.25, 0.5, 1; means 0.875, 0.75, 1.5."""
    group, samples = played(context)
    found = of_trained(assign_turns(samples, [group], "mean", gamma=0.5))
    expected = [0.625, 0.625, 0.25, 0.25, 0.5, 0.5]
    assert found == {"a": expected, "b": [-value for value in expected]}


@each_mode
def test_gae_goes_on_from_row_to_row(played, context, rows: int) -> None:
    """gamma 1, lam 0.5. Values of a: 1 2, 4 0, 2 1; rewards 1 and 2 on the second and the last token.

    deltas:     2 - 1 = 1; 1 + 4 - 2 = 3; 0 - 4 = -4; 2 - 0 = 2; 1 - 2 = -1; 2 - 1 = 1
    advantages: 1; -1 + 0.5 = -0.5; 2 - 0.25 = 1.75; -4 + 0.875 = -3.125; 3 - 1.5625 = 1.4375;
                1 + 0.71875 = 1.71875
    b has values 0 and the reward 1 at its end: 1, 0.5, 0.25, ... backwards.
    """
    group, samples = played(context)
    values = iter([1, 2, 4, 0, 2, 1] + [0] * 6)
    scored = []
    for sample in samples:
        own = np.full(len(sample), np.nan)
        own[sample.loss_weights > 0] = [next(values) for _ in range(int(sample.loss_weights.sum()))]
        scored.append(sample.replace(values=own))
    found = assign_gae(scored, [group], gamma=1.0, lam=0.5)
    assert of_trained(found)["a"] == [1.71875, 1.4375, -3.125, 1.75, -0.5, 1]
    assert of_trained(found)["b"] == [0.03125, 0.0625, 0.125, 0.25, 0.5, 1]


@each_mode
def test_an_episode_weighs_the_same_however_many_rows_it_has(played, context, rows: int) -> None:
    """Against an episode of one row with two tokens: 1/2 each, so 1/12 and 1/4 a token."""
    own = [s for s in played(context)[1] if s.trajectory == "a"]
    short = played(LastTurns(turns=0))[1][0].replace(trajectory="c")
    found = of_trained(normalise([*own, short], "sequence_mean_token_mean"), "loss_weights")
    assert found == {"a": pytest.approx([1 / 12] * 6), "c": pytest.approx([1 / 4] * 2)}


@each_mode
def test_forks_share_rows_and_their_credit(start, context, rows: int) -> None:
    """Both earn 1 in the turn that they share, then 0, 2 and 0, 1: 0.5 and -0.5, and 0 where shared."""

    async def go() -> tuple[Trajectory, ...]:
        episode = start(context, (1.0, 0.0, 2.0), "a")
        await episode.start()
        await episode.advance()
        twin = await episode.fork(id="b", seed=2)
        twin.environment.payments = (1.0, 0.0, 1.0)
        for one in (episode, twin):
            while not one.over:
                await one.advance()
        return episode.trajectory(), twin.trajectory()

    group = Group("g", TASK, asyncio.run(go()))
    samples = to_samples([group])
    assert [s.trajectory for s in samples] == ["a"] * rows + ["b"] * rows
    found = of_trained(hard(assign(samples, [group], "mean")))
    assert found == {"a": [0, 0] + [0.5] * 4, "b": [0, 0] + [-0.5] * 4}
    # Both say the same here, so all of the rows are computed once.
    tokens = [s.tokens for s in samples]
    assert len(build(tokens, least=1)) == len(build(tokens[:rows], least=1))

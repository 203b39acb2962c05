"""Groups of independent episodes: order, seeds, second attempts, nobody waits for the slow one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from silva.ports import derive
from silva.protocols import Work
from silva.rollouts.linear import Linear
from silva.rollouts.settings import LinearRolloutSettings
from silva.types import Group, Message, Step


@pytest.fixture
def run(task, renderer):
    """`run(world, engine, group_size=3)` -> the group."""

    def go(
        world, engine, *, seed=7, key="0/k", on_turn=lambda episode, waiting_for: None, **values: Any
    ) -> Group:
        linear = Linear(LinearRolloutSettings(**values), engine, renderer, seed=seed, on_turn=on_turn)

        async def collect() -> list[Group]:
            return [group async for group in linear.run(Work(key, task, world, 1.0))]

        (group,) = asyncio.run(collect())
        return group

    return go


def test_a_task_becomes_one_group_in_the_order_asked_for(run, world, talk, speaker, task) -> None:
    engine = speaker("yes")
    group = run(world(talk), engine, group_size=4)
    assert (group.key, group.task) == ("0/k", task)
    assert [t.id for t in group.trajectories] == ["0/k/0", "0/k/1", "0/k/2", "0/k/3"]
    assert len({params.seed for _, params, _ in engine.requests}) == 4 * 3
    assert len([prompt for prompt, _, _ in engine.requests if prompt == engine.requests[0][0]]) == 4


def test_luck_is_of_the_run_the_group_and_the_episode(run, world, talk, speaker, task) -> None:
    """Not of the task alone: a second pass over the tasks, and another seed, meet other luck."""

    def luck(seed: int, key: str) -> list[int]:
        places = world(talk)
        run(places, speaker("yes"), seed=seed, key=key, group_size=3)
        assert all(replace(place.task, seed=task.seed) == task for place in places.made)
        return [place.task.seed for place in places.made]

    assert luck(7, "s1g0") == luck(7, "s1g0")
    draws = [*luck(7, "s1g0"), *luck(7, "s2g0"), *luck(7, "s1g1"), *luck(8, "s1g0")]
    assert len(set(draws)) == 12


def test_an_episode_without_a_result_is_tried_again_with_other_numbers(run, world, talk, speaker) -> None:
    fails = [True, True, False]

    class Flaky(talk):
        async def step(self, message: Message) -> Step:
            if self.taken == 1 and fails.pop(0):
                raise ConnectionError("lost")
            return await super().step(message)

    places, engine = world(Flaky), speaker("yes")
    (trajectory,) = run(places, engine, group_size=1, redo=2).trajectories
    assert trajectory.failure is None and trajectory.raw_reward == 3.0
    assert len(places.made) == 3 and [place.closed for place in places.made] == [1] * 3
    assert len({place.task.seed for place in places.made}) == 3
    seeds = [params.seed for _, params, _ in engine.requests]
    assert len(seeds) == len(set(seeds)) == 2 + 2 + 3


@pytest.mark.parametrize("redo", [0, 2])
def test_after_the_last_attempt_the_failure_stays_in_its_place(run, world, talk, speaker, redo: int) -> None:
    class Broken(talk):
        async def reset(self):
            raise ConnectionError("lost")

    luck = {derive(derive(7, "0/k", 1, attempt), "luck") for attempt in range(redo + 1)}  # of episode 1
    places = world(lambda task: (Broken if task.seed in luck else talk)(task))
    group = run(places, speaker("yes"), group_size=3, redo=redo)
    assert [t.failure for t in group.trajectories] == [None, "redo", None]
    assert group.scored == (group.trajectories[0], group.trajectories[2])
    assert len(places.made) == 3 + redo


def test_a_result_that_must_not_be_used_is_not_tried_again(run, world, talk, speaker) -> None:
    class Rich(talk):
        async def step(self, message: Message) -> Step:
            return replace(await super().step(message), rewards={"talk": float("inf")})

    places = world(Rich)
    group = run(places, speaker("yes"), group_size=2, redo=3)
    assert [t.failure for t in group.trajectories] == ["mask", "mask"] and len(places.made) == 2


def test_a_slow_environment_does_not_hold_the_others_back(run, world, talk, speaker) -> None:
    """The first episode's environment returns only when all others have ended: it would wait for ever."""
    ended: list[str] = []
    all_others = asyncio.Event()

    class Slow(talk):
        async def step(self, message: Message) -> Step:
            if message.id.startswith("0/k/0/"):
                await all_others.wait()
            return await super().step(message)

    def on_turn(episode: str, waiting_for: str | None) -> None:
        if waiting_for is None:
            ended.append(episode)
        if len(ended) == 7:
            all_others.set()

    engine = speaker("yes")
    group = run(world(Slow), engine, group_size=8, on_turn=on_turn, limits={"timeout": 30.0})
    assert ended[-1] == "0/k/0" and len(ended) == 8
    assert [t.stop_reason for t in group.trajectories] == ["terminated"] * 8
    assert len(engine.requests) == 24
    assert {session for _, _, session in engine.requests[-2:]} == {"0/k/0"}


def test_whom_an_episode_waits_for_is_told(run, world, talk, speaker) -> None:
    told: list[tuple[str, str | None]] = []
    run(world(talk), speaker("yes"), group_size=1, on_turn=lambda *news: told.append(news))
    assert [who for _, who in told] == ["talk", *["engine", "talk"] * 3, None]
    assert {episode for episode, _ in told} == {"0/k/0"}

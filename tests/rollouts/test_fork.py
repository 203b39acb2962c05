"""Forks of episodes: the same from there on with the same seed, noise of their own with another.

Forks of every world: tests/contracts/test_environments.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from silva.actors.script import Script
from silva.config.sections import EpisodeLimits, FullContext, HideObservations, LastTurns, SingleTurn
from silva.environments.worlds.calculator import Calculator
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.errors import CapabilityError
from silva.rollouts.episode import Episode, play
from silva.types import Turn

REPLIES = {
    "frozen_lake": ["<think>x</think><answer>Right</answer>", "<answer>Down || Right</answer>", "none"],
    "calculator": [
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7"}}\n</tool_call>',
        "<tool_call>{bad</tool_call>",
        "19",
    ],
}
REWRITES: list[dict[str, Any]] = [
    {"context": FullContext()},
    {"context": FullContext(strip_thoughts=True)},
    {"context": LastTurns(turns=1)},
    {"context": SingleTurn()},
    {"context": HideObservations()},
    {"context": FullContext(overflow="drop_oldest"), "limits": EpisodeLimits(max_episode_tokens=900)},
]
SLIPPERY = FrozenLake(slippery=True, success_rate=0.4, eval_size=8)
CASES = [("frozen_lake", SLIPPERY, {"context": FullContext()})] + [
    (name, settings, rewrite)
    for rewrite in REWRITES
    for name, settings in (("frozen_lake", FrozenLake(eval_size=8)), ("calculator", Calculator(chain=2)))
]


@pytest.fixture
def open_episode(renderer, policy):
    """`open_episode(name, settings)`: an episode that is not started; its replies depend on the seed."""

    def make(name: str, settings: Any, number: int = 0, **changes: Any) -> Episode:
        encoded = [tuple(renderer.encode_reply(text)) for text in REPLIES[name]]
        engine = ScriptedEngine(lambda context, params: encoded[params.seed % len(encoded)])
        tasks = settings.taskset()
        arguments: dict[str, Any] = dict(
            task=tasks.tasks("train")[number], taskset=tasks, actor=policy(engine), renderer=renderer,
            limits=EpisodeLimits(), id="a", seed=number,
        )  # fmt: skip
        return Episode(**(arguments | changes))

    return make


async def finish(episode: Episode) -> Episode:
    while not episode.over:
        await episode.advance()
    await episode.close()
    return episode


def plain(turns: tuple[Turn, ...]) -> list[Turn]:
    """Without the ids, which name the episode."""
    return [replace(t, id="", messages=tuple(replace(m, id="") for m in t.messages)) for t in turns]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "how"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fork_with_the_same_seed_goes_on_as_the_episode_and_changes_nothing_in_it(
    open_episode, name: str, settings: Any, how: dict[str, Any]
) -> None:
    async def go(number: int, turns: int) -> int:
        alone = open_episode(name, settings, number, **how)
        await alone.start()
        await finish(alone)
        episode = open_episode(name, settings, number, **how)
        await episode.start()
        while len(episode.state.turns) < turns and not episode.over:
            await episode.advance()
        if episode.over:
            return 0
        before = episode.state
        same = await episode.fork(id="same", seed=number)
        other = await episode.fork(id="other", seed=1000 + number)
        assert same.state is before and episode.state is before  # nothing is copied
        await finish(other)
        await finish(same)
        assert episode.state is before
        await finish(episode)
        a, b, c = alone.trajectory(), episode.trajectory(), same.trajectory()
        assert a == b
        assert plain(c.turns) == plain(a.turns)
        assert all(mine is theirs for mine, theirs in zip(c.turns[:turns], b.turns[:turns], strict=True))
        assert (c.rewards, c.shaped, c.metrics, c.stop_reason, c.failure, c.next_context) == (
            a.rewards, a.shaped, a.metrics, a.stop_reason, a.failure, a.next_context
        )  # fmt: skip
        assert [m.content for m in c.observation.messages] == [m.content for m in a.observation.messages]
        assert (c.id, c.parent, c.fork_turn, c.episode) == ("same", "a", turns, "a")
        assert [turn.id for turn in c.turns[turns:]] == [f"same/{i}" for i in range(turns, len(c.turns))]
        return int(plain(other.trajectory().turns) != plain(a.turns))

    differ = [asyncio.run(go(number, turns)) for number in range(6) for turns in (0, 1, 2)]
    assert sum(differ) >= 3  # another seed answers differently


def test_another_seed_gives_a_fork_its_own_noise(open_episode, renderer) -> None:
    """The same moves on ice that is all slip: only the noise of the environment differs."""
    settings = FrozenLake(slippery=True, success_rate=0.0, size=8, max_actions=30, max_actions_per_turn=1)
    engine = ScriptedEngine(lambda context, params: renderer.encode_reply("<answer>Down</answer>"))

    async def walk() -> list[list[Any]]:
        actor = replace(open_episode("frozen_lake", settings).actor, engine=engine)
        episode = open_episode("frozen_lake", settings, actor=actor)
        await episode.start()
        forks = [await episode.fork(id=f"f{seed}", seed=seed) for seed in (0, 1, 1, 2, 3, 4, 5)]
        ends = [await finish(fork) for fork in (*forks, episode)]
        return [[m.content for turn in end.state.turns for m in turn.messages] for end in ends]

    same, one, again, *others, alone = asyncio.run(walk())
    assert same == alone and one == again
    assert len({tuple(words) for words in (alone, one, *others)}) > 3


def test_a_fork_of_a_fork_and_an_expert_that_takes_over(open_episode, renderer) -> None:
    settings = Calculator(eval_size=8)

    async def go() -> tuple[Episode, Episode]:
        episode = open_episode("calculator", settings)
        await episode.start()
        await episode.advance()
        first = await episode.fork(id="b", seed=1)
        first.actor = Script(renderer)
        await first.advance()
        second = await first.fork(id="c", seed=2)
        ends = await asyncio.gather(finish(first), finish(second))
        await episode.close()
        return ends[0], ends[1]

    first, second = (episode.trajectory() for episode in asyncio.run(go()))
    assert (second.parent, second.fork_turn, second.episode) == ("b", 2, "a")
    assert [turn.id for turn in second.turns[:2]] == ["a/0", "b/1"]
    assert second.raw_reward == first.raw_reward == 1.0  # the expert needs no luck
    assert second.turns[-1].segments[-1].source == "expert"


def test_a_world_that_cannot_be_forked_is_named(task, world, talk, renderer, policy, speaker, limits) -> None:
    async def go() -> None:
        episode = Episode(task, world(talk), policy(speaker("yes")), renderer, limits(), "a", 1)
        with pytest.raises(RuntimeError, match=r"episode a: fork\(\) of an episode that is not started"):
            await episode.fork(id="b", seed=2)
        await episode.start()
        with pytest.raises(
            CapabilityError,
            match=r"environment 'talk' cannot be forked: Talk needs .*fork\(self.*BaseEnvironment",
        ):
            await episode.fork(id="b", seed=2)
        await episode.close()
        with pytest.raises(RuntimeError, match=r"episode a: fork\(\) of an episode that is closed"):
            await episode.fork(id="b", seed=2)

    asyncio.run(go())


def test_a_fork_that_fails_has_no_result_and_its_parent_goes_on(
    task, world, talk, renderer, policy, speaker, limits
) -> None:
    class Brittle(talk):
        async def fork(self, seed: int) -> Any:
            raise KeyError("state")

    async def go() -> tuple[Episode, Episode]:
        episode = Episode(task, world(Brittle), policy(speaker("yes")), renderer, limits(), "a", 1)
        await episode.start()
        await episode.advance()
        twin = await episode.fork(id="b", seed=2)
        return await finish(episode), await finish(twin)

    parent, twin = (episode.trajectory() for episode in asyncio.run(go()))
    assert (parent.failure, len(parent.turns), parent.stop_reason) == (None, 3, "terminated")
    assert (twin.failure, twin.stop_reason, len(twin.turns)) == ("redo", "error", 1)
    assert twin.error.startswith("fork: KeyError: 'state' (tests/rollouts/test_fork.py:")


def test_a_fork_has_the_time_that_its_parent_has_left(
    task, world, talk, renderer, policy, speaker, limits
) -> None:
    """Each step takes 40 s by the clock of the event loop; 100 s are enough for two."""

    class Slow(talk):
        async def step(self, message):
            loop = asyncio.get_running_loop()
            real = loop.time
            loop.time = lambda: real() + 40  # type: ignore[method-assign]
            for _ in range(3):
                await asyncio.sleep(0)
            return await super().step(message)

        async def fork(self, seed):
            return replace(self, heard=list(self.heard))

    async def go() -> list[Episode]:
        episode = Episode(task, world(Slow), policy(speaker("yes")), renderer, limits(timeout=100.0), "a", 1)
        await episode.start()
        await episode.advance()
        twin = await episode.fork(id="b", seed=2)
        return [await finish(episode), await finish(twin)]

    for end in asyncio.run(go()):
        assert (end.trajectory().stop_reason, len(end.state.turns)) == ("timeout", 2)


def test_an_episode_can_be_driven_by_hand(task, world, talk, renderer, policy, speaker, limits) -> None:
    """`play` is start, advance until over, close; nothing else."""

    async def go() -> Episode:
        episode = Episode(task, world(talk), policy(speaker("yes", "no")), renderer, limits(), "a", 1)
        await episode.start()
        with pytest.raises(RuntimeError, match="episode a is not over"):
            episode.trajectory()
        return await finish(episode)

    whole = asyncio.run(
        play(task, world(talk), policy(speaker("yes", "no")), renderer, limits(), id="a", seed=1)
    )
    assert asyncio.run(go()).trajectory() == whole

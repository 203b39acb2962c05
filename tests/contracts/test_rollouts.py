"""What every rollout strategy does. A new one adds itself to `STRATEGIES`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tests.contracts.doubles import Failing, Slow

from silva.config.sections import EpisodeLimits, LastTurns
from silva.environments.worlds.guess_number import GuessNumber
from silva.errors import EngineError
from silva.models.tiny import tiny_tokenizer
from silva.protocols import Engine, Rollout, TaskSet, Work
from silva.rendering.renderer import Renderer
from silva.rollouts.branching import Branching
from silva.rollouts.linear import Linear
from silva.rollouts.settings import (
    BranchingRolloutSettings,
    LinearRolloutSettings,
    ThoughtsRolloutSettings,
)
from silva.rollouts.thoughts import Thoughts
from silva.types import Group, SamplingParams, Task

RENDERER = Renderer(tiny_tokenizer())
Make = Callable[..., Rollout]  # engine, seed of the run, keys of its settings


def linear(engine: Engine, seed: int, **more: Any) -> Rollout:
    settings = LinearRolloutSettings(group_size=3, limits=EpisodeLimits(max_turns=3, timeout=60.0), **more)
    return Linear(settings, engine, RENDERER, seed=seed)


def branching(engine: Engine, seed: int, **more: Any) -> Rollout:
    settings = BranchingRolloutSettings(
        group_size=5, initial_rollouts=2, branch_probability=0.9, entropy_weight=0.0,
        limits=EpisodeLimits(max_turns=3, timeout=60.0), **more,
    )  # fmt: skip
    return Branching(settings, engine, RENDERER, seed=seed)


def thoughts(engine: Engine, seed: int, **more: Any) -> Rollout:
    limits = EpisodeLimits(max_turns=3, max_turn_tokens=200, timeout=60.0)
    settings = ThoughtsRolloutSettings(group_size=3, limits=limits, **more)
    return Thoughts(settings, engine, RENDERER, seed=seed)


def whole_thoughts(engine: Engine, seed: int, **more: Any) -> Rollout:
    return thoughts(engine, seed, commit="own", **more)


STRATEGIES: dict[str, Make] = {
    "linear": linear,
    "branching": branching,
    "thoughts": thoughts,
    "thoughts of whole episodes": whole_thoughts,
}


@pytest.fixture(params=STRATEGIES)
def make(request: pytest.FixtureRequest) -> Make:
    return STRATEGIES[request.param]


def guesses() -> ScriptedEngine:
    """Says a number that depends on the request's seed."""

    def reply(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        return RENDERER.encode_reply(f"{params.seed % 7 + 1}")

    return ScriptedEngine(reply)


class Worlds:
    """Guess a number, from environments that `change` may replace."""

    def __init__(self, change: Callable[[Any], Any] = lambda environment: environment) -> None:
        self.inner, self.change = GuessNumber(train_size=8, eval_size=4).taskset(), change
        self.made: list[Closed] = []

    def tasks(self, split: Any) -> Sequence[Task]:
        return self.inner.tasks(split)

    def environment(self, task: Task) -> Any:
        return Closed(self.change(self.inner.environment(task)), self.made)


class Stuck:
    """Never resets."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def reset(self) -> None:
        await asyncio.Event().wait()


class Closed:
    """Notes how often an environment is closed."""

    def __init__(self, inner: Any, made: list[Closed]) -> None:
        self._inner, self._made, self.closed = inner, made, 0
        made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def fork(self, seed: int) -> Closed:
        return Closed(await self._inner.fork(seed), self._made)

    async def close(self) -> None:
        self.closed += 1
        await self._inner.close()


def played(rollout: Rollout, worlds: TaskSet, id: str = "s1g0", temperature: float = 1.0) -> list[Group]:
    async def run() -> list[Group]:
        work = Work(id, worlds.tasks("train")[0], worlds, temperature)
        return [group async for group in rollout.run(work)]

    return asyncio.run(run())


def test_groups_are_of_the_task_and_named_after_the_work(make: Make) -> None:
    worlds = Worlds()
    groups = played(make(guesses(), 0), worlds, "s4g7")
    assert groups and all(group.task == worlds.tasks("train")[0] for group in groups)
    names = [*(g.key for g in groups), *(t.id for g in groups for t in g.trajectories)]
    assert all(name.startswith("s4g7") for name in names) and len(set(names)) == len(names)
    assert all(t.failure is None and t.turns for g in groups for t in g.trajectories)


def test_the_run_s_seed_and_the_work_decide_what_is_played(make: Make) -> None:
    first = played(make(guesses(), 5), Worlds())
    assert first == played(make(guesses(), 5), Worlds())
    others = [played(make(guesses(), 6), Worlds()), played(make(guesses(), 5), Worlds(), "s1g1")]
    tokens = [[t.turns for g in groups for t in g.trajectories] for groups in (first, *others)]
    assert tokens[0] not in tokens[1:]


def test_the_work_says_at_which_temperature_it_is_played(make: Make) -> None:
    engine = guesses()
    groups = played(make(engine, 0), Worlds(), temperature=0.25)
    assert {params.temperature for _, params, _ in engine.requests} == {0.25}
    turns = [turn for g in groups for t in g.trajectories for turn in t.turns]
    assert {s.temperature for turn in turns for s in turn.reply if s.source == "policy"} <= {0.25}


@pytest.mark.parametrize(("turns", "replies"), [(0, {0}), (1, {0, 1}), (9, {0, 1, 2})])
def test_the_model_is_shown_what_the_settings_say(make: Make, turns: int, replies: set[int]) -> None:
    """How many earlier replies a prompt holds, over all prompts."""
    engine, decode = guesses(), tiny_tokenizer().decode
    groups = played(make(engine, 5, context=LastTurns(turns=turns)), Worlds())
    prompts = [decode(tokens) for tokens, _, _ in engine.requests]
    assert {prompt.count(RENDERER.opening) - 1 for prompt in prompts} == replies
    turns = max(len(t.turns) for g in groups for t in g.trajectories)
    assert max(turns, len(groups)) == 3, "all turns, or a group for each state"


def test_slow_parts_change_nothing(make: Make) -> None:
    plain = played(make(guesses(), 5), Worlds())
    assert played(make(Slow(guesses()), 5), Worlds(Slow)) == plain  # type: ignore[arg-type]


def test_every_environment_is_closed_once(make: Make) -> None:
    worlds = Worlds()
    played(make(guesses(), 0), worlds)
    assert worlds.made and {environment.closed for environment in worlds.made} == {1}


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_fault_of_an_environment_is_an_episode_without_a_result(make: Make, method: str) -> None:
    worlds = Worlds(lambda environment: Failing(environment, method, 99))
    trajectories = [t for g in played(make(guesses(), 0), worlds) for t in g.trajectories]
    assert trajectories and {t.failure for t in trajectories} == {"redo"}
    assert all("the connection was cut" in (t.error or "") for t in trajectories)
    assert {environment.closed for environment in worlds.made} == {1}


def test_a_fault_of_the_engine_ends_the_work(make: Make) -> None:
    worlds = Worlds()
    with pytest.raises(EngineError, match="the connection was cut"):
        played(make(Failing(guesses(), "sample", 99), 0), worlds)  # type: ignore[arg-type]
    assert {environment.closed for environment in worlds.made} == {1}


def test_cancelled_work_closes_its_environments(make: Make) -> None:
    worlds = Worlds(Stuck)

    async def run() -> None:
        rollout, task = make(guesses(), 0), worlds.tasks("train")[0]

        async def work() -> list[Group]:
            return [group async for group in rollout.run(Work("s1g0", task, worlds, 1.0))]

        running = asyncio.create_task(work())
        while not worlds.made:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(run())
    assert {environment.closed for environment in worlds.made} == {1}

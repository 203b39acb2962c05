"""A world that does as it is told, and an engine that answers without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tests.coroutines import in_loop

from silva.actors.policy import Policy
from silva.config.sections import ContextSettings, EpisodeLimits, Sampling
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rollouts.context import FULL
from silva.rollouts.episode import play
from silva.types import Message, Observation, SamplingParams, Step, Task, Trajectory

pytest_pyfunc_call = in_loop(asyncio.run)


@dataclass
class Talk:
    """An episode of `turns` turns; each earns 1 and, shaped, -0.25."""

    task: Task
    turns: int = 3
    taken: int = 0
    closed: int = 0
    heard: list[Message] = field(default_factory=list)

    async def reset(self) -> Observation:
        return self.say(f"hello {self.task.id}")

    async def step(self, message: Message) -> Step:
        self.heard.append(message)
        self.taken += 1
        return Step(
            self.say(f"go on {self.taken}"),
            rewards={"talk": 1.0},
            shaped={"length": -0.25},
            terminated=self.taken == self.turns,
            metrics={"turn": float(self.taken)} if self.taken > 1 else {},
        )

    async def close(self) -> None:
        self.closed += 1

    def say(self, text: str) -> Observation:
        return Observation((Message("user", text, id=f"e{self.taken}"),))


class World:
    """A task set of one kind of environment; keeps every one it made."""

    def __init__(self, make: Callable[[Task], Any]) -> None:
        self.make = make
        self.made: list[Any] = []

    def tasks(self, split: str) -> Sequence[Task]:
        return [a_task(i) for i in range(4)]

    def environment(self, task: Task) -> Any:
        self.made.append(self.make(task))
        return self.made[-1]


def a_task(number: int = 0) -> Task:
    return Task(id=f"t{number}", environment="talk", seed=number, data={"n": number}, answer=None)


@pytest.fixture
def task() -> Task:
    return a_task()


@pytest.fixture
def talk() -> type[Talk]:
    return Talk


@pytest.fixture
def world() -> type[World]:
    return World


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer())


@pytest.fixture
def speaker(renderer: Renderer) -> Callable[..., ScriptedEngine]:
    """`speaker("a", "b")`: answers "a" in the first turn of a dialogue, "b" in the second and all later."""

    def make(*replies: str, renderer: Renderer = renderer, **settings: Any) -> ScriptedEngine:
        mark = tiny_tokenizer().convert_tokens_to_ids("<|assistant|>")

        def reply(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            turn = list(tokens).count(mark) - 1
            return renderer.encode_reply(replies[min(max(turn, 0), len(replies) - 1)])

        return ScriptedEngine(reply, **settings)

    return make


@pytest.fixture
def policy(renderer: Renderer) -> Callable[..., Policy]:
    return lambda engine, renderer=renderer, **sampling: Policy(engine, renderer, Sampling(**sampling))


@pytest.fixture
def limits() -> Callable[..., EpisodeLimits]:
    """`limits(max_turns=2)`"""
    return lambda **values: EpisodeLimits(**values)


@pytest.fixture
def run(task, renderer, policy, limits, speaker):
    """`run(world, engine, max_turns=2)` -> the trajectory."""

    def go(
        world, engine=None, *, task=task, actor=None, renderer=renderer, context: ContextSettings = FULL,
        **values: Any,
    ) -> Trajectory:  # fmt: skip
        actor = actor or policy(engine or speaker("yes", "no"), renderer)
        played = play(task, world, actor, renderer, limits(**values), id="e", seed=1, context=context)
        return asyncio.run(played)

    return go

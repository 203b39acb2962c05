"""For orchestrator.py: environments with canned replies, and episodes played in them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from scripted_engine import ScriptedEngine
from transformers import AutoTokenizer

from silva.config.sections import EpisodeLimits
from silva.environments.worlds.calculator import Calculator
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.models.loading import PACKAGED, resolve
from silva.models.tiny import tiny_tokenizer
from silva.protocols import Work
from silva.rendering.renderer import Renderer
from silva.rollouts.linear import Linear
from silva.rollouts.settings import LinearRolloutSettings
from silva.storage.ledger import token_digest
from silva.types import Group, SamplingParams, Task

GROUP = 8  # episodes of one task
LIMITS = EpisodeLimits()

MOVES = tuple(
    f"<think>Next: {move}.</think><answer>{move}</answer>" for move in ("Left", "Down", "Right", "Up")
)
CALLS = (
    *(
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{sum}"}}}}\n</tool_call>'
        for sum in ("12 + 7", "98 - 45", "(3 + 4) * 5")
    ),
    "The answer is 19.",
)


@dataclass(frozen=True)
class Case:
    """An environment with the replies its players draw from."""

    name: str
    settings: Any
    replies: Sequence[str]
    tokenizer: Any


@dataclass(frozen=True)
class Played:
    groups: Sequence[Group]
    seconds: float  # of CPU

    @property
    def turns(self) -> int:
        return sum(len(t.turns) for group in self.groups for t in group.trajectories)

    @property
    def digest(self) -> str:
        """Of every token and reward, whatever order the episodes ended in."""
        trajectories = sorted((t for group in self.groups for t in group.trajectories), key=lambda t: t.id)
        tokens = token_digest(s.tokens for t in trajectories for turn in t.turns for s in turn.segments)
        return f"{tokens} {[t.raw_reward for t in trajectories]}"

    @property
    def cost(self) -> float:
        """Microseconds a turn."""
        return self.seconds / self.turns * 1e6


def cases(quick: bool) -> list[Case]:
    tokenizers: dict[str, Any] = {"bytes": tiny_tokenizer()}
    if not quick:
        tokenizers["SmolLM2"] = AutoTokenizer.from_pretrained(resolve(PACKAGED))
    environments: dict[str, tuple[Any, Sequence[str]]] = {
        "frozen_lake": (FrozenLake(train_size=1 << 20), MOVES),
        "calculator": (Calculator(train_size=1 << 20), CALLS),
    }
    return [
        Case(f"{environment}, {name}", settings, replies, tokenizer)
        for name, tokenizer in tokenizers.items()
        for environment, (settings, replies) in environments.items()
        if not quick or environment == "frozen_lake"
    ]


def play(
    case: Case, tasks: Sequence[Task], live: int, sampled: AbstractContextManager[Any] | None = None
) -> Played:
    """Play one episode of every task, `live` of them at a time, with nothing in any cache."""
    renderer, groups = Renderer(case.tokenizer), list[Group]()
    engine = ScriptedEngine(replies(case, renderer))
    gc.collect()
    began = time.process_time()
    with sampled or contextlib.nullcontext():
        asyncio.run(play_all(case, renderer, tasks, live, engine, groups))
    return Played(groups, time.process_time() - began)


async def play_all(
    case: Case,
    renderer: Renderer,
    tasks: Sequence[Task],
    live: int,
    engine: ScriptedEngine,
    groups: list[Group],
) -> None:
    engine.requests = deque(maxlen=0)  # type: ignore[assignment]  # its log would be most of the memory
    taskset = case.settings.taskset()
    strategy = Linear(LinearRolloutSettings(group_size=1, limits=LIMITS), engine, renderer, seed=0)
    waiting = iter(enumerate(tasks))

    async def work() -> None:
        for number, task in waiting:
            async for group in strategy.run(Work(f"s0g{number}", task, taskset, 1.0)):
                groups.append(group)

    await asyncio.gather(*(work() for _ in range(live)))


def repeated_tasks(case: Case, episodes: int) -> tuple[list[Task], float]:
    """GROUP times each task, and microseconds to draw one."""
    drawn = case.settings.taskset().tasks("train")
    count = -(-episodes // GROUP)
    began = time.process_time()
    tasks = drawn[:count]
    cost = (time.process_time() - began) / count * 1e6
    return [task for task in tasks for _ in range(GROUP)][:episodes], cost


def replies(case: Case, renderer: Renderer) -> Callable[[Sequence[int], SamplingParams], Sequence[int]]:
    encoded = [tuple(renderer.encode_reply(text)) for text in case.replies]
    return lambda context, params: encoded[params.seed % len(encoded)]

"""Plays episodes without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from silva.environments.settings import EnvironmentSettings
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Step, Task, ToolCall

Reply = Message | str


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))


def said(step: Any) -> str:
    """The first message of a step, or of an observation."""
    return getattr(step, "observation", step).messages[0].content


async def _steps(environment: Any, replies: Callable[[int], Reply | None]) -> list[Step]:
    """To the end of the episode, or up to the reply None."""
    steps: list[Step] = []
    await environment.reset()
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        reply = replies(len(steps))
        if reply is None:
            break
        if isinstance(reply, str):
            parsed = parse_hermes(reply)
            reply = Message("assistant", parsed.content if parsed.calls else reply, tool_calls=parsed.calls)
        steps.append(await environment.step(replace(reply, id=reply.id or f"r{len(steps)}")))
    await environment.close()
    return steps


@pytest.fixture(scope="session")
def play_out():
    """(environment, turn -> reply) -> the steps of the episode. Without replies its expert plays."""
    return lambda environment, replies=None: asyncio.run(
        _steps(environment, replies or (lambda _: environment.expert_reply()))
    )


@pytest.fixture(scope="session")
def replies_to():
    """(settings, task, list of replies) -> the steps; stops where the episode or the list ends."""

    def run(settings: EnvironmentSettings, task: Task, replies: Sequence[Reply]) -> list[Step]:
        environment = settings.taskset().environment(task)
        return asyncio.run(_steps(environment, lambda turn: replies[turn] if turn < len(replies) else None))

    return run


@pytest.fixture(scope="session")
def first():
    """(settings, task) -> the first message."""
    return lambda settings, task: said(asyncio.run(settings.taskset().environment(task).reset()))


@pytest.fixture
def rows_file(tmp_path: Path):
    """(rows, name of the file) -> its path."""

    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def expert_rate(play_out):
    """(settings, number of held-out tasks) -> (mean success, mean raw reward) of the scripted expert."""

    def rate(settings: EnvironmentSettings, tasks: int) -> tuple[float, float]:
        taskset = settings.taskset()
        played = [play_out(taskset.environment(task)) for task in taskset.tasks("eval")[:tasks]]
        rewards = [sum(sum(step.rewards.values()) for step in steps) for steps in played]
        return sum(steps[-1].metrics["success"] for steps in played) / len(played), sum(rewards) / len(played)

    return rate

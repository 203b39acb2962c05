"""Plays episodes without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from silva.environments.settings import EnvironmentSettings
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Step, Task


def reply(episode: Any, turn: int, seed: int | None = None) -> Message:
    """The expert's, or one at random, with its calls."""
    text = episode.expert_reply() if seed is None else episode.random_reply(seed)
    parsed = parse_hermes(text)
    return Message("assistant", parsed.content, tool_calls=parsed.calls, id=f"r{turn}")


def _play(environment, replies: Callable[[int], Message | str]) -> list[Step]:
    async def run() -> list[Step]:
        await environment.reset()
        steps: list[Step] = []
        while not steps or not (steps[-1].terminated or steps[-1].truncated):
            reply = replies(len(steps))
            message = Message("assistant", reply) if isinstance(reply, str) else reply
            steps.append(await environment.step(message))
        await environment.close()
        return steps

    return asyncio.run(run())


@pytest.fixture(scope="session")
def play_out():
    """(environment, turn -> reply) -> the steps of the episode."""
    return _play


@pytest.fixture(scope="session")
def replies_to():
    """(settings, task, list of replies) -> the steps; stops where the episode or the list ends."""

    def run(settings: EnvironmentSettings, task: Task, replies: Sequence[Message | str]) -> list[Step]:
        async def steps() -> list[Step]:
            environment = settings.taskset().environment(task)
            await environment.reset()
            done: list[Step] = []
            for reply in replies:
                message = Message("assistant", reply) if isinstance(reply, str) else reply
                done.append(await environment.step(message))
                if done[-1].terminated or done[-1].truncated:
                    break
            return done

        return asyncio.run(steps())

    return run


@pytest.fixture(scope="session")
def expert_rate():
    """(settings, number of held-out tasks) -> (mean success, mean raw reward) of the scripted expert."""

    def rate(settings: EnvironmentSettings, tasks: int) -> tuple[float, float]:
        taskset = settings.taskset()
        ends, rewards = [], []
        for task in taskset.tasks("eval")[:tasks]:
            environment = taskset.environment(task)
            steps = _play(environment, lambda _, e=environment: e.expert_reply())
            ends.append(steps[-1].metrics["success"])
            rewards.append(sum(sum(step.rewards.values()) for step in steps))
        return sum(ends) / len(ends), sum(rewards) / len(rewards)

    return rate

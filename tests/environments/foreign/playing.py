"""Plays what the adapters make of other libraries' environments."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from silva.environments.check.checks import examine
from silva.environments.check.findings import Finding
from silva.environments.process.workers import Workers
from silva.environments.settings import EnvironmentSettings
from silva.types import Message, Observation, Step, Task, ToolCall


def call(name: str, /, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments, "c"),), id="r")


def wrong(settings: EnvironmentSettings) -> list[Finding]:
    """What `silva envs check` finds wrong."""
    return [finding for check in examine(settings) if not check.ok for finding in check.findings]


def first_task(settings: EnvironmentSettings) -> Task:
    return settings.taskset().tasks("train")[0]


def played(
    settings: EnvironmentSettings, *replies: Message | str, task: Task | None = None
) -> tuple[Observation, list[Step]]:
    """The first observation and the steps of an episode, by default of the first task to train on."""
    taskset = settings.taskset()
    environment = taskset.environment(task or taskset.tasks("train")[0])

    async def run() -> tuple[Observation, list[Step]]:
        try:
            observation, steps = await environment.reset(), []
            for reply in replies:
                message = Message("assistant", reply, id="r") if isinstance(reply, str) else reply
                steps.append(await environment.step(message))
            return observation, steps
        finally:
            await environment.close()

    return asyncio.run(run())


def texts(steps: list[Step]) -> list[str]:
    """What each step shows."""
    return ["|".join(message.content for message in step.observation.messages) for step in steps]


def fork_refused(settings: EnvironmentSettings, task: Task | None = None) -> None:
    """Raises what a fork of an episode raises."""
    taskset = settings.taskset()
    environment: Any = taskset.environment(task or taskset.tasks("train")[0])

    async def run() -> None:
        await environment.reset()
        try:
            await environment.fork(1)
        finally:
            await environment.close()

    asyncio.run(run())


def apart_and_here(
    settings: EnvironmentSettings, replies: Sequence[Message] = ()
) -> tuple[list[Any], list[Any]]:
    """What an episode shows in a process with another order of sets, and in this one; its replies are drawn
    at random if none are given."""

    async def told(taskset: Any) -> list[Any]:
        episode = taskset.environment(taskset.tasks("train")[0])
        shown = [await episode.reset()]
        for turn in range(len(replies) or 4):
            said = replies[turn] if replies else episode.random_reply(turn)
            said = await said if inspect.isawaitable(said) else said
            shown.append(await episode.step(Message("assistant", said) if isinstance(said, str) else said))
        await episode.close()
        return shown

    apart = Workers(settings.model_copy(update={"workers": 1}))
    try:
        return asyncio.run(told(apart)), asyncio.run(told(settings.taskset()))
    finally:
        apart.close()

"""Episodes that are forked, and tools that are called, for checking an environment without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from silva.environments.check.findings import SHOWN
from silva.environments.check.play import (
    Replies,
    Watched,
    begin,
    expert_replies,
    go_on,
    random_replies,
    value_for,
)
from silva.errors import one_line
from silva.protocols import Scripted
from silva.types import Message, Task, ToolCall

CALLS = 3  # of each tool
Make = Callable[[Task], Watched]


async def forked(make: Make, task: Task, begun: int, seed: int) -> list[str]:
    """What is wrong with forks after `begun` turns.

    A fork is played to its end while the episode that it was forked from waits, and then that one. Both must
    go as episodes that were never forked: a fork shares nothing that changes.
    """
    faults: list[str] = []
    plain, last, original = (make(task) for _ in range(3))
    opened: list[Any] = [plain, last, original]
    try:
        for each in opened:
            if (await begin(each, random_replies(each, seed), begun)).ended:
                return []
        twin = Watched(await original.inner.fork(task.seed), original.tools)
        opened.append(twin)
        other = Watched(await original.inner.fork(task.seed + 1), original.tools)
        opened.append(other)
        await go_on(other, random_replies(other, seed + 7), begun)
        wanted, found = [await go_on(each, _best_replies(each, seed), begun) for each in (plain, twin)]
        if repr(wanted.told) != repr(found.told):
            faults.append(
                "a fork with the episode's own seed goes on differently: it earned "
                f"{found.reward:g} in place of {wanted.reward:g}"
            )
        wanted, found = [
            await go_on(each, random_replies(each, seed + 3), begun) for each in (last, original)
        ]
        if repr(wanted.told) != repr(found.told):
            faults.append(
                "what forks do changes the episode they were forked from: it earned "
                f"{found.reward:g} in place of {wanted.reward:g}; fork() must copy all that changes"
            )
    finally:
        for each in opened:
            await each.close()
    return faults


async def called(make: Make, task: Task) -> tuple[int, list[str]]:
    """How many tools are offered at the start, and which of them raise whatever they are called with."""
    first, rng, notes = make(task), random.Random(0), []
    try:
        await first.reset()
    finally:
        await first.close()
    for spec in first.tools:
        calls = [ToolCall(spec.name, value_for(spec.parameters, rng), f"call-{i}") for i in range(CALLS)]
        raised = [said for call in calls if (said := await _exception(make(task), call))]
        if len(raised) == CALLS:
            notes.append(f"the tool {spec.name} raised in {CALLS} of {CALLS} made-up calls: {raised[-1]}")
    return len(first.tools), notes


async def _exception(environment: Watched, call: ToolCall) -> str:
    """What the model reads if the call raises; "" if it does not."""
    try:
        await environment.reset()
        step = await environment.step(Message("assistant", "", tool_calls=(call,), id="reply"))
    finally:
        await environment.close()
    said = "".join(message.content for message in step.observation.messages[-1:])
    return one_line(said, SHOWN) if step.metrics.get("tool_exceptions") else ""


def _best_replies(environment: Watched, seed: int) -> Replies:
    own = isinstance(environment.inner, Scripted)
    return expert_replies(environment.inner, seed) if own else random_replies(environment, seed)

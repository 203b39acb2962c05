"""Episodes that are forked, and tools that are called, for checking an environment without a model."""

from __future__ import annotations

import random
from collections.abc import Callable

from silva.environments.check.findings import SHOWN
from silva.environments.check.play import CheckedEpisode, always, at_random, expert_or_random, value_for
from silva.errors import one_line
from silva.types import Message, Task, ToolCall

CALLS = 3  # of each tool
Make = Callable[[Task], CheckedEpisode]


async def forked(make: Make, task: Task, begun: int, seed: int) -> list[str]:
    """What is wrong with forks after `begun` turns.

    A fork is played to its end while the episode that it was forked from waits, and then that one. Both must
    go as episodes that were never forked: a fork shares nothing that changes.
    """
    faults: list[str] = []
    plain, last, original = opened = [make(task) for _ in range(3)]
    try:
        for each in opened:
            await each.reset()
            if (await each.go_on(at_random(seed), begun)).ended:
                return []
            each.told.clear()  # only what follows is compared
        opened.append(twin := await original.fork(task.seed))
        opened.append(other := await original.fork(task.seed + 1))
        await other.go_on(at_random(seed + 7))
        for each in (plain, twin):
            await each.go_on(expert_or_random(seed))
        if repr(plain.told) != repr(twin.told):
            faults.append(
                "a fork with the episode's own seed goes on differently: it earned "
                f"{twin.reward:g} in place of {plain.reward:g}"
            )
        for each in (last, original):
            await each.go_on(at_random(seed + 3))
        if repr(last.told) != repr(original.told):
            faults.append(
                "what forks do changes the episode they were forked from: it earned "
                f"{original.reward:g} in place of {last.reward:g}; fork() must copy all that changes"
            )
    finally:
        for each in opened:
            await each.inner.close()
    return faults


async def called(make: Make, task: Task) -> tuple[int, list[str]]:
    """How many tools are offered at the start, and which of them raise whatever they are called with."""
    first, rng, notes = make(task), random.Random(0), []
    await first.play(at_random(0), turns=0)
    for spec in first.tools:
        calls = [ToolCall(spec.name, value_for(spec.parameters, rng), f"call-{i}") for i in range(CALLS)]
        raised = [said for call in calls if (said := await _exception(make(task), call))]
        if len(raised) == CALLS:
            notes.append(f"the tool {spec.name} raised in {CALLS} of {CALLS} made-up calls: {raised[-1]}")
    return len(first.tools), notes


async def _exception(played: CheckedEpisode, call: ToolCall) -> str:
    """What the model reads if the call raises; "" if it does not."""
    await played.play(always(Message("assistant", "", tool_calls=(call,), id="reply")), turns=1)
    (step,) = played.steps
    said = "".join(message.content for message in step.observation.messages[-1:])
    return one_line(said, SHOWN) if step.metrics.get("tool_exceptions") else ""

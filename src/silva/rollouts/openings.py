"""How episodes begin, before any is played: what does not fit the limits of a run is known then.

Not here: replies of the policy; later turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from silva.actors.script import Script
from silva.config.sections import ContextSettings, EpisodeLimits
from silva.ports import derive
from silva.protocols import Driven, Scripted, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import Episode

TASKS = 16  # of each environment


@dataclass(frozen=True)
class Opening:
    """Lengths in tokens; `expert`: of the first reply of the environment's expert, 0 without one."""

    environment: str
    prompt: int
    expert: int


async def openings(
    tasksets: Mapping[str, TaskSet],
    renderer: Renderer,
    limits: EpisodeLimits,
    context: ContextSettings,
    *,
    seed: int,
) -> list[Opening]:
    """Begin training tasks from all over each task set; what cannot begin for another reason is left out."""

    async def one(label: str, index: int) -> Opening | None:
        task, own = tasksets[label].tasks("train")[index], derive(seed, "opening", label, index)
        episode = Episode(task, tasksets[label], Script(renderer), renderer, limits, f"opening{index}", own,
                          context=context)  # fmt: skip
        try:
            await episode.start()
            prompt = len(episode.state.context)
            scripted = not episode.over and isinstance(episode.environment, Scripted)
            reply = await episode.reply() if scripted else None
        finally:
            await episode.close()
        expert = sum(len(segment.tokens) for segment in reply.segments) if reply else 0
        return Opening(label, prompt, expert) if prompt else None

    begun = []
    for label, taskset in tasksets.items():
        if isinstance(taskset, Driven):  # what its program will ask is not known
            continue
        count = len(taskset.tasks("train"))
        chosen = sorted({i * count // TASKS for i in range(TASKS)})
        begun += await asyncio.gather(*(one(label, index) for index in chosen))
    return [opening for opening in begun if opening]


def misfits(begun: Sequence[Opening], limits: EpisodeLimits) -> list[str]:
    """One line for each environment and limit that its episodes cannot keep."""
    lines = []
    for label in dict.fromkeys(opening.environment for opening in begun):
        mine = [opening for opening in begun if opening.environment == label]
        long = sorted(o.prompt for o in mine if o.prompt >= limits.max_episode_tokens)
        if long:
            lines.append(
                f"{label}: {len(long)} of {len(mine)} first prompts that were tried have {long[0]} to "
                f"{long[-1]} tokens, and rollout.limits.max_episode_tokens = {limits.max_episode_tokens} "
                "leaves no room for a reply: such episodes end before they begin. Raise it"
            )
        longest = max(opening.expert for opening in mine)
        if longest > limits.max_turn_tokens:
            lines.append(
                f"{label}: the expert's own first reply has up to {longest} tokens, more than "
                f"rollout.limits.max_turn_tokens = {limits.max_turn_tokens}: no policy can say it. Raise the "
                "limit, or choose shorter replies (such as think = false)"
            )
    return lines

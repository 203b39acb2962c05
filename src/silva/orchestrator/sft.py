"""The supervised loop in its simplest form: imitate scripted play, one update a step.

    tasks ──> episodes of the script ──to_samples──> rows ──> cross-entropy update

It waits for its episodes (no engine is asked) and its update. Nothing is checkpointed in between: the loop is
short, and the same seed gives the same weights again.
"""

from __future__ import annotations

import asyncio

from silva.algorithms.aggregation import normalise
from silva.config.sections import Limits, WarmStart
from silva.monitoring.monitor import Monitor
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.tasks import TaskStream
from silva.ports import derive
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Script
from silva.rollouts.episode import play
from silva.rollouts.samples import to_samples
from silva.trainer.local import LocalTrainer
from silva.types import Group, LossSpec


async def imitate(
    trainer: LocalTrainer,
    stream: TaskStream,
    renderer: Renderer,
    settings: WarmStart,
    limits: Limits,
    *,
    seed: int,
    monitor: Monitor,
) -> tuple[float, int]:
    """`settings.steps` updates on fresh scripted episodes; returns the last loss and the tokens trained on.

    Raises:
        Interrupted: after Ctrl-C; the steps so far are lost.
    """
    actor, loss, tokens = Script(renderer, settings.mistakes, settings.noise), 0.0, 0
    with Interrupt() as interrupt:
        for step in range(settings.steps):
            draws = [stream.draw() for _ in range(settings.episodes_per_step)]
            episodes = [
                play(
                    task,
                    world.taskset,
                    actor,
                    renderer,
                    limits,
                    id=f"w{step}/{i}",
                    seed=derive(seed, "warm", step, i),
                )
                for i, (world, task) in enumerate(draws)
            ]
            played = await asyncio.gather(*episodes)
            groups = [Group(t.id, task, (t,)) for t, (_, task) in zip(played, draws, strict=True)]
            rows = normalise(to_samples(groups), "token_mean")
            metrics = await trainer.forward_backward(rows, LossSpec("cross_entropy"))
            await trainer.optim_step()
            loss, tokens = metrics["loss"], tokens + sum(map(len, rows))
            monitor.stage("warm start", step + 1, settings.steps)
            interrupt.check()
    return loss, tokens

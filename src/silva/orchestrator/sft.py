"""The supervised loop in its simplest form: imitate scripted play, one update a step.

    tasks ──> episodes of the script ──to_samples──> rows ──> cross-entropy update

It waits for its episodes (no engine is asked) and its update. Nothing is checkpointed in between: the loop is
short, and the same seed gives the same weights again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

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

WINDOW = 20  # steps whose mean loss is reported, and may end the warm start


@dataclass(frozen=True)
class Imitation:
    """What a warm start came to: its mean loss over the last steps, the tokens it trained on."""

    steps: int
    loss: float
    tokens: int


async def imitate(
    trainer: LocalTrainer,
    stream: TaskStream,
    renderer: Renderer,
    settings: WarmStart,
    limits: Limits,
    *,
    seed: int,
    monitor: Monitor,
) -> Imitation:
    """Updates on fresh scripted episodes: `settings.steps`, or fewer where `settings.stop_loss` is met.

    Raises:
        Interrupted: after Ctrl-C; the steps so far are lost.
    """
    actor, tokens = Script(renderer, settings.mistakes, settings.noise), 0
    losses: deque[float] = deque(maxlen=WINDOW)
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
            losses.append(metrics["loss"])
            tokens += sum(map(len, rows))
            monitor.stage("warm start", step + 1, settings.steps)
            interrupt.check()
            loss = sum(losses) / len(losses)
            if settings.stop_loss is not None and len(losses) == WINDOW and loss < settings.stop_loss:
                break
    return Imitation(step + 1, loss, tokens)

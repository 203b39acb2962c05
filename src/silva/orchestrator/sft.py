"""The supervised loop in its simplest form: imitate scripted play, one update a step.

    tasks ──> episodes of the script ──to_samples──> rows ──> cross-entropy update

It waits for its episodes and its update; where success may end it, for the policy's own play now and then.
Nothing is checkpointed in between: the loop is short, and the same seed gives the same weights again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from silva.algorithms.aggregation import normalise
from silva.config.sections import Limits, Sampling, WarmStart
from silva.evaluation.evaluator import success
from silva.monitoring.monitor import Monitor
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.tasks import TaskStream
from silva.ports import derive
from silva.protocols import Engine
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Actor, Policy, Script
from silva.rollouts.episode import play
from silva.rollouts.samples import to_samples
from silva.trainer.local import LocalTrainer
from silva.types import Group, LossSpec

WINDOW = 20  # steps whose mean loss is reported, and after which the policy is tried
TRIED = 128  # episodes of a trial: its standard error is 4 points


@dataclass(frozen=True)
class Imitation:
    """What a warm start came to: its mean loss over the last steps, the tokens it trained on."""

    steps: int
    loss: float
    tokens: int


async def imitate(
    trainer: LocalTrainer,
    engine: Engine,
    stream: TaskStream,
    renderer: Renderer,
    settings: WarmStart,
    limits: Limits,
    *,
    seed: int,
    monitor: Monitor,
) -> Imitation:
    """Updates on fresh scripted episodes: `settings.steps`, or fewer where `settings.stop_success` is met.

    Args:
        engine: over the trainer's weights; asked only for the success that may end the warm start.

    Raises:
        Interrupted: after Ctrl-C; the steps so far are lost.
    """
    script, tokens = Script(renderer, settings.mistakes, settings.noise), 0
    losses: deque[float] = deque(maxlen=WINDOW)

    async def episodes(actor: Actor, count: int, key: str) -> list[Group]:
        draws = [stream.draw() for _ in range(count)]
        playing = [
            play(task, world.taskset, actor, renderer, limits, id=f"{key}/{i}", seed=derive(seed, key, i))
            for i, (world, task) in enumerate(draws)
        ]
        played = await asyncio.gather(*playing)
        return [Group(t.id, task, (t,)) for t, (_, task) in zip(played, draws, strict=True)]

    with Interrupt() as interrupt:
        for step in range(settings.steps):
            groups = await episodes(script, settings.episodes_per_step, f"w{step}")
            rows = normalise(to_samples(groups), "token_mean")
            metrics = await trainer.forward_backward(rows, LossSpec("cross_entropy"))
            await trainer.optim_step()
            losses.append(metrics["loss"])
            tokens += sum(map(len, rows))
            monitor.stage("warm start", step + 1, settings.steps)
            interrupt.check()
            if settings.stop_success is not None and (step + 1) % WINDOW == 0:
                await engine.load_weights(engine.version)
                tried = await episodes(Policy(engine, renderer, Sampling()), TRIED, f"t{step}")
                if sum(success(t) for g in tried for t in g.trajectories) >= settings.stop_success * TRIED:
                    break
    return Imitation(step + 1, sum(losses) / len(losses), tokens)

"""The supervised loop in its simplest form: imitate scripted play, one update a step.

    tasks ──> episodes of the script ──to_samples──> rows ──> cross-entropy update

It waits for its episodes and its update; where success may end it, for the policy's own play now and then.
Nothing is checkpointed in between: the loop is short, and the same seed gives the same weights again.

Scripted episodes that fail give no demonstration. A few failures are only counted. If most episodes fail, the
environment or the limits are wrong, and the warm start says so instead of learning from the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from silva.actors.policy import Policy
from silva.actors.script import Script
from silva.algorithms.aggregation import normalise
from silva.config.sections import ContextSettings, EpisodeLimits, Sampling, WarmStart
from silva.errors import NoSignalError
from silva.evaluation.evaluator import reports_success, success
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.tasks import TaskStream
from silva.orchestrator.updates import optim_params
from silva.ports import derive
from silva.protocols import Actor, Engine, Trainer
from silva.rendering.renderer import Renderer
from silva.rollouts.context import FULL
from silva.rollouts.episode import play
from silva.rollouts.faults import UNWATCHED, Watch, tally
from silva.rollouts.samples import to_samples
from silva.types import Group, LossSpec

WINDOW = 20  # steps whose mean loss is reported, and after which the policy is tried
TRIED = 128  # episodes of a trial: its standard error is 4 points
JUDGED_FROM = 16  # scripted episodes; with fewer, the share of failed ones says little


@dataclass(frozen=True)
class Imitation:
    """What a warm start came to: its mean loss over the last steps, the tokens of its rows and those of them
    with a loss."""

    steps: int
    loss: float
    tokens_in_rows: int
    tokens_trained: int
    played: int  # episodes of the script
    failed: tuple[str, ...]  # errors of the episodes that gave no demonstration
    contents: tuple[str, ...]  # of the tasks that were imitated, each once


async def imitate(
    trainer: Trainer,
    engine: Engine,
    stream: TaskStream,
    renderer: Renderer,
    settings: WarmStart,
    limits: EpisodeLimits,
    *,
    seed: int,
    stage: Callable[[str, int, int], None] = lambda name, done, total: None,
    watch: Watch = UNWATCHED,
    context: ContextSettings = FULL,
) -> Imitation:
    """Updates on fresh scripted episodes: `settings.steps`, or fewer where `settings.stop_success` is met.

    Args:
        trainer: whose optimizer is at its start.
        stage: told how far it is.
        context: what the policy will be shown of an episode.
        engine: asked only for the success that may end the warm start.

    Raises:
        Interrupted: after Ctrl-C; the steps so far are lost.
        NoSignalError: most scripted episodes failed, the expert solved no task, or no row can be imitated.
    """
    script = Script(renderer, settings.mistakes, settings.noise)
    shown = _Shown(unsolved=not (settings.mistakes or settings.noise))
    updates = in_rows = trained = 0
    losses: deque[float] = deque(maxlen=WINDOW)
    # Tasks of their own, so that every task of `stream` is imitated.
    trials = TaskStream(stream.sources, derive(stream.seed, "trials"), step=TRIED)

    async def episodes(tasks: TaskStream, actor: Actor, count: int, key: str) -> list[Group]:
        draws = [tasks.draw() for _ in range(count)]
        playing = [
            play(task, source.taskset, actor, renderer, limits, id=f"{key}/{i}", seed=derive(seed, key, i),
                 watch=watch, context=context)
            for i, (source, task) in enumerate(draws)
        ]  # fmt: skip
        ended = await asyncio.gather(*playing)
        return [Group(t.id, task, (t,)) for t, (_, task) in zip(ended, draws, strict=True)]

    with Interrupt() as interrupt:
        for step in range(settings.steps):
            groups = await episodes(stream, script, settings.episodes_per_step, f"w{step}")
            shown.add(groups, last=step + 1 == settings.steps)
            if rows := normalise(to_samples(groups), "token_mean"):
                metrics = await trainer.forward_backward(rows, LossSpec("cross_entropy"))
                await trainer.optim_step(optim_params(updates, settings.optimizer, settings.steps))
                updates += 1
                losses.append(metrics["loss"])
                in_rows += sum(map(len, rows))
                trained += sum(int((row.loss_weights > 0).sum()) for row in rows)
            stage("warm start", step + 1, settings.steps)
            interrupt.check()
            if settings.stop_success is not None and (step + 1) % WINDOW == 0:
                await engine.load(await trainer.publish())
                tried = await episodes(trials, Policy(engine, renderer, Sampling()), TRIED, f"t{step}")
                if sum(success(t) for g in tried for t in g.trajectories) >= settings.stop_success * TRIED:
                    break
    if not losses:
        raise NoSignalError(
            f"warm start: {shown.played} scripted episodes hold nothing to imitate: every "
            f"reply is empty, or a mistake (warm_start.mistakes = {settings.mistakes:g}, expected less)"
        )
    loss = sum(losses) / len(losses)
    return Imitation(
        step + 1, loss, in_rows, trained, shown.played, tuple(shown.failed), tuple(sorted(shown.contents))
    )


@dataclass
class _Shown:
    """What the script has played so far.

    unsolved: only an expert is expected to solve tasks, and it has not solved any.
    """

    unsolved: bool
    played: int = 0
    failed: list[str] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)

    def add(self, groups: Sequence[Group], *, last: bool) -> None:
        """Raises NoSignalError if enough episodes, or the `last` ones, have come to too little."""
        trajectories = [t for group in groups for t in group.trajectories]
        self.played += len(groups)
        self.contents |= {group.task.content() for group in groups}
        self.failed += [t.error or "" for t in trajectories if t.failure is not None]
        self.unsolved &= reports_success(trajectories) and not any(map(success, trajectories))
        if self.played < JUDGED_FROM and not last:
            return
        if 2 * len(self.failed) > self.played:
            raise NoSignalError(
                f"warm start: {len(self.failed)} of {self.played} scripted episodes failed, "
                f"so there is too little to imitate: {tally(self.failed)}"
            )
        if self.unsolved:
            raise NoSignalError(
                f"warm start: the expert solved none of {self.played} tasks, so there is nothing to imitate; "
                "rollout.limits may be too small for it, or the environment does not read its replies: "
                "look at them with `silva eval --policy expert`"
            )

"""`silva rl`: train with reinforcement learning."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from silva import process
from silva.assembly import Assembly, connected
from silva.commands.checks import bias_notes, check, check_environments, check_parts, data_notes
from silva.commands.common import as_resolved
from silva.commands.outcome import RunOutcome, earlier, finish, stopped
from silva.config.load import Resolved
from silva.errors import PartLost
from silva.monitoring.traced import TracedEngine, TracedTrainer
from silva.orchestrator import rl
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.notices import Notices
from silva.orchestrator.replay import FILE as REPLAY
from silva.orchestrator.replay import Replay
from silva.orchestrator.state import Batches
from silva.orchestrator.work import WorkQueue
from silva.protocols import Trainer
from silva.rollouts.openings import misfits, openings
from silva.run import Run, claimed, opened, say
from silva.signals import Interrupted
from silva.storage.layout import Layout, steps_in
from silva.storage.run_folder import RunFolder

MOST_LOST = 5  # parts lost in a row, without a checkpoint in between


def train(
    config: str | Path | Mapping[str, Any] | Resolved,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
    console: Console | None = None,
) -> RunOutcome:
    """Run reinforcement learning from a TOML file, a table of keys, or a resolved configuration.

    Raises:
        SilvaError: the one of errors.py that fits; Interrupted after Ctrl-C (KeyboardInterrupt where there
            is nothing to save, or after the second).
    """
    resolved = as_resolved(config)
    check(resolved.config)
    path = Path(resolved.config.output_dir) / resolved.config.name
    lost = 0  # times in a row, without a new checkpoint between them
    while True:
        before = newest_step(path)
        try:
            with claimed(
                resolved, "--resume goes on",
                resume=resume, overwrite=overwrite, accept_files=accept_files, console=console,
            ) as folder:  # fmt: skip
                if before_this := earlier(folder, console):
                    return before_this
                outcome = asyncio.run(train_in(resolved, folder, console))
            process.forget()
            return outcome
        except PartLost as error:
            lost = 1 if newest_step(path) != before else lost + 1
            if lost > MOST_LOST:
                raise
            goes_on = "begins again" if folder.back else "goes on from its last checkpoint"
            say(f"{error}: the run {goes_on}", console)
            resume, overwrite = not folder.back, folder.back


def newest_step(path: Path) -> int:
    """Of the checkpoints of a run; -1 without one."""
    return max(steps_in(Layout(path).checkpoints), default=-1)


async def train_in(
    resolved: Resolved,
    folder: RunFolder,
    console: Console | None,
    *,
    parts: Callable[..., AbstractContextManager[Assembly]] | None = None,
    prepared: Callable[[], Awaitable[None]] | None = None,
) -> RunOutcome:
    """Train in a folder that is open.

    Args:
        parts: see `run.opened`.
        prepared: awaited before the first step.
    """
    config = resolved.config
    notes = (*config.algorithm.notes, *bias_notes(config), *data_notes(config))
    async with opened(resolved, folder, steps=config.steps, notes=notes, console=console,
                      parts=parts) as run:  # fmt: skip
        try:
            loop = await prepare(run)
            if run.checkpoint is None and config.warm_start is not None:
                await loop.save()  # the warm start is never repeated
            if prepared:
                await prepared()
            state = await loop.run(folder.begun)
            return finish(run, state, await run.export(loop.parts.trainer, state.step))
        except Interrupted:
            stopped(run, "begins the warm start again")
            raise


async def prepare(run: Run) -> rl.Loop:
    """The loop with everything in it, its weights warm-started or restored."""
    config, assembly, monitor, trace = run.config, run.assembly, run.monitor, run.trace
    trainer = await _trainer(run)
    sync = assembly.sync(trainer)
    if run.checkpoint is not None:
        await trainer.load(run.checkpoint / "trainer")
    elif config.warm_start is not None:
        await run.warm_start(sync)
        await trainer.restart()
    await sync.load(await trainer.snapshot())
    parts = rl.Parts(
        config=config,
        sync=sync,
        buffer=Buffer(_work(run), config.algorithm, run.ledger, config.rollout),
        evaluate=run.measure,
        ledger=run.ledger,
        store=run.store,
        monitor=monitor,
        notices=Notices(monitor, config.algorithm),
        phases=run.phases,
        replay=_replay(run),
        idle=trace.idle if isinstance(trainer, TracedTrainer) else dict,
        data=_data(run) if config.data and config.data.mix else None,
    )
    trace.idle()  # the first step begins here
    return rl.Loop(parts, run.state)


def _data(run: Run) -> Batches:
    from silva.commands.sft import data_batches

    return data_batches(run, beside=True)


async def _trainer(run: Run) -> Trainer:
    """The trainer, reached; what parts and environments cannot do together is refused.

    Where somebody asks for a trace, or parts are elsewhere, trainer and engine tell when they are busy.
    """
    config, assembly, monitor = run.config, run.assembly, run.monitor
    monitor.stage("open the trainer")
    trainer = await connected(assembly.trainer(recipe=True))
    check_parts(config, assembly.engine, trainer)
    await check_environments(config, assembly.trained)
    limits, context = config.rollout.limits, config.rollout.context
    begun = await openings(assembly.trained, assembly.renderer, limits, context, seed=config.seed)
    for line in misfits(begun, limits):
        monitor.message(line, "warning")
    if config.monitoring.trace or not assembly.host.holds_model:
        assembly.engine = TracedEngine(assembly.engine, run.trace)
        return TracedTrainer(trainer, run.trace)
    return trainer


def _work(run: Run) -> WorkQueue:
    config, assembly, activity = run.config, run.assembly, run.activity
    batch = math.ceil(config.rollout.groups_per_step * config.algorithm.oversample)

    def turn(episode: str, waiting_for: str | None) -> None:
        activity.turn(episode, waiting_for)
        run.trace.turn(episode, waiting_for)

    drawn = batch * (1 + config.algorithm.max_refills)
    return WorkQueue(
        assembly.stream("train", step=drawn, settings=config.algorithm.difficulty_pools),
        config.rollout.build(assembly, on_turn=turn, watch=activity),
        run.ledger,
        batch=batch,
        steps=config.steps,
        level=config.rollout.max_async_level,
        max_updates=config.rollout.max_off_policy_steps,
        on_played=activity.groups,
    )


def _replay(run: Run) -> Replay | None:
    """With what it held at the checkpoint, if there is one."""
    if run.config.algorithm.replay is None:
        return None
    replay, saved = Replay(run.config.algorithm.replay, run.config.seed), (run.checkpoint or Path()) / REPLAY
    if run.checkpoint and saved.exists():  # else the run has only now been given a buffer
        replay.load(saved.read_bytes())
    return replay

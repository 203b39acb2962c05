"""`silva rl`: train with reinforcement learning."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from silva import process
from silva.assembly import Assembly, connected
from silva.commands.checks import bias_notes, check, check_environments, check_parts
from silva.commands.common import as_resolved, explained, export, measure, opened, say, warm_start
from silva.commands.outcome import Outcome, finish, write_last_report
from silva.config.diff import forbidden_changes
from silva.config.inputs import input_files
from silva.config.load import Resolved
from silva.config.saved import to_toml
from silva.config.schema import RunConfig
from silva.errors import PartLost, SilvaError
from silva.monitoring.monitor import Monitor
from silva.monitoring.trace import Trace
from silva.monitoring.traced import TracedEngine, TracedTrainer
from silva.orchestrator import held_out, rl
from silva.orchestrator.activity import Activity
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.interrupt import Interrupted
from silva.orchestrator.notices import Notices
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import Probe
from silva.orchestrator.replay import FILE as REPLAY
from silva.orchestrator.replay import Replay
from silva.orchestrator.resume import restore
from silva.orchestrator.state import RunState
from silva.orchestrator.work import WorkQueue
from silva.protocols import Trainer
from silva.rollouts.actors import Policy
from silva.rollouts.openings import misfits, openings
from silva.storage.checkpoints import CheckpointStore
from silva.storage.layout import Layout, steps_in
from silva.storage.ledger import Ledger
from silva.storage.metrics import truncate_metrics
from silva.storage.run_folder import RunFolder
from silva.storage.summary import read_summary

MOST_LOST = 5  # parts lost in a row, without a checkpoint in between


def train(
    config: str | Path | Mapping[str, Any] | Resolved,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
    console: Console | None = None,
) -> Outcome:
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
            with RunFolder.open(
                path, resume=resume, overwrite=overwrite, config=resolved.data, may_change=forbidden_changes,
                files=input_files(resolved.data), accept_files=accept_files,
            ) as run:  # fmt: skip
                if run.state == "finished":
                    return _finished(run, console)
                with explained(run, "--resume goes on", console):
                    outcome = asyncio.run(_train(resolved, run, console))
            process.forget()
            return outcome
        except PartLost as error:
            lost = 1 if newest_step(path) != before else lost + 1
            if lost > MOST_LOST:
                raise
            goes_on = "begins again" if run.back else "goes on from its last checkpoint"
            say(f"{error}: the run {goes_on}", console)
            resume, overwrite = not run.back, run.back


def newest_step(path: Path) -> int:
    """Of the checkpoints of a run; -1 without one."""
    return max(steps_in(Layout(path).checkpoints), default=-1)


async def _train(resolved: Resolved, run: RunFolder, console: Console | None) -> Outcome:
    config = resolved.config
    ledger = Ledger.open(run.ledger) if run.ledger.exists() else Ledger.create(run.ledger)
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    state, weights = restore(store, ledger)
    if run.changed_files:
        ledger.record("files_changed", step=state.step, files=run.changed_files)
        ledger.commit()
    run.save_config(to_toml(resolved), resolved.data)
    run.summary.unlink(missing_ok=True)
    kept = None if run.state == "new" else state.step if weights else -1  # last step that is not done again
    if kept is not None:
        truncate_metrics(run.metrics, state.logged)
    async with AsyncExitStack() as stack:
        monitor = stack.enter_context(
            Monitor(run.path, config.monitoring, name=config.name, total_steps=config.steps,
                    resume_step=kept, console=console)
        )  # fmt: skip
        for note in (*resolved.notes, *config.algorithm.notes, *bias_notes(config), *run.notes):
            monitor.message(note)
        for damaged in store.skipped:
            monitor.message(f"passed over: {damaged}", "warning")
        try:
            trace = stack.enter_context(
                Trace(run.trace if config.monitoring.trace else None,
                      partial(monitor.message, level="warning"))
            )  # fmt: skip
            phases = Phases(state.seconds, trace.phase)
            assembly = await stack.enter_async_context(opened(config, monitor, phases))
            if elsewhere := run.note_machine(assembly.engine.machine):
                monitor.message(elsewhere, "warning")
            if run.state == "new":
                held_out.record(run.path, assembly.tasksets)
            for note in held_out.changes(run.path, assembly.tasksets, config.eval.tasks):
                monitor.message(note, "warning")
            loop = await _prepare(assembly, state, weights, ledger, store, monitor, phases, trace)
            if weights is None and config.warm_start is not None:
                await loop.save()  # the warm start is never repeated
            state = await loop.run(run.begun)
            weights = run.weights / f"step_{state.step}"
            with phases("export"):
                monitor.stage("export")
                await export(loop.parts.trainer, weights)
            return finish(assembly, state, phases, run, monitor, weights)
        except Interrupted:
            steps = store.steps()
            where = f"goes on after step {steps[-1]}" if steps else "begins the warm start again"
            monitor.message(f"stopped; --resume {where}", "warning")
            if config.monitoring.report:
                write_last_report(run, monitor, None)
            raise
        except SilvaError as error:
            monitor.log(str(error), "error")  # the caller shows it
            raise


async def _prepare(
    assembly: Assembly,
    state: RunState,
    weights: Path | None,
    ledger: Ledger,
    store: CheckpointStore,
    monitor: Monitor,
    phases: Phases,
    trace: Trace,
) -> rl.Loop:
    """The loop with everything in it, its weights warm-started or restored."""
    config, activity = assembly.config, Activity(monitor)
    trainer = await _trainer(assembly, monitor, trace)
    if weights is not None:
        await trainer.load(weights)
    elif config.warm_start is not None:
        await warm_start(assembly, trainer, activity, phases, ledger)
        await trainer.restart()
    snapshot = await trainer.snapshot()
    await assembly.engine.load(snapshot)
    probe = Probe(assembly.renderer.vocabulary, config.model.dtype) if snapshot.folder else None
    if probe:
        await probe.check(trainer, assembly.engine)
    parts = rl.Parts(
        settings=rl.Settings(
            steps=config.steps,
            temperature=config.rollout.sampling.temperature,
            trainer=config.trainer,
            eval_every=config.eval.every,
            collapse_every=config.monitoring.collapse_every,
            checkpoint=config.checkpoint,
            max_failed=config.rollout.max_failed,
            overlap=config.rollout.overlap_training,
        ),
        recipe=config.algorithm,
        trainer=trainer,
        engine=assembly.engine,
        buffer=Buffer(
            _work(assembly, state, ledger, activity, trace),
            config.algorithm,
            ledger,
            config.rollout,
        ),
        evaluate=partial(measure, assembly, _policy(assembly), activity, phases),
        ledger=ledger,
        store=store,
        monitor=monitor,
        notices=Notices(monitor, config.algorithm),
        phases=phases,
        replay=_replay(config, weights),
        probe=probe,
        idle=trace.idle if isinstance(trainer, TracedTrainer) else dict,
    )
    trace.idle()  # the first step begins here
    return rl.Loop(parts, state)


async def _trainer(assembly: Assembly, monitor: Monitor, trace: Trace) -> Trainer:
    """The trainer, reached; what parts and environments cannot do together is refused.

    Where somebody asks for a trace, or parts are elsewhere, trainer and engine tell when they are busy.
    """
    config = assembly.config
    monitor.stage("open the trainer")
    trainer = await connected(assembly.trainer(config.algorithm))
    check_parts(config, assembly.engine, trainer)
    await check_environments(config, assembly.tasksets)
    limits, context = config.rollout.limits, config.rollout.context
    begun = await openings(assembly.tasksets, assembly.renderer, limits, context, seed=config.seed)
    for line in misfits(begun, limits):
        monitor.message(line, "warning")
    if config.monitoring.trace or not assembly.placement.holds_model:
        assembly.engine = TracedEngine(assembly.engine, trace)
        return TracedTrainer(trainer, trace)
    return trainer


def _work(assembly: Assembly, state: RunState, ledger: Ledger, activity: Activity, trace: Trace) -> WorkQueue:
    config = assembly.config
    batch = math.ceil(config.rollout.groups_per_step * config.algorithm.oversample)

    def turn(episode: str, waiting_for: str | None) -> None:
        activity.turn(episode, waiting_for)
        trace.turn(episode, waiting_for)

    return WorkQueue(
        assembly.stream(
            "train",
            state.tasks,
            step=batch * (1 + config.algorithm.max_refills),
            passed=state.passed,
            settings=config.algorithm.difficulty_pools,
            pools=state.pools,
            recent=state.recent,
        ),
        config.rollout.build(assembly, on_turn=turn, watch=activity),
        ledger,
        batch=batch,
        steps=config.steps,
        level=config.rollout.max_async_level,
        max_updates=config.rollout.max_off_policy_steps,
        again=state.in_flight,
        on_played=activity.groups,
    )


def _policy(assembly: Assembly) -> Policy:
    return Policy(assembly.engine, assembly.renderer, assembly.config.eval.sampling)


def _replay(config: RunConfig, weights: Path | None) -> Replay | None:
    """With what it held at the checkpoint, if there is one."""
    if config.algorithm.replay is None:
        return None
    saved = weights.parent / REPLAY if weights is not None else None
    if saved is None or not saved.exists():  # of a run that has only now been given a buffer
        return Replay(config.algorithm.replay, config.seed)
    return Replay.decode(config.algorithm.replay, config.seed, saved.read_bytes())


def _finished(run: RunFolder, console: Console | None) -> Outcome:
    for note in run.notes:
        say(note, console)
    report = run.report if run.report.exists() else None
    return Outcome(run.path, read_summary(run.summary), report, None)

"""Joins the concrete parts of a run; the only place that constructs them."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError

from silva.algorithms import losses
from silva.config.diff import forbidden_changes
from silva.config.load import Resolved, load
from silva.config.saved import to_toml
from silva.config.schema import RunConfig
from silva.ending import Outcome, finish, write_last_report
from silva.engines.openai import ChatPolicy
from silva.engines.openai_settings import OpenAIEngineSettings
from silva.engines.settings import LocalEngine
from silva.errors import CapabilityError, ConfigError, SilvaError
from silva.evaluation.evaluator import Evaluation, evaluate, records
from silva.ledger import Ledger
from silva.monitoring import busy
from silva.monitoring.metrics import truncate_metrics
from silva.monitoring.monitor import Monitor
from silva.orchestrator import held_out, rl
from silva.orchestrator.activity import Activity
from silva.orchestrator.buffer import Buffer
from silva.orchestrator.interrupt import Interrupted
from silva.orchestrator.numbers import Phases, eval_metrics
from silva.orchestrator.run_directory import RunDirectory
from silva.orchestrator.sft import Imitation, imitate
from silva.orchestrator.state import RunState
from silva.ports import FILES
from silva.protocols import Actor
from silva.registries import REGISTRIES
from silva.rollouts.actors import Policy, Script
from silva.rollouts.faults import tally
from silva.rollouts.linear import Linear
from silva.session import Session, model_settings, offers_tools, tasksets
from silva.trainer.checkpoint import CheckpointStore
from silva.trainer.local import LocalTrainer

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)


def train(
    config: str | Path | Mapping[str, Any] | Resolved,
    *,
    resume: bool = False,
    overwrite: bool = False,
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
    with RunDirectory.open(
        path, resume=resume, overwrite=overwrite, config=resolved.data, may_change=forbidden_changes
    ) as run:
        if run.state == "finished":
            return _finished(run, console)
        with _explained(run, "--resume goes on", console):
            outcome = asyncio.run(_train(resolved, run, console))
    gc.collect()  # a model refers to itself: without this the next one of this process stands beside it
    return outcome


def as_resolved(config: str | Path | Mapping[str, Any] | Resolved) -> Resolved:
    if isinstance(config, Resolved):
        return config
    if isinstance(config, Mapping):
        return load([], REGISTRIES, values=config)
    return load([f"@{config}"], REGISTRIES)


def check(config: RunConfig) -> None:
    """Refuse at the start what cannot be done.

    Raises:
        CapabilityError, ConfigError: with the key to change.
    """
    _check_engine(config)
    sampling = config.rollout.sampling
    for key, full in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(sampling, key) != full:
            raise CapabilityError(
                f"rollout.sampling.{key} = {getattr(sampling, key)}: training needs the full distribution "
                f"({key} = {full}), since the tokens that were cut off are not stored; eval.sampling may cut"
            )
    if sampling.temperature == 0:
        raise CapabilityError(
            "rollout.sampling.temperature = 0: greedy samples cannot be trained on, expected > 0"
        )
    if not config.algorithm.use_rewards and config.algorithm.reference is None:
        raise ConfigError(
            "algorithm.use_rewards = false without [algorithm.reference]: the policy would only be held to "
            "itself; name a teacher"
        )
    try:
        losses.check(config.algorithm.loss_spec())
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error


def _check_engine(config: RunConfig) -> None:
    if isinstance(config.engine, OpenAIEngineSettings):
        raise CapabilityError(
            'engine.type = "openai": a chat API gives no token ids, no log-probabilities and no weights, so '
            'it cannot be trained; expected engine.type = "local", or `silva eval`'
        )


def supervise(config: str | Path | Mapping[str, Any] | Resolved, *, overwrite: bool = False) -> Outcome:
    """Only the warm start of a configuration: scripted play imitated, evaluated, exported.

    Raises:
        ConfigError: the configuration has no [warm_start].
    """
    resolved = as_resolved(config)
    _check_engine(resolved.config)
    if resolved.config.warm_start is None:
        raise ConfigError("sft: the configuration has no [warm_start], so there is nothing to imitate")
    path = Path(resolved.config.output_dir) / resolved.config.name
    with (
        RunDirectory.open(
            path, resume=False, overwrite=overwrite, config=resolved.data, may_change=forbidden_changes
        ) as run,
        _explained(run, "start again with --overwrite"),
    ):
        try:
            return asyncio.run(_supervise(resolved, run))
        except Interrupted:  # nothing of it is kept
            raise KeyboardInterrupt from None


@contextmanager
def _explained(run: RunDirectory, advice: str, console: Console | None = None) -> Iterator[None]:
    """What ends a run from outside, in words: Ctrl-C where nothing awaits it, a disk that takes no more."""
    try:
        yield
    except KeyboardInterrupt:
        _print(run.restore() or f"{run.path}: interrupted; {advice}", console)
        raise
    except OSError as error:
        if isinstance(error, SilvaError) or error.errno not in _DISK:
            raise
        raise SilvaError(
            f"{run.path} cannot be written: {error.strerror}. Its checkpoints are untouched. "
            f"Free some space (or make it writable), then {advice}."
        ) from error
    finally:
        if restored := run.restore():
            _print(restored, console)


async def _train(resolved: Resolved, run: RunDirectory, console: Console | None) -> Outcome:
    config = resolved.config
    ledger = Ledger.open(run.ledger) if run.ledger.exists() else Ledger.create(run.ledger)
    run.save_config(to_toml(resolved), resolved.data)
    store = CheckpointStore(run.checkpoints, config.checkpoint.keep)
    state, weights = rl.restore(store, ledger)
    run.summary.unlink(missing_ok=True)
    kept = None if run.state == "new" else state.step if weights else -1  # last step that is not done again
    if kept is not None:
        truncate_metrics(run.metrics, state.logged)
    with ExitStack() as stack:
        monitor = stack.enter_context(
            Monitor(run.path, config.monitoring, name=config.name, total_steps=config.steps,
                    resume_step=kept, console=console)
        )  # fmt: skip
        for note in (*resolved.notes, *config.algorithm.notes, *run.notes):
            monitor.message(note)
        for damaged in store.skipped:
            monitor.message(f"passed over: {damaged}", "warning")
        try:
            phases = Phases(state.seconds)
            session = stack.enter_context(_session(config, monitor, phases))
            if elsewhere := run.note_machine(session.machine):
                monitor.message(elsewhere, "warning")
            if run.state == "new":
                held_out.record(run.path, session.tasksets)
            for note in held_out.changes(run.path, session.tasksets, config.eval.tasks):
                monitor.message(note, "warning")
            loop = await _prepare(session, state, weights, ledger, store, monitor, phases)
            if weights is None and config.warm_start is not None:
                await loop.save()  # the warm start is never repeated
            state = await loop.run(run.begun)
            weights = run.weights / f"step_{state.step}"
            with phases("export"):
                monitor.stage("export")
                await _export(loop.parts.trainer, weights)
            return finish(session, state, phases, run, monitor, weights)
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


async def _supervise(resolved: Resolved, run: RunDirectory) -> Outcome:
    config = resolved.config
    ledger = Ledger.create(run.ledger)
    run.save_config(to_toml(resolved), resolved.data)
    phases = Phases()
    with (
        Monitor(run.path, config.monitoring, name=config.name, total_steps=1) as monitor,
        _session(config, monitor, phases) as session,
    ):
        held_out.record(run.path, session.tasksets)
        run.note_machine(session.machine)
        policy = Policy(session.engine, session.renderer, config.eval.sampling)
        activity = Activity(monitor)
        before = await _measure(session, policy, activity, phases)
        monitor.step(0, eval_metrics(before))
        trainer, done = await _warm_start(session, activity, phases, ledger)
        await session.engine.load_weights(1)
        after = await _measure(session, policy, activity, phases)
        monitor.step(1, eval_metrics(after))
        weights = run.weights / "step_0"
        run.begun()
        await _export(trainer, weights)
        state = RunState(
            steps_trained=done.steps, tokens_trained=done.tokens,
            eval_before=records(before), eval_last=records(after),
        )  # fmt: skip
        return finish(session, state, phases, run, monitor, weights)


async def _export(trainer: LocalTrainer, folder: Path) -> None:
    """All of the weights or none."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    FILES.remove_tree(temporary)
    try:
        await trainer.export(temporary)
    except SafetensorError as error:  # what it makes of a full disk
        raise SilvaError(
            f"the weights could not be written to {folder}: {error}. Free some space, then --resume."
        ) from error
    FILES.remove_tree(folder)
    FILES.rename(temporary, folder)


@contextmanager
def _session(config: RunConfig, monitor: Monitor, phases: Phases) -> Iterator[Session]:
    with phases("load"):
        monitor.stage("load model")
        began = busy.sample()
        session = Session(config)
    cores = len(busy.cores())
    slow = busy.hint(began, busy.sample(), cores, config.placement.threads or cores)
    if slow and session.loaded.device.type == "cpu":
        monitor.message(slow, "warning")
    renderer, tools = session.renderer, any(map(offers_tools, config.environments))
    for note in session.notes:
        monitor.message(note, "warning")
    for note in (*renderer.notes, *(renderer.tool_notes if tools else ())):
        monitor.message(note)
    wait = True
    try:
        yield session
    except asyncio.CancelledError:  # Ctrl-C where nothing waits for it, or for the second time
        wait = False
        raise
    finally:
        session.close(wait=wait)


async def _measure(session: Session, actor: Actor, activity: Activity, phases: Phases) -> list[Evaluation]:
    monitor = activity.monitor
    with phases("eval"):
        evaluations = await evaluate(
            session.tasksets,
            actor,
            session.renderer,
            session.config.eval,
            session.config.rollout.limits,
            seed=session.config.seed,
            redo=session.config.rollout.redo,
            on_episode=lambda done, total, label: monitor.stage("eval", done, total, label),
            watch=activity,
        )
    for note in filter(None, (e.note() for e in evaluations)):
        monitor.message(f"evaluation: {note}", "warning")
    return evaluations


async def _warm_start(
    session: Session, activity: Activity, phases: Phases, ledger: Ledger
) -> tuple[LocalTrainer, Imitation]:
    """The trainer that did it, and what came of it."""
    config, warm, monitor = session.config, session.config.warm_start, activity.monitor
    assert warm is not None
    with phases("warm_start"):
        monitor.stage("warm start", 0, warm.steps)
        teacher = session.trainer(
            config.trainer.model_copy(update={"optimizer": warm.optimizer, "self_check": False}), warm.steps
        )
        done = await imitate(teacher, session.engine, session.stream("warm"), session.renderer, warm,
                             config.rollout.limits, seed=config.seed, monitor=monitor,
                             watch=activity)  # fmt: skip
    ledger.record("imitated", contents=done.contents)
    ledger.commit()
    monitor.message(f"warm start: {done.steps} supervised steps, loss {done.loss:.3f}")
    if done.failed:
        monitor.message(
            f"warm start: {len(done.failed)} of {done.played} episodes failed and were not imitated: "
            f"{tally(done.failed)}",
            "warning",
        )
    return teacher, done


async def _prepare(
    session: Session,
    state: RunState,
    weights: Path | None,
    ledger: Ledger,
    store: CheckpointStore,
    monitor: Monitor,
    phases: Phases,
) -> rl.Loop:
    """The loop with everything in it, its weights warm-started or restored."""
    config = session.config
    teacher = session.teacher()  # first: a wrong name must not cost a warm start
    activity = Activity(monitor)
    if weights is None and config.warm_start is not None:
        await _warm_start(session, activity, phases, ledger)
    trainer = session.trainer(
        config.trainer,
        config.steps * config.trainer.updates_per_step,
        algorithm=config.algorithm,
        teacher=teacher,
        say=monitor.message,
    )
    if weights is not None:
        await trainer.load(weights)
    await session.engine.load_weights(trainer.version)
    rollout = Linear(
        config.rollout, session.renderer, seed=config.seed, on_turn=activity.turn, watch=activity
    )
    buffer = Buffer(
        stream=session.stream(
            "train", state.tasks, passed=state.passed, settings=config.algorithm.pools, pools=state.pools
        ),
        rollout=rollout,
        engine=session.engine,
        recipe=config.algorithm,
        ledger=ledger,
        groups=config.rollout.groups_per_step,
        longest=config.rollout.limits.longest_answer,
        on_groups=activity.groups,
    )
    settings = rl.Settings(
        steps=config.steps,
        seed=config.seed,
        eval=config.eval,
        limits=config.rollout.limits,
        redo=config.rollout.redo,
        checkpoint=config.checkpoint,
        trainer=config.trainer,
        temperature=config.rollout.sampling.temperature,
        collapse_every=config.monitoring.collapse_every,
    )
    parts = rl.Parts(settings, config.algorithm, trainer, session.engine, buffer, session.tasksets,
                     session.renderer, ledger, store, monitor, activity, phases)  # fmt: skip
    return rl.Loop(parts, state)


def _finished(run: RunDirectory, console: Console | None) -> Outcome:
    for note in run.notes:
        _print(note, console)
    report = run.report if run.report.exists() else None
    return Outcome(run.path, json.loads(run.summary.read_text()), report, None)


def _print(text: str, console: Console | None) -> None:
    (console or Console()).print(text, soft_wrap=True, highlight=False)


def evaluate_config(
    config: RunConfig, *, policy: str = "model", weights: str | None = None
) -> list[Evaluation]:
    """Held-out evaluation of the model (or of `weights`), or of scripted play.

    Args:
        policy: model, expert or random: who plays.
        weights: a run's folder or a model folder in place of `[model]`.
    """
    if weights is not None:
        config = config.model_copy(update={"model": model_settings(weights)})
    if policy not in ("model", "expert", "random"):
        raise ConfigError(f"--policy {policy}: expected model, expert or random")
    if isinstance(config.engine, OpenAIEngineSettings):
        if weights is not None:
            raise ConfigError('--weights with engine.type = "openai": a chat API takes no weights')
        if policy == "model":
            return asyncio.run(_evaluate_chat(config, config.engine))
        config = config.model_copy(update={"engine": LocalEngine()})  # scripted play samples nothing
    return asyncio.run(_evaluate(config, policy, Path(weights) if weights else None))


async def _evaluate_chat(config: RunConfig, engine: OpenAIEngineSettings) -> list[Evaluation]:
    """Of a model behind a chat API: no model and no tokenizer is loaded here."""
    console = Console(stderr=True)
    actor = ChatPolicy(engine, config.eval.sampling, system=config.rendering.system)
    progress = Progress(console=console, transient=True)
    bar = progress.add_task("evaluating")
    try:
        with progress:
            return await evaluate(
                tasksets(config),
                actor,
                None,
                config.eval,
                config.rollout.limits,
                seed=config.seed,
                redo=config.rollout.redo,
                on_episode=lambda done, total, label: progress.update(bar, completed=done, total=total),
            )
    finally:
        for note in actor.notes:
            _print(note, console)
        await actor.close()


async def _evaluate(config: RunConfig, policy: str, run: Path | None) -> list[Evaluation]:
    session, console = Session(config), Console(stderr=True)
    changes = held_out.changes(run, session.tasksets, config.eval.tasks) if run else []
    for note in (*session.notes, *changes):
        _print(note, console)
    progress = Progress(console=console, transient=True)
    bar = progress.add_task("evaluating")
    actor: Actor
    if policy == "model":
        actor = Policy(session.engine, session.renderer, config.eval.sampling)
    else:
        actor = Script(session.renderer, mistakes=float(policy == "random"))
    try:
        with progress:
            return await evaluate(
                session.tasksets,
                actor,
                session.renderer,
                config.eval,
                config.rollout.limits,
                seed=config.seed,
                redo=config.rollout.redo,
                on_episode=lambda done, total, label: progress.update(bar, completed=done, total=total),
            )
    finally:
        session.close()

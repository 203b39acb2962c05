"""What commands share: a configuration, parts that are loaded, an evaluation, a warm start, an export."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from silva import process
from silva.assembly import Assembly, offers_tools
from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.errors import SilvaError
from silva.evaluation.evaluator import Evaluation, evaluate
from silva.monitoring import busy
from silva.monitoring.monitor import Monitor
from silva.monitoring.printable import printable
from silva.orchestrator.activity import Activity
from silva.orchestrator.phases import Phases
from silva.orchestrator.sft import Imitation, imitate
from silva.placement.settings import ServicesPlacementSettings
from silva.ports import FILES
from silva.protocols import Actor, Trainer
from silva.registries import REGISTRIES
from silva.rollouts.faults import tally
from silva.storage.ledger import Ledger
from silva.storage.run_folder import RunFolder

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)


def as_resolved(config: str | Path | Mapping[str, Any] | Resolved) -> Resolved:
    if isinstance(config, Resolved):
        return config
    if isinstance(config, Mapping):
        return load([], REGISTRIES, values=config)
    return load([f"@{config}"], REGISTRIES)


def here(config: RunConfig) -> RunConfig:
    """The configuration with all parts in this process."""
    placement = config.placement
    local = placement.local if isinstance(placement, ServicesPlacementSettings) else placement
    return config.model_copy(update={"placement": local})


@contextmanager
def explained(run: RunFolder, advice: str, console: Console | None = None) -> Iterator[None]:
    """What ends a run from outside, in words: Ctrl-C where nothing awaits it, a disk that takes no more."""
    try:
        yield
    except KeyboardInterrupt:
        say(run.restore() or f"{run.path}: interrupted; {advice}", console)
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
            say(restored, console)


@contextmanager
def loaded(
    config: RunConfig,
    *,
    say: Callable[[str], None] = lambda text: None,
    stage: Callable[[str], None] = lambda text: None,
) -> Iterator[Assembly]:
    """The parts of a configuration, until the end of the block."""
    process.prepare()
    assembly, wait = Assembly(config, say=say, stage=stage).load(), True
    try:
        with process.loaded():
            yield assembly
    except asyncio.CancelledError:  # Ctrl-C where nothing waits for it, or for the second time
        wait = False
        raise
    finally:
        assembly.close(wait=wait)


@asynccontextmanager
async def opened(config: RunConfig, monitor: Monitor, phases: Phases) -> AsyncIterator[Assembly]:
    """The same for a run, whose monitor hears what its user should know."""
    with ExitStack() as stack:
        with phases("load"):
            monitor.stage("load model")
            began = busy.sample()
            assembly = stack.enter_context(loaded(config, say=monitor.message, stage=monitor.stage))
            monitor.stage("reach the engine")
            await assembly.connect()
        cores = len(busy.cores())
        slow = busy.hint(began, busy.sample(), cores, config.placement.threads or cores)
        if slow and assembly.placement.device == "cpu":
            monitor.message(slow, "warning")
        renderer, tools = assembly.renderer, any(map(offers_tools, config.environments))
        for note in assembly.notes:
            monitor.message(note, "warning")
        for note in (*assembly.data_notes, *renderer.notes, *(renderer.tool_notes if tools else ())):
            monitor.message(note)
        yield assembly


async def measure(
    assembly: Assembly, actor: Actor, activity: Activity, phases: Phases, when: str = "evaluation"
) -> list[Evaluation]:
    monitor = activity.monitor
    with phases("eval"):
        evaluations = await evaluate(
            assembly.tasksets,
            actor,
            assembly.renderer,
            assembly.config.eval,
            assembly.config.rollout.limits,
            seed=assembly.config.seed,
            redo=assembly.config.rollout.redo,
            on_episode=lambda done, total, label: monitor.stage("eval", done, total, label),
            watch=activity,
            context=assembly.config.rollout.context,
        )
    for evaluation in evaluations:
        for note in evaluation.notes():
            monitor.message(f"{when}: {note}", "warning")
    return evaluations


async def warm_start(
    assembly: Assembly, trainer: Trainer, activity: Activity, phases: Phases, ledger: Ledger
) -> Imitation:
    config, warm, monitor = assembly.config, assembly.config.warm_start, activity.monitor
    assert warm is not None
    with phases("warm_start"):
        monitor.stage("warm start", 0, warm.steps)
        stream = assembly.stream("warm", step=warm.episodes_per_step)
        done = await imitate(trainer, assembly.engine, stream, assembly.renderer, warm,
                             config.rollout.limits, seed=config.seed, monitor=monitor,
                             watch=activity, context=config.rollout.context)  # fmt: skip
    ledger.record("imitated", contents=done.contents)
    ledger.commit()
    monitor.message(f"warm start: {done.steps} supervised steps, loss {done.loss:.3f}")
    if done.failed:
        monitor.message(
            f"warm start: {len(done.failed)} of {done.played} episodes failed and were not imitated: "
            f"{tally(done.failed)}",
            "warning",
        )
    return done


async def export(trainer: Trainer, folder: Path) -> None:
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


def say(text: str, console: Console | None) -> None:
    (console or Console()).print(printable(text), soft_wrap=True, highlight=False, markup=False)

"""One run while it is open: its folder, ledger, monitor, phases and parts, opened alike by every command.

    claimed ──> RunFolder ──opened──> Run ──> measure, warm_start, export
                                       │
                                       └── parts of the configuration (`loaded`)

Not here: what a command does with them, and how a run ends (commands/outcome.py).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from silva import process
from silva.actors.policy import Policy
from silva.assembly import Assembly
from silva.config.diff import forbidden_changes
from silva.config.inputs import input_files
from silva.config.load import Resolved
from silva.config.saved import to_toml
from silva.config.schema import RunConfig
from silva.errors import SilvaError
from silva.evaluation.evaluator import Evaluation
from silva.monitoring import busy
from silva.monitoring.monitor import Monitor
from silva.monitoring.printable import printable
from silva.monitoring.trace import Trace
from silva.orchestrator.evaluations import held_out_changes, record_held_out
from silva.orchestrator.notices import Activity
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import WeightSync
from silva.orchestrator.scripted import ScriptedPlay, warm_start
from silva.orchestrator.state import RunState, restore
from silva.protocols import TaskSet, Trainer
from silva.rollouts.faults import tally
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger
from silva.storage.metrics import truncate_metrics
from silva.storage.placed import placed
from silva.storage.run_folder import RunFolder

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Run:
    """`state`: where it goes on; `checkpoint`: the folder that it goes on from, None if it begins."""

    folder: RunFolder
    ledger: Ledger
    store: CheckpointStore
    state: RunState
    checkpoint: Path | None
    monitor: Monitor
    trace: Trace
    phases: Phases
    activity: Activity
    assembly: Assembly

    @property
    def config(self) -> RunConfig:
        return self.assembly.config

    async def measure(self, when: str = "evaluation") -> list[Evaluation]:
        """The policy plays the held-out tasks. `when` is for messages."""
        parts, stage = self.assembly, self.monitor.stage
        with self.phases("eval"):
            evaluations = await parts.evaluate(
                Policy(parts.engine, parts.renderer, self.config.eval.sampling), parts.renderer,
                lambda done, total, label: stage("eval", done, total, label), self.activity,
            )  # fmt: skip
        for evaluation in evaluations:
            for note in evaluation.notes():
                self.monitor.message(f"{when}: {note}", "warning")
        return evaluations

    async def warm_start(self, sync: WeightSync) -> None:
        monitor, play = self.monitor, self.assembly.scripted(self.activity)
        with self.phases("warm_start"):
            monitor.stage("warm start", 0, play.settings.steps)
            done = await warm_start(sync, play, monitor.stage)
        self.imitated(play)
        monitor.message(f"warm start: {done.steps} supervised steps, loss {done.loss:.3f}")

    def imitated(self, play: ScriptedPlay) -> None:
        """The ledger holds what was imitated, and people are told what could not be."""
        self.ledger.record("imitated", contents=sorted(play.contents))
        self.ledger.commit()
        if play.failed:
            self.monitor.message(
                f"warm start: {len(play.failed)} of {play.played} episodes failed and were not imitated: "
                f"{tally(play.failed)}",
                "warning",
            )

    async def export(self, trainer: Trainer, step: int) -> Path:
        """All of the weights or none, durably: the summary that follows says that the run is done."""
        folder = self.folder.weights / f"step_{step}"
        with self.phases("export"):
            self.monitor.stage("export")
            try:
                with placed(folder, overwrite=True) as temporary:
                    await trainer.export(temporary)
            except SafetensorError as error:  # what it makes of a full disk
                raise SilvaError(
                    f"the weights could not be written to {folder}: {error}. Free some space, then --resume."
                ) from error
        return folder


@contextmanager
def claimed(
    resolved: Resolved,
    advice: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
    console: Console | None = None,
) -> Iterator[RunFolder]:
    """The run's folder, locked. What ends the run from outside is said in words: Ctrl-C where nothing awaits
    it, a disk that takes no more; `advice` says how to go on then."""
    with RunFolder.open(
        Path(resolved.config.output_dir) / resolved.config.name, resume=resume, overwrite=overwrite,
        config=resolved.data, may_change=partial(forbidden_changes, given=resolved.provenance),
        files=input_files(resolved.data), accept_files=accept_files,
    ) as folder:  # fmt: skip
        try:
            yield folder
        except KeyboardInterrupt:
            say(folder.restore() or f"{folder.path}: interrupted; {advice}", console)
            raise
        except OSError as error:
            if isinstance(error, SilvaError) or error.errno not in _DISK:
                raise
            raise SilvaError(
                f"{folder.path} cannot be written: {error.strerror}. Its checkpoints are untouched. "
                f"Free some space (or make it writable), then {advice}."
            ) from error
        finally:
            if restored := folder.restore():
                say(restored, console)


@asynccontextmanager
async def opened(
    resolved: Resolved,
    folder: RunFolder,
    *,
    steps: int,
    notes: Iterable[str] = (),
    console: Console | None = None,
    parts: Callable[..., AbstractContextManager[Assembly]] | None = None,
) -> AsyncIterator[Run]:
    """A run in its folder, new or where its newest checkpoint left it, until the end of the block.

    Args:
        steps: of the whole run, for the display.
        notes: on its configuration.
        parts: where they come from, as `loaded`, which is None.
    """
    config = resolved.config
    ledger = Ledger.open(folder.ledger) if folder.ledger.exists() else Ledger.create(folder.ledger)
    store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
    state, checkpoint = restore(store, ledger)
    if folder.changed_files:
        ledger.record("files_changed", step=state.step, files=folder.changed_files)
        ledger.commit()
    folder.save_config(to_toml(resolved), resolved.data)
    folder.summary.unlink(missing_ok=True)
    kept = None  # the last step that is not done again
    if folder.state != "new":
        kept = state.step if checkpoint else -1
        truncate_metrics(folder.metrics, state.logged)
    with Monitor(folder.path, config.monitoring, name=config.name, total_steps=steps,
                 resume_step=kept, config=resolved.data, console=console) as monitor:  # fmt: skip
        warn = partial(monitor.message, level="warning")
        for note in (*resolved.notes, *notes, *folder.notes):
            monitor.message(note)
        for damaged in store.skipped:
            warn(f"passed over: {damaged}")
        try:
            with ExitStack() as stack:
                trace = stack.enter_context(Trace(folder.trace if config.monitoring.trace else None, warn))
                phases, began = Phases(trace.phase), busy.sample()
                with phases("load"):
                    monitor.stage("load model")
                    made = (parts or loaded)(config, say=monitor.message, stage=monitor.stage)
                    assembly = stack.enter_context(made)
                    monitor.stage("reach the engine")
                    await assembly.connect()
                run = Run(folder, ledger, store, state, checkpoint, monitor, trace, phases,
                          Activity(monitor), assembly)  # fmt: skip
                _tell(run, began)
                yield run
        except SilvaError as error:
            monitor.log(str(error), "error")  # the caller shows it
            raise


def _tell(run: Run, began: busy.BusySample | None) -> None:
    """What is worth knowing of parts, machine and held-out tasks. `began`: before the parts were loaded."""
    monitor, assembly, folder, config = run.monitor, run.assembly, run.folder, run.config
    cores = len(busy.cores())
    slow = busy.hint(began, busy.sample(), cores, config.placement.threads or cores)
    if slow and assembly.device == "cpu":
        monitor.message(slow, "warning")
    renderer, tools = assembly.renderer, any(each.offers_tools for each in config.environments)
    for note in assembly.notes:
        monitor.message(note, "warning")
    for note in (*assembly.data_notes, *renderer.notes, *(renderer.tool_notes if tools else ())):
        monitor.message(note)
    if elsewhere := folder.note_machine(assembly.engine.machine):
        monitor.message(elsewhere, "warning")
    if folder.state == "new":
        record_held_out(folder.path, assembly.tasksets)
    for note in held_out_changes(folder.path, assembly.tasksets, config.eval.tasks):
        monitor.message(note, "warning")


@contextmanager
def loaded(
    config: RunConfig,
    *,
    tasksets: dict[str, TaskSet] | None = None,
    say: Callable[[str], None] = lambda text: None,
    stage: Callable[[str], None] = lambda text: None,
) -> Iterator[Assembly]:
    """The parts of a configuration, until the end of the block. `tasksets`: as of `Assembly`."""
    process.prepare()
    assembly, wait = Assembly(config, tasksets=tasksets, say=say, stage=stage).load(), True
    try:
        with process.loaded():
            yield assembly
    except asyncio.CancelledError:  # Ctrl-C where nothing waits for it, or for the second time
        wait = False
        raise
    finally:
        assembly.close(wait=wait)


def say(text: str, console: Console | None) -> None:
    (console or Console()).print(printable(text), soft_wrap=True, highlight=False, markup=False, emoji=False)

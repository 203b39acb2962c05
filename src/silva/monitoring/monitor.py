"""Tells what a run does: heartbeats, messages, numbers and rollouts, to the terminal and to files.

    loop -- stage() --> watchdog (stacks where nothing moves), terminal, now.json (heartbeat.py)
         -- message() --> run.log, terminal
         -- step() ------> metrics.jsonl, terminal, sinks
         -- rollouts() --> rollouts/step_N.parquet, some of them to sinks

The files that are the record of a run (metrics, rollouts) raise OSError where they cannot be written.
What only shows (terminal, run.log, sinks: TensorBoard, W&B, ...) complains once and stays quiet. All methods
may be called from any thread. What is not here: measuring anything, the summary and the report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console

from silva.monitoring.alerts.signs import Signs
from silva.monitoring.heartbeat import Heartbeat
from silva.monitoring.run_log import start_line
from silva.monitoring.settings import Monitoring
from silva.monitoring.sinks.outlets import Outlets
from silva.monitoring.terminal import Progress, Terminal, doing, make_terminal, stage_text
from silva.monitoring.watchdog import Watchdog
from silva.ports import CLOCK, FILES
from silva.storage.layout import Layout
from silva.storage.metrics import append_metrics, read_metrics
from silva.storage.rollouts import RolloutRow, rollouts_path, truncate_rollouts, write_rollouts

Level = Literal["info", "result", "warning", "error"]


class Monitor:
    """Monitor of one run in `directory` (created if missing); use it as a context manager.

    `resume_step=k` continues a run from its checkpoint at step k: rollouts of later steps are removed first,
    since these steps are done again (-1: of all steps). The caller cuts back the metrics.
    `config` is what sinks show; its plan says what a step was to take.
    """

    def __init__(
        self,
        directory: Path,
        settings: Monitoring,
        *,
        name: str,
        total_steps: int,
        resume_step: int | None = None,
        config: Mapping[str, Any] = {},
        console: Console | None = None,
    ) -> None:
        self._run = Layout(directory)
        self._settings = settings
        self._resume_step = resume_step
        self._progress = Progress(name, total_steps, step=max(resume_step or 0, 0))
        self._terminal = make_terminal(settings.terminal, self._progress, console)
        self._watchdog = Watchdog(settings.stall_after, self._report_stall)
        self._heartbeat = Heartbeat(self._run.now, self._doing)
        self._name, self._config = name, config
        self._outlets = Outlets(settings)
        self._planned = (config.get("plan") or {}).get("seconds") or 0.0
        self._signs = Signs(planned=self._planned)
        self._files_lock = threading.Lock()  # a disk that hangs must not silence the watchdog
        self._show_lock = threading.RLock()
        self._log_works = True

    def __enter__(self) -> Monitor:
        self._run.path.mkdir(parents=True, exist_ok=True)
        self.log(start_line())
        if self._resume_step is not None:
            truncate_rollouts(self._run.rollouts, self._resume_step)
            self._signs = Signs(read_metrics(self._run.metrics), self._planned)
        self._show(lambda: self._terminal.start())
        self._outlets.open(self._run, self._name, self._config, self._resume_step, self.message)
        self._watchdog.start()
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the watchdog and give the terminal back."""
        self._watchdog.stop()
        self._heartbeat.stop()
        self._outlets.close(finished=kind is None)
        with self._show_lock:
            self._show(lambda: self._terminal.close())

    def expect(self, steps: int) -> None:
        """The run has so many steps, which was not known when it was opened."""
        self._progress.total_steps = steps
        self.message(f"{steps} steps")

    def stage(self, name: str, done: int = 0, total: int = 0, waiting_for: str = "") -> None:
        """A sign of life: stage `name` has done `done` of `total` and waits for `waiting_for`."""
        self._watchdog.beat()
        with self._show_lock:
            self._progress.set_stage(name, done, total, waiting_for)
            self._show(lambda: self._terminal.stage())

    def message(self, text: str, level: Level = "info") -> None:
        """Show a message and write it to run.log."""
        with self._show_lock:
            self.log(text, level)
            self._progress.messages.append((level, text))
            self._show(lambda: self._terminal.message(text, level))
        self._outlets.message(level, text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step (or of its evaluation); a sign of life. Keys: docs/files.md."""
        self._watchdog.beat()
        with self._files_lock:
            append_metrics(self._run.metrics, step, metrics)
            signs = self._signs.step(metrics)
        self._outlets.step(step, metrics)
        with self._show_lock:
            self._progress.set_step(step, metrics)
            self._show(lambda: self._terminal.step(step, metrics))
        for sign in signs:
            self.message(f"step {step}: {sign}", "warning")

    def rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write the rollouts of one step, where `settings.rollouts` asks for it.

        May be called several times for a step (training, evaluation): rows of other trajectories stay.
        """
        self._outlets.samples(step, rows)
        if not self._settings.rollouts or not rows:
            return
        with self._files_lock:
            self._run.rollouts.mkdir(exist_ok=True)
            write_rollouts(rollouts_path(self._run.rollouts, step), rows)
        self._watchdog.beat()

    def _doing(self) -> tuple[str, float]:
        p = self._progress
        return doing(p), round(CLOCK.time() - (p.clock() - p.stage_started), 1)

    def _report_stall(self, silence: float, computed: float, stacks: str) -> None:
        stage = stage_text(self._progress)  # who computes beside other programs is slow, and not stuck
        text = f"nothing has moved for {silence:.0f} s ({computed:.0f} s of them computing); stage: {stage}"
        self.message(f"{text}\n{stacks}", "warning")

    def log(self, text: str, level: Level = "info") -> None:
        """Write a message to run.log without showing it."""
        if not self._log_works:
            return
        time = datetime.fromtimestamp(CLOCK.time()).astimezone().isoformat(timespec="seconds")
        try:
            FILES.append(self._run.log, f"{time} {level}: {text}\n".encode(errors="replace"), sync=False)
        except OSError as error:  # the message still reaches the terminal; a full disk must not hide why
            self._log_works = False
            complaint = f"run.log cannot be written: {error}"
            self._show(lambda: self._terminal.message(complaint, "warning"))

    def _show(self, call: Callable[[], None]) -> None:
        """A terminal that was closed, or a pipe that nobody reads, does not end the run."""
        try:
            call()
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self._terminal = Terminal()

"""How a run ends: its summary, its report, its last words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import silva
from silva.monitoring.monitor import Monitor
from silva.monitoring.report import write_report
from silva.monitoring.summary import write_summary
from silva.orchestrator.numbers import Phases, peak_memory_bytes
from silva.orchestrator.run_directory import RunDirectory
from silva.orchestrator.state import RunState
from silva.session import Session


@dataclass(frozen=True)
class Outcome:
    """What a finished run comes to."""

    directory: Path
    summary: Mapping[str, Any]
    report: Path | None
    weights: Path | None


def finish(
    session: Session, state: RunState, phases: Phases, run: RunDirectory, monitor: Monitor, weights: Path
) -> Outcome:
    """Summary, report and the last words of a run."""
    before, after = state.eval_before or [], state.eval_last or []
    summary = {
        "eval_before": before,
        "eval_after": after,
        "steps": state.step,
        "tokens_generated": state.tokens_generated,
        "tokens_trained": state.tokens_trained,
        "seconds": dict(phases.total),
        "peak_memory_bytes": peak_memory_bytes(),
        "seed": session.config.seed,
        "model": session.loaded.name,
        "version": silva.__version__,
    }
    write_summary(run.path, summary)
    report = write_last_report(run, monitor, session)
    for old, new in zip(before, after, strict=False):
        if old["metric"] == "success":
            monitor.message(
                f"held-out success, {old['environment']}: {_shown(old)} before, {_shown(new)} after"
            )
    if report:
        monitor.message(f"report: {report}")
    monitor.message(f"weights: {weights}")
    return Outcome(run.path, summary, report, weights)


def _shown(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.1%} [{row['ci_low']:.1%}, {row['ci_high']:.1%}] of {row['n']}"


def write_last_report(run: RunDirectory, monitor: Monitor, session: Session | None) -> Path | None:
    """None where none is wanted or the disk refuses; without a session its rollouts show tokens, not text."""
    if session is not None and not session.config.monitoring.report:
        return None
    try:
        return write_report(run.path, session.loaded.tokenizer.decode if session else None)  # type: ignore[arg-type]
    except OSError as error:  # the run itself is whole
        monitor.message(f"the report could not be written: {error}", "warning")
        return None

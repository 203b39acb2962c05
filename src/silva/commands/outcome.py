"""How a run ends: its summary, its report, its last words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import silva
from silva.evaluation.evaluator import NLL
from silva.models.loading import name_of
from silva.monitoring.alerts.fall import with_interval
from silva.monitoring.alerts.foretold import lines
from silva.monitoring.alerts.gap import gap
from silva.monitoring.report import write_report
from silva.orchestrator.metrics import peak_memory_bytes
from silva.orchestrator.notices import NOTHING
from silva.orchestrator.state import RunState
from silva.run import Run, say
from silva.storage.metrics import read_metrics
from silva.storage.plain import read_plain
from silva.storage.run_folder import RunFolder
from silva.storage.summary import write_summary

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunOutcome:
    """What a finished run comes to."""

    directory: Path
    summary: Mapping[str, Any]
    report: Path | None
    weights: Path | None

    @property
    def trained(self) -> bool:
        """Whether at least one step taught something."""
        return self.summary.get("steps_trained") != 0


def finish(run: Run, state: RunState, weights: Path) -> RunOutcome:
    """Summary, report and the last words of a run."""
    monitor, folder = run.monitor, run.folder
    before, after = state.eval_before or [], state.eval_last or []
    summary = {
        "eval_before": before,
        "eval_after": after,
        "steps": state.step,
        "steps_trained": state.steps_trained,
        "tokens_generated": state.tokens_generated,
        "tokens_in_rows": state.tokens_in_rows,
        "tokens_trained": state.tokens_trained,
        "seconds": dict(run.phases.total),
        "peak_memory_bytes": peak_memory_bytes(),
        "seed": run.config.seed,
        "model": name_of(run.config.model),
        "version": silva.__version__,
    }
    write_summary(folder.summary, summary)
    for line in last_words(before, after):
        monitor.message(line, "result")
    for line in gap(read_metrics(folder.metrics), after):
        monitor.message(line, "warning")
    if run.config.plan:
        for line in lines(run.config.plan, read_metrics(folder.metrics)):
            monitor.message(line, "result")
    if not state.steps_trained:
        monitor.message(f"nothing was learned from rewards: {NOTHING}", "warning")
    report = write_last_report(run, run.assembly.tokenizer.decode)  # with the warnings above
    if report:
        monitor.message(f"report: {report}", "result")
    monitor.message(f"weights: {weights}", "result")
    return RunOutcome(folder.path, summary, report, weights)


def earlier(folder: RunFolder, console: Console | None = None) -> RunOutcome | None:
    """The outcome of a run that was finished before; None if it was not."""
    if folder.state != "finished":
        return None
    for note in folder.notes:
        say(note, console)
    report = folder.report if folder.report.exists() else None
    return RunOutcome(folder.path, read_plain(folder.summary), report, None)


def stopped(run: Run, otherwise: str) -> None:
    """The last words of a run that Ctrl-C ended. `otherwise`: what it does next if it has no checkpoint."""
    steps = run.store.steps()
    where = f"goes on after step {steps[-1]}" if steps else otherwise
    run.monitor.message(f"stopped; --resume {where}", "warning")
    write_last_report(run)


def last_words(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """One line an environment: its success before and after, or its reward if it reports no success. Held-out
    rows have a loss."""
    lines = []
    for name in dict.fromkeys(row["environment"] for row in (*before, *after)):
        found = [{r["metric"]: r for r in rows if r["environment"] == name} for rows in (before, after)]
        metric = next(m for m in ("success", NLL, "reward") if m == "reward" or any(m in r for r in found))
        first, last = (_shown(rows.get(metric), rows.get("reward")) for rows in found)
        lines.append(f"held-out {metric}, {name}: {first} before, {last} after")
    return lines


def _shown(row: Row | None, reward: Row | None) -> str:
    """`reward`: the row of the same environment's reward, which always exists."""
    left_out = reward["left_out"] if reward else 0
    if row is None or row["mean"] is None:
        return f"no result ({left_out} episodes left out)" if left_out else "not reported"
    form = ".1%" if row["metric"] == "success" else ".3f"
    text = f"{with_interval(row, form)} of {row['n']}"
    if not left_out:
        return text
    bounds = ""
    if row["bound_low"] is not None:
        bounds = f": between {row['bound_low']:{form}} and {row['bound_high']:{form}} with them"
    return f"{text} ({left_out} episodes left out{bounds})"


def write_last_report(run: Run, decode: Any = None) -> Path | None:
    """None where none is wanted or the disk refuses; without `decode` rollouts show tokens, not text."""
    if not run.config.monitoring.report:
        return None
    try:
        return write_report(run.folder.path, decode)
    except OSError as error:  # the run itself is whole
        run.monitor.message(f"the report could not be written: {error}", "warning")
        return None

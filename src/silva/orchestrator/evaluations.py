"""What an evaluation means for a run: whether it is the best so far, whether results fell, what it is worth.

Names of tasks can mislead, so held-out tasks are known by their content. `held_out.json` in the run's folder
holds the digest (`Task.content`) of each, by environment; the ledger holds one for every task that was
trained on. The current tasks are compared with both, because a changed list of questions or another
`eval_share` cannot be seen in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silva.errors import LedgerError, RecordError
from silva.evaluation.evaluator import Evaluation, Standing, records, standing
from silva.monitoring.alerts.fall import fall
from silva.orchestrator.state import RunState
from silva.protocols import TaskSet
from silva.storage.layout import Layout
from silva.storage.ledger import read
from silva.storage.plain import read_plain, write_plain


def compared(state: RunState, evaluations: Sequence[Evaluation]) -> tuple[RunState, bool]:
    """The state with the evaluation of its step, and whether that is the best so far."""
    rows, found, before = records(evaluations), standing(evaluations), state.best
    best = found is not None and found.beats(Standing(**before) if before else None)
    after = state.replace(
        eval_last=rows,
        eval_best=rows if best else state.eval_best,
        best=asdict(found) if best and found else before,
        best_step=state.step if best else state.best_step,
    )
    return after, best


def stalled(state: RunState, patience: int, every: int) -> bool:
    """Whether the last `patience` evaluations (0: however many), each after `every` steps, brought nothing
    better."""
    return (
        bool(patience * every)
        and state.best_step is not None
        and (state.step - state.best_step >= patience * every)
    )


def fallen(state: RunState, now: list[dict[str, Any]], steps: int, checkpoint: Callable[[int], Path]) -> str:
    """Warns if results fell clearly below their best: once, and again at the last step.

    Args:
        state: before the evaluation with the records `now`.
        checkpoint: where the checkpoint of a step would be.
    """
    peaks = [(0, state.eval_before or []), (state.best_step or 0, state.eval_best or [])]
    known = fall(state.eval_last or [], peaks, checkpoint)
    return "" if known and state.step < steps else fall(now, peaks, checkpoint)


def record_held_out(run: Path, tasksets: Mapping[str, TaskSet]) -> None:
    """Write the file of a new run."""
    digests = {label: [task.content() for task in ts.tasks("eval")] for label, ts in tasksets.items()}
    write_plain(Layout(run).held_out, digests)


def held_out_changes(run: Path, tasksets: Mapping[str, TaskSet], tasks: int) -> list[str]:
    """Warnings about an evaluation of `tasks` tasks of each environment; empty if nothing changed.

    Also empty if the folder has no such file: it holds no run, or one of an older version of Silva.
    """
    try:
        known = read_plain(Layout(run).held_out)
        held_out = {digest for digests in known.values() for digest in digests}
        trained = _trained(Layout(run).ledger)
    except FileNotFoundError:
        return []
    except (LedgerError, RecordError) as error:
        return [f"whether the held-out tasks were trained on is not known: {error}"]
    notes = []
    for label, taskset in tasksets.items():
        now = [task.content() for task in taskset.tasks("eval")[:tasks]]
        again, new = sum(d in trained for d in now), sum(d not in held_out for d in now)
        if again:
            notes.append(
                f"{label}: {again} of {len(now)} evaluated tasks were trained on in {run}: success on these "
                "says nothing about new tasks. Evaluate with the environment and the eval_share of the run."
            )
        elif new and (label in known or new < len(now)):  # otherwise the run never had this environment
            notes.append(
                f"{label}: the held-out set changed: {new} of {len(now)} evaluated tasks were not held out "
                f"when {run} began. None was trained on, but earlier results are for other tasks."
            )
    return notes


def _trained(ledger: Path) -> set[str]:
    fields = [e.fields for e in read(ledger) if e.event in ("issued", "imitated")]
    return {digest for f in fields for digest in (f.get("content"), *f.get("contents", ())) if digest}

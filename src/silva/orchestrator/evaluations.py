"""What an evaluation means for a run: whether it is the best so far, and whether results fell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silva.evaluation.evaluator import Evaluation, Standing, records, standing
from silva.monitoring.fall import fall
from silva.orchestrator.state import RunState


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


def fallen(state: RunState, now: list[dict[str, Any]], steps: int, checkpoint: Callable[[int], Path]) -> str:
    """Warns if results fell clearly below their best: once, and again at the last step.

    Args:
        state: before the evaluation with the records `now`.
        checkpoint: where the checkpoint of a step would be.
    """
    peaks = [(0, state.eval_before or []), (state.best_step or 0, state.eval_best or [])]
    known = fall(state.eval_last or [], peaks, checkpoint)
    return "" if known and state.step < steps else fall(now, peaks, checkpoint)

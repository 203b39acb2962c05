"""A run that gets worse: held-out results clearly below its best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Records of one evaluation, see `EVALUATION_KEYS` of summary.py."""


def fall(now: Rows, peaks: Sequence[tuple[int, Rows]], checkpoint: Callable[[int], Path]) -> str:
    """Which result fell, from what value, and where the better weights are; "" if nothing clearly fell.

    Clearly: the 95 % intervals do not overlap. An environment counts by its success, or by its reward if it
    reports no success.

    Args:
        peaks: earlier evaluations with their steps; the best one of each environment counts.
        checkpoint: where the checkpoint of a step would be.
    """
    lines = []
    for row in _headlines(now):
        earlier = [
            (step, each) for step, rows in peaks for each in _headlines(rows)
            if (each["environment"], each["metric"]) == (row["environment"], row["metric"])
        ]  # fmt: skip
        if not earlier:
            continue
        step, best = max(earlier, key=lambda pair: pair[1]["mean"])
        if _end(row, "ci_high") < _end(best, "ci_low"):
            path = checkpoint(step)
            where = f"its checkpoint is {path}" if path.is_dir() else "no checkpoint of that step is kept"
            what = f"held-out {row['metric']} of {row['environment']} fell"
            lines.append(f"{what} to {_shown(row)} from {_shown(best)} at step {step}; {where}")
    return "\n".join(lines)


def _headlines(rows: Rows) -> list[Mapping[str, Any]]:
    solved = {row["environment"] for row in rows if row["metric"] == "success"}
    return [
        row for row in rows
        if row["mean"] is not None
        and row["metric"] == ("success" if row["environment"] in solved else "reward")
    ]  # fmt: skip


def with_interval(row: Mapping[str, Any], form: str) -> str:
    """The mean of a record with its interval; equal rewards have none."""
    known = row["ci_low"] is not None
    interval = f"[{row['ci_low']:{form}}, {row['ci_high']:{form}}]" if known else "(all equal)"
    return f"{row['mean']:{form}} {interval}"


def _end(row: Mapping[str, Any], key: str) -> float:
    """An end of the interval; equal rewards have none."""
    return row["mean"] if row[key] is None else row[key]


def _shown(row: Mapping[str, Any]) -> str:
    return with_interval(row, ".1%" if row["metric"] == "success" else ".3f")

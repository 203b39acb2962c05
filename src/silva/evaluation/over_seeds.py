"""Metrics of several runs that differ in their seed only, as one: means with intervals over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from silva.evaluation.comparison import is_share
from silva.evaluation.statistics import student
from silva.storage.metrics import BOUNDS

Row = Mapping[str, Any]


def over_seeds(runs: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of each run -> rows of the same keys, each with its mean over the runs, and
    Student's 95 % interval of it as `<key>_ci_low` and `<key>_ci_high`.

    A step and a key count if all runs have them. Intervals of shares end at 0 and 1, those of `perf/` at 0.
    Those of one run's evaluation, which are over its tasks, are left out. Equal values, or those of a single
    run, have none.
    """
    by_step = [{(row["step"], _evaluated(row)): row for row in rows} for rows in runs]
    made = []
    for at in sorted(set.intersection(*map(set, by_step)) if by_step else ()):
        rows = [steps[at] for steps in by_step]
        found: dict[str, Any] = {"step": at[0]}
        for key in rows[0]:
            values: list[Any] = [row.get(key) for row in rows]
            if key == "step" or key.endswith(BOUNDS) or not all(map(_number, values)):
                continue
            found[key] = fmean(values)
            if len(runs) > 1:
                found[f"{key}_ci_low"], found[f"{key}_ci_high"] = _interval(key, values)
        made.append(found)
    return made


def _evaluated(row: Row) -> bool:
    """An evaluation may have a row of its own beside that of its step."""
    return any(key.startswith("eval/") for key in row)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _interval(key: str, values: Sequence[float]) -> tuple[float | None, float | None]:
    low, high = student([np.array([value], float) for value in values])
    if not math.isfinite(low):
        return None, None
    share = key.startswith("success/") or is_share(key.rpartition("/")[2])
    if share or key.startswith("perf/"):
        low = max(low, 0.0)
    return low, min(high, 1.0) if share else high

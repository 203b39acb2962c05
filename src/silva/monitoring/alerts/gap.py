"""A run that learned its training tasks and not what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

STEPS = 10  # the last ones, whose training success counts
FAR = 0.2  # above the held-out interval


def gap(steps: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each environment whose training success is far above its held-out success.

    Far: by 20 points or more above the 95 % interval.

    Args:
        steps: rows of metrics.jsonl.
        after: the last evaluation, see `EVALUATION_KEYS` of summary.py.
    """
    lines = []
    for row in after:
        key = f"success/{row['environment']}"
        trained = [step[key] for step in steps if step.get(key) is not None][-STEPS:]
        if row["metric"] != "success" or row["mean"] is None or not trained:
            continue
        if fmean(trained) >= row["ci_high"] + FAR:
            lines.append(
                f"{row['environment']}: success is {fmean(trained):.1%} on training tasks in the last "
                f"{len(trained)} steps, but {row['mean']:.1%} on held-out ones: the policy knows its "
                "training tasks, not what they have in common. More training tasks help, or fewer steps"
            )
    return lines

"""The numbers of a run that people look at first, each in one line: from where to where it went.

Keys are Silva's, then those of PRIME-RL, whose runs at W&B can be looked at too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from silva.storage.metrics import EVAL_DETAILS

LAST = 10  # values whose mean is shown

HEADS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("train/loss", "loss/mean")),
    ("entropy", ("train/entropy", "entropy/all/mean", "entropy/mean")),
    ("mismatch KL", ("train/mismatch_kl", "mismatch_kl/all/mean", "mismatch_kl/mean")),
    (
        "reward",
        ("reward/raw", "reward/*/raw", "train/agg/effective/*/reward/mean", "reward/all/mean", "reward/mean"),
    ),
    ("success", ("success/*",)),
    ("evaluation", ("eval/*",)),
    ("gradient norm", ("train/grad_norm", "optim/grad_norm")),
    (
        "reply tokens",
        ("rollout/response_tokens", "train/agg/effective/num_output_tokens/mean", "decode_len/all/mean"),
    ),
    ("failed episodes", ("trajectories/failed",)),
    ("throughput (tokens/s)", ("perf/tokens_per_second", "perf/throughput")),
    ("MFU", ("perf/mfu",)),
    ("seconds", ("perf/seconds/*", "time/step")),
    ("memory (bytes)", ("perf/peak_memory_bytes",)),
    ("memory (GiB)", ("perf/peak_memory",)),
)
"""What a line is about, and the keys that say it; one * stands for anything."""


def numbers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each key that has values: `about`, `key`, the steps and values of the first and the last one,
    the mean of the last `LAST`, and the lowest and the highest."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                series.setdefault(key, []).append((row["step"], value))
    return [
        _number(about, key, series[key])
        for about, patterns in HEADS
        for pattern in patterns
        for key in sorted(series)
        if _matches(key, pattern)
    ]


def _matches(key: str, pattern: str) -> bool:
    start, star, end = pattern.partition("*")
    if not star:
        return key == pattern
    inside = len(key) > len(start) + len(end)
    return inside and key.startswith(start) and key.endswith(end) and not key.endswith(EVAL_DETAILS)


def _number(about: str, key: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    values = [value for _, value in points]
    return {
        "about": about, "key": key, "values": len(points),
        "first_step": points[0][0], "first": points[0][1], "last_step": points[-1][0], "last": points[-1][1],
        "mean_of_last": fmean(values[-LAST:]), "low": min(values), "high": max(values),
    }  # fmt: skip

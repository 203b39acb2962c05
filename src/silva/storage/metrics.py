"""`metrics.jsonl`: the numbers of each step, one JSON object a line.

A row is `{"step": n, ...}` with sorted keys. What depends on speed or memory has a key
under `perf/`, so that two runs of one seed agree in all others, byte for byte. JSON has no NaN: a number
that is not finite is written as null and its key listed under "nonfinite".
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.ports import FILES

BOUNDS = ("_ci_low", "_ci_high", "_bound_low", "_bound_high")
EVAL_DETAILS = (*BOUNDS, "/left_out", "/thoughts")
"""Suffixes of keys under eval/ that are no result of their own: the interval of a mean, the episodes left out
of it, and the share of replies with thoughts."""


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append one row and sync it. OSError where the disk does not take it."""
    numbers = {key: _number(metrics[key]) for key in sorted(metrics)}
    bad = [key for key, value in numbers.items() if not math.isfinite(value)]
    row = {"step": step} | ({"nonfinite": bad} if bad else {}) | numbers | dict.fromkeys(bad)
    FILES.append(path, (json.dumps(row, allow_nan=False) + "\n").encode(), sync=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows in file order; a torn last line is left out, a missing file has none.

    Raises RecordError if the file cannot be read, and, with the line, where any other line is not a JSON
    object with a step.
    """
    return [row for _, row in _lines(path)]


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the rows after `last_step` and a torn last line, all or nothing."""
    if not path.exists():
        return
    kept = b"".join(line for line, row in _lines(path) if row["step"] <= last_step)
    if kept != path.read_bytes():
        FILES.write_atomic(path, kept)


def last_step(path: Path) -> int | None:
    """The step of the last line that is whole, whatever stands before it; None if there is none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):
                return int(json.loads(line)["step"])
    return None


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):  # the writer was killed half-way: only ever the last line
            return
        try:
            row = json.loads(line)
            row["step"] + 0
        except (ValueError, TypeError, KeyError) as error:
            got = line.decode(errors="replace").strip()[:80]
            raise RecordError(f"{path}:{number}: got {got!r}, expected a JSON object with a step") from error
        yield line, row


def _number(value: Any) -> float:
    """Counts stay whole numbers; NumPy and torch scalars become plain ones."""
    return int(value) if isinstance(value, int) else float(value)

"""A run as `silva monitor` sees it, whoever keeps its numbers: rows of metrics, and rollouts as rows of text.

a folder of Silva ─────┐
W&B, offline (files) ──┼──> Followed ──> numbers.py (a summary), plots.py
W&B, online ───────────┘
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.monitoring.run_log import read_log
from silva.monitoring.sinks.table import COLUMNS, table
from silva.storage.layout import Layout
from silva.storage.metrics import last_step, read_metrics
from silva.storage.rollouts import read_columns, read_rollouts, rollouts_in
from silva.storage.run_folder import standing

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Followed:
    """`rows`: of metrics, by step; `samples`: rows with the keys of `COLUMNS`, the newest step first."""

    name: str
    rows: Sequence[Row]
    samples: Iterator[Row]
    state: str = ""
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class ListedRun:
    """A run in a list. `changed`: seconds since 1970."""

    name: str
    state: str
    step: int | None
    steps: int | None
    changed: float


def runs_in(folder: Path) -> list[ListedRun]:
    """The runs in a folder of runs, the one that changed last first; seeds of one run are several."""
    ledgers = sorted([*folder.glob("*/ledger.jsonl"), *folder.glob("*/seed_*/ledger.jsonl")])
    found = [_listed(folder, path.parent) for path in ledgers]
    return sorted(found, key=lambda each: -each.changed)


def from_folder(folder: Path) -> Followed:
    """Raises RecordError if it holds no run, or what it holds cannot be read."""
    run = Layout(folder)
    if not (run.metrics.is_file() or run.ledger.is_file()):
        raise RecordError(f"{folder}: got no run; expected a folder with metrics.jsonl, such as runs/NAME")
    log = read_log(run.log) if run.log.is_file() else None
    told = log.warnings if log else []
    warnings = [f"{text} ({count} times)" if count > 1 else text for _, text, count in told]
    return Followed(folder.name, read_metrics(run.metrics), _samples(run), standing(run.path), warnings)


def _samples(run: Layout) -> Iterator[Row]:
    """Rollouts are read file by file, and only those that somebody takes."""
    for path in reversed(rollouts_in(run.rollouts).values()):
        rewards = [row["reward_raw"] for row in read_columns(path, ["reward_raw"])]
        for index in sorted(range(len(rewards)), key=rewards.__getitem__):
            yield dict(zip(COLUMNS, table(read_rollouts(path, [index]))[0], strict=True))


def _listed(root: Path, folder: Path) -> ListedRun:
    run = Layout(folder)
    changed = max(path.stat().st_mtime for path in (run.ledger, run.metrics, run.log) if path.exists())
    steps = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        steps = tomllib.loads(run.config_toml.read_text())["steps"]
    return ListedRun(
        str(folder.relative_to(root)), standing(run.path), last_step(run.metrics), steps, changed
    )

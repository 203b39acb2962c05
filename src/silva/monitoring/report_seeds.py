"""The page of several runs that differ in their seed only: that of a run (report.py), its curves and results
means over the seeds with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.monitoring.report import charts, config_line, evaluations, page
from silva.ports import FILES
from silva.storage.layout import Layout

Row = Mapping[str, Any]


def write_seeds_report(
    folder: Path, metrics: Sequence[Row], summaries: Mapping[int, Row], warnings: Sequence[str]
) -> Path:
    """Write `folder/report.html` (atomic) and return its path.

    Args:
        metrics: what `evaluation.over_seeds` gives.
        summaries: summary.json of each seed.
        warnings: what people should know.

    Raises:
        OSError: the file cannot be written.
    """
    before, after = before_and_after(metrics)
    (first, *_), seeds = summaries.values(), ", ".join(map(str, summaries))
    config = Layout(folder / f"seed_{next(iter(summaries))}").config_toml
    facts = [
        ("model", first["model"], "text"),
        ("seeds (means, and intervals over them)", seeds, "text"),
        ("steps of each", max(each["steps"] for each in summaries.values()), "count"),
        ("tokens generated", sum(each["tokens_generated"] for each in summaries.values()), "count"),
        ("tokens trained (with a loss)", sum(each["tokens_trained"] for each in summaries.values()), "count"),
    ]
    data = {
        "name": folder.resolve().name,
        "evaluation": False,
        "headline": {"finished": True, "before": before, "after": after, "facts": facts},
        "warnings": [["warning", text, 1] for text in warnings],
        "charts": charts(metrics),
        "lengths": None,
        "samples": None,
        "rollouts": {"total": 0, "shown": 0, "counts": {}, "rows": []},
        "forests": [],
        "config": [config_line(line) for line in config.read_text("utf-8").splitlines()],
        "problems": [],
    }
    path = Layout(folder).report
    FILES.write_atomic(path, page(data).encode())
    return path


def before_and_after(metrics: Sequence[Row]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The held-out results of the first and of the last evaluation."""
    rows = [row for row in metrics if evaluations(row)]
    return (evaluations(rows[0]), evaluations(rows[-1])) if rows else ([], [])

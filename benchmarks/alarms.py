"""Signs of collapse that finished runs would have been told: in healthy ones each is a false alarm.

.venv/bin/python benchmarks/alarms.py runs/agent runs/served
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from common import table

from silva.monitoring.alerts.signs import Signs
from silva.storage.metrics import read_metrics


def main() -> int:
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    lines = list[list[str]]()
    for folder in map(Path, sys.argv[1:]):
        merged: dict[int, dict[str, Any]] = {}
        for row in read_metrics(folder / "metrics.jsonl"):  # training and evaluation of a step are two
            merged.setdefault(row["step"], {}).update(row)
        signs, rows = Signs(), [row for step, row in sorted(merged.items()) if step > 0]
        told = [f"step {row['step']}: {text.partition(':')[0]}" for row in rows for text in signs.step(row)]
        lines.append([folder.name, str(len(rows)), str(len(told)), "; ".join(told)])
    print(table(["run", "steps", "signs", "which"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Events of a run, one JSON object a line:

{"time": ..., "event": "step", "step": 3, "metrics": {...}}
{"time": ..., "event": "message", "level": "warning", "text": ...}
{"time": ..., "event": "sample", ...}   the columns of table.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.monitoring.sinks.table import COLUMNS, table
from silva.ports import CLOCK
from silva.storage.rollouts import RolloutRow
from silva.storage.summary import finite


class JsonLines:
    """A `Sink` that appends to a file or a named pipe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors="replace")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step=step, metrics=dict(metrics))

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        for row in table(rows):
            self._write("sample", **dict(zip(COLUMNS, row, strict=True)))

    def message(self, level: str, text: str) -> None:
        self._write("message", level=level, text=text)

    def close(self, finished: bool) -> None:
        self._write("end", finished=finished)
        self._file.close()

    def _write(self, event: str, **fields: Any) -> None:
        row = finite({"time": CLOCK.time(), "event": event, **fields})
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

"""`journal.jsonl`: episodes of an evaluation that goes on, one line each, written as they end.

A line is a `RolloutRow` as `wire/codec.py` encodes it, or `{"spent": {...}}`, what a paid service has counted
so far. Each line is with the operating system before the next one, so a killed process loses none; it is on
disk after `BATCH` lines, and when the journal is closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.ports import FILES
from silva.storage.rollouts import RolloutRow
from silva.wire.codec import decode, encode

BATCH = 32
_SPENT = b'{"spent":'


class Journal:
    """Appends to a journal. Raises OSError if the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, 0

    def append(self, row: RolloutRow, spent: Mapping[str, Any] | None = None) -> None:
        """One episode, and what everything has cost with it."""
        lines = encode(row)
        if spent is not None:
            lines += _spent_line(spent)
        self._waiting += 1
        FILES.append(self._path, lines, sync=self._waiting == BATCH)
        self._waiting %= BATCH

    def append_spent(self, spent: Mapping[str, Any]) -> None:
        """What everything has cost, episodes that were not finished among it."""
        FILES.append(self._path, _spent_line(spent))

    def close(self) -> None:
        if self._waiting and self._path.exists():
            FILES.fsync(self._path)
        self._waiting = 0


def _spent_line(spent: Mapping[str, Any]) -> bytes:
    return _SPENT + json.dumps(spent).encode() + b"}\n"


def read_journal(path: Path) -> tuple[list[RolloutRow], dict[str, Any]]:
    """Rows in file order, and the last thing that was spent ({} if nothing was). A torn last line is cut off.

    Raises:
        RecordError: any other line is damaged; it says which.
    """
    if not path.exists():
        return [], {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):  # the writer was killed half-way
        FILES.truncate(path, whole)
    rows, spent = list[RolloutRow](), dict[str, Any]()
    for number, line in enumerate(data[:whole].splitlines(keepends=True), 1):
        try:
            if line.startswith(_SPENT):
                spent = json.loads(line)["spent"]
            else:
                rows.append(decode(RolloutRow, line))
        except (RecordError, ValueError) as error:
            raise RecordError(f"{path}:{number}: damaged ({error}); --overwrite begins again") from error
    return rows, spent

"""When the lines of a journal are on disk; what is read of it is in tests/evaluation/test_store.py."""

from __future__ import annotations

import random
from pathlib import Path

from tests.monitoring.fake_run import rollout

from silva.ports import Files, use_files
from silva.storage.journal import BATCH, Journal


class Synced(Files):
    """Notes how many lines a file had each time that it was synced."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def fsync(self, path: Path) -> None:
        super().fsync(path)
        self.lines.append(path.read_bytes().count(b"\n"))


def test_lines_are_on_disk_after_every_batch_and_when_the_journal_is_closed(tmp_path: Path) -> None:
    row = rollout(1, 0, random.Random(0), 0.5)
    with use_files(Synced()) as disk:
        journal = Journal(tmp_path / "journal.jsonl")
        for _ in range(2 * BATCH + 3):
            journal.append(row)
        assert disk.lines == [BATCH, 2 * BATCH]
        for _ in range(2):  # the second time nothing is waiting
            journal.close()
            assert disk.lines == [BATCH, 2 * BATCH, 2 * BATCH + 3]

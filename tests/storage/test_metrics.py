"""metrics.jsonl: cut back to a checkpoint, and read whatever a kill has left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from silva.errors import RecordError
from silva.storage.metrics import append_metrics, last_step, read_metrics, truncate_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_of_later_steps_and_a_torn_line_are_taken_back(path: Path) -> None:
    for step in range(1, 6):
        append_metrics(path, step, {"reward/raw": step / 10})
    with open(path, "a") as file:
        file.write('{"step": 6, "rewa')
    truncate_metrics(path, 3)
    append_metrics(path, 4, {"reward/raw": 0.9})
    assert [(r["step"], r["reward/raw"]) for r in read_metrics(path)] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]  # fmt: skip


def test_without_the_file_there_is_nothing_to_read_or_cut(path: Path) -> None:
    truncate_metrics(path, 1)
    assert (read_metrics(path), last_step(path), path.exists()) == ([], None, False)


def test_a_folder_in_its_place_is_named(path: Path) -> None:
    path.mkdir()
    with pytest.raises(RecordError, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("data", "step"),
    [(b'{"step": 1}\n{"step": 2}', 1), (b'rubbish\n{"step": 2}\n[]\n{"a": 1}\n', 2), (b'{"step": 1', None)],
)
def test_the_last_whole_row_says_how_far_a_run_came(path: Path, data: bytes, step: int | None) -> None:
    path.write_bytes(data)
    assert last_step(path) == step

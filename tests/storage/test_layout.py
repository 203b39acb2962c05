"""Where the files of a run lie, and which step an entry belongs to."""

from __future__ import annotations

from pathlib import Path

from silva.storage.layout import step_path, steps_in


def test_entries_are_listed_by_step_and_others_are_left_out(tmp_path: Path) -> None:
    others = ["tmp-step_3-1f3a", "old-step_4", "step_x", "step_7.parquet", "best"]
    for name in ["step_10", "step_9", "step_100", *others]:
        (tmp_path / name).touch()
    assert list(steps_in(tmp_path)) == [9, 10, 100]
    assert steps_in(tmp_path, ".parquet") == {7: tmp_path / "step_7.parquet"}
    assert step_path(tmp_path, 7, ".parquet") == tmp_path / "step_7.parquet"


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert steps_in(tmp_path / "checkpoints") == {}

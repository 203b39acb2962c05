from __future__ import annotations

from pathlib import Path

import pytest

from silva.storage.machine import note_machine, read_machines

HERE, THERE = {"processor": "A", "threads": 2}, {"processor": "B", "threads": 2}


def test_only_changes_are_written_and_only_they_are_said(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert (note_machine(path, HERE), note_machine(path, HERE)) == ("", "")
    assert note_machine(path, THERE).endswith("does not repeat bit for bit (processor was 'A', is 'B')")
    assert read_machines(path) == [HERE, THERE]


@pytest.mark.parametrize("text", ["{", '{"processor": "A"}'])
def test_a_damaged_file_is_begun_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert note_machine(path, HERE) == ""
    assert read_machines(path) == [HERE]

from __future__ import annotations

from pathlib import Path

from silva.storage.held_out import read_held_out, write_held_out


def test_the_file_holds_lists_of_digests_by_environment(tmp_path: Path) -> None:
    path = tmp_path / "held_out.json"
    assert read_held_out(path) is None
    write_held_out(path, {"lake": ["a1", "b2"], "bandit": []})
    assert path.read_text() == '{\n "lake": [\n  "a1",\n  "b2"\n ],\n "bandit": []\n}\n'
    assert read_held_out(path) == {"lake": ["a1", "b2"], "bandit": []}

"""`held_out.json`: the digests (`Task.content`) of the tasks that a run holds out, by environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from silva.ports import FILES


def write_held_out(path: Path, digests: Mapping[str, Sequence[str]]) -> None:
    """All or nothing. OSError where the disk does not take it."""
    FILES.write_atomic(path, (json.dumps(digests, indent=1) + "\n").encode())


def read_held_out(path: Path) -> dict[str, list[str]] | None:
    """The digests by environment; None without the file: no run, or one of an older version of Silva."""
    return json.loads(path.read_bytes()) if path.is_file() else None

"""Small files of plain JSON, written whole and read whole, or refused by name.

config.json, summary.json   see run_folder.py and summary.py
held_out.json   digests (`Task.content`) of the tasks that a run holds out, a list for each environment
machine.json    what has computed a run, a list with one more object each time that it changed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.errors import RecordError
from silva.ports import FILES


def write_plain(path: Path, value: Any) -> None:
    """All or nothing. OSError where the disk does not take it, ValueError for NaN."""
    FILES.write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_plain(path: Path, kind: type = dict) -> Any:
    """What the file holds, a dict or a list as `kind` says.

    Raises:
        FileNotFoundError: it is missing.
        RecordError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise RecordError(f"{path}: got {str(value)[:80]!r}, expected {expected} in JSON")
    return value


def note_machine(path: Path, machine: Mapping[str, Any]) -> str:
    """Append what computes the run from now on, if it has changed. A damaged file begins again.

    Returns:
        a message that says what differs from the machine before; "" if nothing does or there was none.
    """
    try:
        known = read_plain(path, list)
    except (FileNotFoundError, RecordError):
        known = []
    old = known[-1] if known else None
    if machine == old:
        return ""
    write_plain(path, [*known, machine])
    if old is None:
        return ""
    changed = [
        f"{key} was {old.get(key)!r}, is {machine.get(key)!r}"
        for key in {**old, **machine}
        if old.get(key) != machine.get(key)
    ]
    return (
        "this machine may round differently from the one that has computed the run so far: the run "
        f"continues, but does not repeat bit for bit ({'; '.join(changed)})"
    )

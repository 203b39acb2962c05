"""`machine.json`: what has computed a run, a list with one more object each time that it changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.ports import FILES


def note_machine(path: Path, machine: Mapping[str, Any]) -> str:
    """Append what computes the run from now on, if it has changed.

    Returns:
        a message that says what differs from the machine before; "" if nothing does or there was none.
    """
    known = read_machines(path)
    old = known[-1] if known else None
    if machine == old:
        return ""
    FILES.write_atomic(path, (json.dumps([*known, machine], indent=1) + "\n").encode())
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


def read_machines(path: Path) -> list[dict[str, Any]]:
    """The machines in the order in which they computed; none where the file is missing or damaged."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return known if isinstance(known, list) else []

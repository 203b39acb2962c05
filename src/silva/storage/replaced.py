"""The earlier run in a folder while a new one replaces it. It is removed once the new one has done a step.

    put_aside   a, b, c -> .replacing/ one by one, then .replacing/ -> .replaced/: now it holds everything
    remove      .replaced/ -> .removed/: from here on the run is removed; then .removed/ is deleted
    recover     after a failure or a kill, depending on what is in the folder:
                .removed/    delete it
                .replaced/   if the new run has a checkpoint, remove; otherwise delete what the new run wrote,
                             .replaced/ -> .replacing/, and continue below
                .replacing/  the rest of the folder belongs to the earlier run too: move the content back

Each arrow is a rename inside the folder, so a kill at any point leaves one of these states. The caller holds
the lock of the folder; its file is in `keep` and stays in place.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from silva.ports import FILES
from silva.storage.layout import Layout, steps_in

REPLACING, REPLACED, REMOVED = ".replacing", ".replaced", ".removed"
FOLDERS = (REPLACING, REPLACED, REMOVED)


def put_aside(path: Path, keep: Collection[str]) -> None:
    """Move everything in `path` except `keep` into `.replaced/`."""
    aside = path / REPLACING
    aside.mkdir()
    for entry in sorted(path.iterdir()):
        if entry.name not in (*keep, REPLACING):
            FILES.rename(entry, aside / entry.name)
    FILES.fsync_dir(aside)
    FILES.rename(aside, path / REPLACED)
    FILES.fsync_dir(path)


def remove(path: Path) -> None:
    """Delete the earlier run for good."""
    FILES.rename(path / REPLACED, path / REMOVED)
    FILES.fsync_dir(path)
    FILES.remove_tree(path / REMOVED)


def returns(path: Path) -> bool:
    """Whether `recover` would put the earlier run back."""
    if (path / REPLACED).is_dir():
        return not steps_in(Layout(path).checkpoints)
    return (path / REPLACING).is_dir()


def recover(path: Path, keep: Collection[str]) -> Literal["restored", "removed"] | None:
    """Complete what was begun: the earlier run is back or removed; None if there is none."""
    if (path / REMOVED).is_dir():
        FILES.remove_tree(path / REMOVED)
        return "removed"
    if (path / REPLACED).is_dir():
        if not returns(path):
            remove(path)
            return "removed"
        for entry in sorted(path.iterdir()):
            if entry.name not in (*keep, REPLACED):
                FILES.remove_tree(entry)
        FILES.fsync_dir(path)
        FILES.rename(path / REPLACED, path / REPLACING)
    aside = path / REPLACING
    if not aside.is_dir():
        return None
    for entry in sorted(aside.iterdir()):
        FILES.rename(entry, path / entry.name)
    FILES.fsync_dir(path)
    aside.rmdir()
    return "restored"

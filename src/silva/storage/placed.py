"""Outputs of commands, files or folders, that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from silva.errors import RunFolderError
from silva.ports import FILES


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raises RunFolderError if something is at `path` that may not be replaced."""
    if path.exists() and not overwrite:
        raise RunFolderError(f"{path}: exists already; choose another --output, or add --overwrite")


@contextmanager
def placed(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A name beside `path`, where the caller writes a file or makes a folder; it becomes `path` at the end.

    If the caller fails, what was written is removed and what was at `path` stays.

    Raises:
        RunFolderError: something is at `path`, and `overwrite` is False; nothing is written then.
        OSError: the disk does not take it.
    """
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary, aside = (path.with_name(f".{path.name}.{kind}-{mark}") for kind in ("tmp", "old"))
    try:
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            FILES.fsync_dir(file) if file.is_dir() else FILES.fsync(file)
        refuse_existing(path, overwrite)  # others may have written it in the meantime
        if path.exists():
            FILES.rename(path, aside)  # a folder cannot replace a full one
        try:
            FILES.rename(temporary, path)
        except BaseException:
            if aside.exists():
                FILES.rename(aside, path)
            raise
        FILES.fsync_dir(path.parent)
    finally:
        FILES.remove_tree(temporary)
        if path.exists():
            FILES.remove_tree(aside)

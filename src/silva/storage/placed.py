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


def refuse_lossy(path: Path, source: Path, mark: str = "") -> None:
    """Refuse to overwrite what is no earlier output of this kind.

    Args:
        source: what the output is made of, a file or a folder.
        mark: pattern of a file that an output has which is a folder; "": an output is a file.

    Raises:
        RunFolderError: at `path` is the source, a folder that holds it, or something else.
    """
    here, read = path.resolve(), source.resolve()
    if path.exists() and here in (read, *read.parents):
        raise RunFolderError(f"{path}: holds {source}, which is converted; choose another --output")
    if path.is_dir() and (not mark or (any(path.iterdir()) and not any(path.glob(mark)))):
        kind = f"one with {mark}" if mark else "a file"
        raise RunFolderError(f"{path}: got a folder, expected {kind} to overwrite; choose another --output")


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

"""Outputs of commands, files or folders, that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from silva.errors import RunFolderError, SilvaError
from silva.ports import FILES
from silva.scratch import held_folder, locked

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What the operating system says of a write only."""
_ASIDE = ".before"  # no name of an output
_HIDDEN = re.compile(r"\.(.+)\.silva-[a-z0-9_]{8}")  # the folder of an output, as `held_folder` names it


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
def writing(path: Path) -> Iterator[None]:
    """A disk that does not take the output `path` is said in words; what else fails passes as it is, such as
    reading a source.

    Raises:
        RunFolderError: it is full, or nothing may be written there.
    """
    try:
        yield
    except Exception as error:
        number = _refused(error, path)
        if not number:
            raise
        raise RunFolderError(
            f"{path} cannot be written: {os.strerror(number)}; choose another --output, or make room there"
        ) from error


def _refused(error: Exception, path: Path) -> int:
    """The operating system's number of a write that failed; 0 for every other error."""
    if not isinstance(error, OSError):  # safetensors has an exception of its own, with the number as text
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found and int(found[1]) in FULL else 0
    if isinstance(error, SilvaError) or not error.errno:
        return 0
    if error.errno in FULL or not isinstance(error.filename, str):
        return error.errno if error.errno in FULL else 0
    about = Path(error.filename)
    beside = any(
        each.name.startswith((_hidden(path), f".{path.name}.tmp-")) for each in (about, *about.parents)
    )
    own = beside or path in (about, *about.parents) or about in path.parents
    return error.errno if own else 0


@contextmanager
def placed(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A name where the caller writes a file or makes a folder; it becomes `path` at the end.

    It lies in a hidden folder beside `path`, where the caller may put what is needed for a while, too. If the
    caller fails, what was written is removed and what was at `path` stays. What killed processes left beside
    `path`, of any output, is removed by the next one, or put back if it had been at its place.

    Raises:
        RunFolderError: something is at `path`, and `overwrite` is False; nothing is written then.
        OSError: the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _tidy(path.parent)
    refuse_existing(path, overwrite)
    with held_folder(_hidden(path), path.parent) as folder:
        temporary, aside = folder / path.name, folder / _ASIDE
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            FILES.fsync_dir(file) if file.is_dir() else FILES.fsync(file)
        refuse_existing(path, overwrite)  # others may have written it in the meantime
        if path.is_dir():
            FILES.rename(path, aside)  # a folder cannot replace a full one
        try:
            FILES.rename(temporary, path)
        except BaseException:
            if aside.exists():
                FILES.rename(aside, path)
            raise
        FILES.fsync_dir(path.parent)


def _hidden(path: Path) -> str:
    return f".{path.name}.silva-"


def _tidy(parent: Path) -> None:
    """Remove what killed processes left of their work on outputs in `parent`."""
    for folder in parent.glob(".*.silva-*"):
        if not (found := _HIDDEN.fullmatch(folder.name)):
            continue
        path = parent / found[1]
        with suppress(OSError), locked(folder):
            if (folder / _ASIDE).exists() and not path.exists():  # killed between two renames
                FILES.rename(folder / _ASIDE, path)
            FILES.remove_tree(folder)

"""Folders for what can be made again: the user's cache, and private ones among the temporary files.

    silva-sockets-x3k1v9qa/    mode 0700; locked (flock) as long as its process lives

A killed process cannot tidy up. A shell of its own waits for its end and removes the folder then. If that was
killed too, the lock is gone all the same, and the first folder that another process makes here removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from silva.errors import ConfigError
from silva.signals import held

KINDS = ("sockets", "mcp", "miniwob", "probe", "ray", "scienceworld", "weights")
MEMORY = Path("/dev/shm")
"""Files here are shared memory (Linux)."""
REMOVE = 'n=0; while rm -rf -- "$1"; [ -e "$1" ] && [ $((n += 1)) -le 100 ]; do sleep 0.1; done'
"""In a shell. What is ending writes into its folder until then: `rm` fails meanwhile, and is tried again."""
REAPER = f'trap "" HUP INT TERM; read -r _; {REMOVE}'
"""Its input ends with the process that has the other end. Clusters send signals to all processes."""


def cache_folder() -> Path:
    """SILVA_CACHE, else silva/ in the user's cache folder."""
    if base := os.environ.get("SILVA_CACHE"):
        return Path(base).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")).expanduser() / "silva"


@contextlib.contextmanager
def private_folder(kind: str, *, longest: int = 4096, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end, with all that is in it, also if this process is killed.

    Args:
        kind: one of `KINDS`, which stands in its name.
        longest: bytes that its path may have; if TMPDIR is too long for them, it lies elsewhere.
        parent: where it lies; None: among the temporary files.

    Raises:
        ConfigError: there is no place for so short a path.
    """
    assert kind in KINDS
    prefix = f"silva-{kind}-"
    parent = parent or _parent(longest - len(f"/{prefix}12345678"))
    _tidy(parent)
    with held_folder(prefix, parent) as path, _reaped(path):
        yield path


def holds_weights(path: Path) -> bool:
    """Whether a resolved path is in a private folder of weights, in shared memory, of this user."""
    parts = path.relative_to(MEMORY).parts if path.is_relative_to(MEMORY) else ()
    if not parts or not parts[0].startswith("silva-weights-"):
        return False
    return (MEMORY / parts[0]).lstat().st_uid == os.getuid()


@contextlib.contextmanager
def held_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, locked as long as its process lives; removed at the end."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(path))
            except (BlockingIOError, FileNotFoundError):  # another process tidied up between these two lines
                continue
            except OSError:  # a file system without locks: what a kill leaves there stays
                pass
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            yield path
            return


@contextlib.contextmanager
def _reaped(path: Path) -> Iterator[None]:
    import subprocess  # here, so that help stays quick

    try:
        with held():  # until the shell has set its trap
            shell = subprocess.Popen(
                ["sh", "-c", REAPER, "sh", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C, and a kill of the group, are not for it
            )
    except OSError:  # what a kill leaves is removed by the next process
        yield
        return
    with shell:  # closes its input, and waits
        yield


def _parent(longest: int) -> Path:
    given = tempfile.gettempdir()
    for name in (given, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"):
        if name and len(os.fsencode(name)) <= longest and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise ConfigError(
        f"TMPDIR = {given}: got a path of {len(os.fsencode(given))} bytes, expected at most {longest}, as "
        "the path of a socket must be short; neither XDG_RUNTIME_DIR nor /tmp can be used instead"
    )


@functools.cache
def _tidy(parent: Path) -> None:
    """Remove the folders of this user's processes that are gone."""
    for kind in KINDS:
        for path in parent.glob(f"silva-{kind}-*"):
            with contextlib.suppress(OSError), locked(path):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a folder. OSError if it is not there any more, another's, or locked by another process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not os.path.samestat(found, os.lstat(path)):
            raise PermissionError(f"{path} is another's")
        yield
    finally:
        os.close(descriptor)

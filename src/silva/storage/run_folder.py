"""The folder of one run, `runs/<name>/`: who may write in it, and whether to begin, go on or refuse.

    nothing there                -> new
    a run, no flag               -> refused; the message names --resume and --overwrite
    a run that has done nothing  -> new, whatever the flag
    a run, --overwrite           -> put aside, new; removed when the new run calls `begun`, else put back
    a run, --resume              -> resumed; new if it had done nothing yet; finished if it is done

While open, the folder is locked: two processes never write one run. The lock dies with its process.
`--overwrite` removes only what a run writes (`WRITTEN`); it refuses a folder that holds anything else.

config.json is written and read here. The other files have modules of their own; layout.py says where they
lie.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from silva.config.inputs import FILES_KEY
from silva.errors import LedgerError, RecordError, RunFolderError
from silva.ports import FILES
from silva.storage import replaced
from silva.storage.layout import Layout, steps_in
from silva.storage.metrics import last_step
from silva.storage.plain import note_machine, read_plain, write_plain

State = Literal["new", "resumed", "finished"]
Standing = Literal["running", "finished", "interrupted"]
LOCK = ".silva.lock"
SHOWN_FILES = 10  # in an error
WRITTEN = frozenset(
    {LOCK, *replaced.FOLDERS, ".DS_Store", *(path.name for path in vars(Layout(Path())).values())}
)
"""All names in a run's folder. macOS adds .DS_Store."""
_LEFTOVER = re.compile(r"\..+\.tmp-[0-9a-f]+")  # of a write that was killed before its rename


class RunFolder(Layout):
    """An open run and its paths. `state` says how to go on, `notes` what to tell the user.

    Close it, or use `with`.
    """

    def __init__(self, path: Path, lock: TextIO, files: Mapping[str, str], accept_files: bool) -> None:
        super().__init__(path)
        self.files = files
        self.changed_files: dict[str, list[str]] = {}  # digests before and now, of a resumed run
        self._accept_files = accept_files
        self.state: State = "new"
        self.notes: list[str] = []
        self._lock = lock
        self._replaces = False
        self.back = False  # an earlier run is in the folder again, since this one came to nothing

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        resume: bool,
        overwrite: bool,
        config: Mapping[str, Any],
        may_change: Callable[[dict, dict], Mapping[str, str]],
        files: Mapping[str, str] = {},
        accept_files: bool = False,
    ) -> RunFolder:
        """Lock the folder and decide between new, resumed and finished.

        `config` is the resolved configuration as plain data; `may_change(old, new)` gives the dotted
        keys that differ but may not in a resumed run; `files` are the digests of what the configuration
        points at, which must be the same, or with `accept_files` are noted in `changed_files`. In state `new`
        the caller creates the ledger and calls `save_config`. RunFolderError where the folder is in the way,
        in use, cannot be written, or belongs to another configuration; LedgerError where a resumed run has no
        ledger.
        """
        path = Path(path)
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite: got both, expected one")
        with _failing(path):
            if _prepare(path) and not _is_run(path):
                raise RunFolderError(
                    f"{path} is not empty and not a run of Silva (it has no ledger.jsonl), so it is left "
                    "alone: choose another --name or --output_dir."
                )
            run = cls(path, lock(path), files, accept_files)
        try:
            with _failing(path):
                run._decide(resume, overwrite, config, may_change)
        except BaseException:
            run.close()
            raise
        return run

    def _decide(
        self, resume: bool, overwrite: bool, config: Mapping[str, Any],
        may_change: Callable[[dict, dict], Mapping[str, str]],
    ) -> None:  # fmt: skip
        path = self.path
        back = replaced.recover(path, (LOCK,)) == "restored"  # of an --overwrite that was killed
        if back:
            self.notes.append(f"{path}: the earlier run is back, since the one to replace it had not begun")
        used = _prepare(path)
        resume = resume or (used and not overwrite and _untouched(path))
        if used and not (resume or overwrite):
            restored = "; it is back, since the one to replace it had not begun" if back else ""
            raise RunFolderError(
                f"{path} holds a run already ({_progress(path)}{restored}). Add --resume to go on with it, "
                "--overwrite to remove it and start again, or choose another --name."
            )
        if overwrite and used:
            _check_contents(path)
            self._replaces = True
            replaced.put_aside(path, (LOCK,))
            self.notes.append(f"{path} holds an earlier run: it is removed when the first step is done")
        elif resume:
            self._resume(config, may_change)

    def begun(self) -> None:
        """The run has something of its own: remove the earlier run that it replaces."""
        if self._replaces:
            with _failing(self.path):
                replaced.remove(self.path)
            self._replaces = False

    def restore(self) -> str:
        """Put the earlier run back if this one has not begun and has no checkpoint.

        Returns:
            a message that says what was done; "" if there was nothing to do.
        """
        if not self._replaces:
            return ""
        self._replaces = False
        try:
            self.back = replaced.recover(self.path, (LOCK,)) == "restored"
        except OSError as error:
            self.back = True
            return (
                f"{self.path}: the earlier run could not be put back ({error.strerror or error}). It is not "
                "lost: the next start in this folder puts it back."
            )
        return f"{self.path}: the earlier run is back, since the new one did not begin" if self.back else ""

    def save_config(self, toml_text: str, data: Mapping[str, Any]) -> None:
        """Write config.toml, for people, and config.json, which `--resume` compares with.

        That one has null, and the digests of files.
        """
        with _failing(self.path):
            FILES.write_atomic(self.config_toml, toml_text.encode())
            write_plain(self.config_json, {**data, FILES_KEY: self.files})

    def note_machine(self, machine: Mapping[str, Any]) -> str:
        """Write machine.json; a message if another machine has computed the run so far, else ""."""
        with _failing(self.path):
            return note_machine(self.machine, machine)

    def close(self) -> None:
        """Put back an earlier run that was not replaced, release the lock. May be called twice."""
        self.restore()
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(
        self, config: Mapping[str, Any], may_change: Callable[[dict, dict], Mapping[str, str]]
    ) -> None:
        if _untouched(self.path):
            with _failing(self.path):
                FILES.remove_tree(self.ledger)  # at most an empty one: the caller creates it as for a new run
            self.notes.append(f"{self.path} has done nothing yet: starting from the beginning")
            return
        if not self.ledger.exists():
            raise LedgerError(
                f"cannot resume {self.path}: ledger.jsonl is missing, so nobody knows which groups were "
                "trained. Put it back, or start again with --overwrite."
            )
        try:
            old = read_plain(self.config_json)
        except (OSError, RecordError) as error:
            raise RunFolderError(
                f"cannot resume {self.path}: config.json is missing or damaged, so nobody knows what it was "
                "started with. Put it back, or start again with --overwrite."
            ) from error
        known = old.pop(FILES_KEY, {})
        new = json.loads(json.dumps(config))
        changed = may_change(old, new)
        if changed:
            lines = [
                f"  {key}: was {_at(old, key)}, now {_at(new, key)}{f' ({why})' if why else ''}"
                for key, why in changed.items()
            ]
            raise RunFolderError(
                f"cannot resume {self.path}: these keys may not change in a run:\n" + "\n".join(lines) + "\n"
                "Put them back, or choose another --name."
            )
        self._check_files(known)
        done, steps = _steps_done(self), new.get("steps", 0)
        if done is not None and done >= steps:
            self.state = "finished"
            more = "" if may_change(new, new | {"steps": steps + 1}) else "; raise steps to go on"
            self.notes.append(f"{self.path} has finished ({done} steps){more}")
            return
        self.state = "resumed"
        for leftover in self.path.glob(".*.tmp-*"):  # of a write that was killed before its rename
            FILES.remove_tree(leftover)
        if not steps_in(self.checkpoints):
            self.notes.append(f"{self.path} has no checkpoint yet: its steps are done again from the first")

    def _check_files(self, known: Mapping[str, str]) -> None:
        """Refuse to go on with other data or code than those with which the run began, or was resumed."""
        self.changed_files = {
            file: [known.get(file, "not there"), self.files.get(file, "not there")]
            for file in sorted({**known, **self.files})
            if known.get(file) != self.files.get(file)
        }
        lines = [f"  {file}: was {old}, now {new}" for file, (old, new) in self.changed_files.items()]
        if lines and self._accept_files:
            self.notes.append("this run goes on with changed files:\n" + "\n".join(lines))
        elif lines:
            more = f"\n  and {len(lines) - SHOWN_FILES} more" if len(lines) > SHOWN_FILES else ""
            raise RunFolderError(
                f"cannot resume {self.path}: files that its configuration points at have changed:\n"
                + "\n".join(lines[:SHOWN_FILES])
                + f"{more}\nPut them back, choose another --name, or add --accept-files to go on with them "
                "as they are now; the ledger records the change."
            )


def owner(path: Path) -> int:
    """The process that opened the run's folder last; 0 if nobody has."""
    try:
        return int((path / LOCK).read_text())
    except (OSError, ValueError):
        return 0


def standing(path: Path) -> Standing:
    """How a run stands, for those who look on.

    To look at the lock is to take it for a moment, in which a run that begins would be refused. So it is only
    looked at if its owner lives.
    """
    with contextlib.suppress(ProcessLookupError):
        if process := owner(path):
            with contextlib.suppress(PermissionError):  # of another user, so it lives
                os.kill(process, 0)
            if holder(path):
                return "running"
    return "finished" if Layout(path).summary.is_file() else "interrupted"


def _untouched(path: Path) -> bool:
    """Killed before its first event: there is nothing that a new start could contradict."""
    run = Layout(path)
    recorded = any(file.exists() and file.stat().st_size for file in (run.ledger, run.metrics, run.summary))
    return not recorded and not steps_in(run.checkpoints)


def _prepare(path: Path) -> bool:
    """Make the folder if needed; whether there is anything in it but a lock."""
    if path.is_dir():
        return any(entry.name != LOCK for entry in path.iterdir())
    path.mkdir(parents=True)
    FILES.fsync_dir(path.parent)
    return False


def lock(path: Path) -> TextIO:
    """Hold the lock file of a folder, with our process id in it, until the file is closed.

    Raises:
        RunFolderError: another process holds it.
    """
    file = open(path / LOCK, "a+")  # noqa: SIM115 (held open as long as the run is)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        by = owner(path) or "unknown"
        raise RunFolderError(f"{path} is in use by process {by}: wait for it, or stop it") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def holder(path: Path) -> str:
    """The id of the process that has the run open; "" if none has."""
    try:
        with open(path / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return str(owner(path) or "unknown")
    except OSError:  # no lock, no run
        pass
    return ""


def _is_run(path: Path) -> bool:
    """A lock or a ledger. A config.toml is no sign: many a foreign project has one."""
    return (path / LOCK).is_file() or Layout(path).ledger.is_file()


def _check_contents(path: Path) -> None:
    """Refuse to remove what no run writes: a user's file, another run."""
    names = sorted(entry.name for entry in path.iterdir())
    if others := [name for name in names if name not in WRITTEN and not _LEFTOVER.fullmatch(name)]:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise RunFolderError(
            f"{path} holds more than a run of Silva ({shown}), so --overwrite leaves it alone: move that "
            "away, or choose another --name or --output_dir."
        )


def _progress(path: Path) -> str:
    """How far a run came, in words."""
    run = Layout(path)
    if (steps := _steps_done(run)) is not None:
        return f"finished, {steps} steps"
    step = last_step(run.metrics)
    done = "no step done" if step is None else f"step {step} was its last"
    *_, newest = (None, *steps_in(run.checkpoints).values())
    saved = f"newest checkpoint {newest.name}" if newest else "no checkpoint"
    return f"{done}, {saved}"


def _steps_done(run: Layout) -> int | None:
    """Of a finished run. One whose summary is missing or damaged counts as not finished."""
    with contextlib.suppress(OSError, RecordError):
        return read_plain(run.summary).get("steps")
    return None


def _at(data: Any, key: str) -> str:
    """The value under a dotted key, as JSON; list elements go by number ("environments.0.size")."""
    for part in key.split("."):
        try:
            data = data[int(part)] if isinstance(data, list) else data[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return "not set"
    return json.dumps(data)


@contextlib.contextmanager
def _failing(path: Path) -> Iterator[None]:
    """What the operating system refuses becomes one readable error that names the folder."""
    try:
        yield
    except RunFolderError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise RunFolderError(f"{path} cannot be a run's folder: there is a file in its place") from error
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror or error}") from error

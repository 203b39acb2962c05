"""The folder of one run, `runs/<name>/`: who may write in it, and whether to begin, go on or refuse.

    nothing there                -> new
    a run, no flag               -> refused; the message names --resume and --overwrite
    a run that has done nothing  -> new, whatever the flag
    a run, --overwrite           -> put aside, new; removed when the new run calls `begun`, else put back
    a run, --resume              -> resumed; new if it had done nothing yet; finished if it is done

While open, the folder is locked: two processes never write one run. The lock dies with its process.
`--overwrite` removes only what a run writes (`WRITTEN`); it refuses a folder that holds anything else.

Not here: the contents (metrics, ledger, checkpoints have their own modules), and cutting the metrics
back to the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from silva.errors import LedgerError, RunDirectoryError
from silva.orchestrator import replaced
from silva.ports import FILES

T = TypeVar("T")
State = Literal["new", "resumed", "finished"]
LOCK = ".silva.lock"
WRITTEN = frozenset(
    {
        LOCK, "config.toml", "config.json", "metrics.jsonl", "ledger.jsonl", "held_out.json", "machine.json",
        "summary.json",
        "report.html", "run.log", "rollouts", "checkpoints", "weights", "tensorboard", *replaced.FOLDERS,
        ".DS_Store",
    }
)  # fmt: skip
"""All names in a run's folder. macOS adds the last one."""
_LEFTOVER = re.compile(r"\..+\.tmp-[0-9a-f]+")  # of a write that was killed before its rename


class RunDirectory:
    """An open run. `state` says how to go on, `notes` what to tell the user. Close it, or use `with`."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self.state: State = "new"
        self.notes: list[str] = []
        self._lock = lock
        self._replaces = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        resume: bool,
        overwrite: bool,
        config: Mapping[str, Any],
        may_change: Callable[[dict, dict], Mapping[str, str]],
    ) -> RunDirectory:
        """Lock the folder and decide between new, resumed and finished.

        `config` is the resolved configuration as plain data; `may_change(old, new)` gives the dotted
        keys that differ but may not in a resumed run. In state `new` the caller creates the ledger and
        calls `save_config`. RunDirectoryError where the folder is in the way, in use, cannot be
        written, or belongs to another configuration; LedgerError where a resumed run has no ledger.
        """
        path = Path(path)
        if resume and overwrite:
            raise RunDirectoryError("--resume and --overwrite: got both, expected one")
        with _failing(path):
            if _prepare(path) and not _is_run(path):
                raise RunDirectoryError(
                    f"{path} is not empty and not a run of Silva (it has no ledger.jsonl), so it is left "
                    "alone: choose another --name or --output_dir."
                )
            run = cls(path, _lock(path))
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
            raise RunDirectoryError(
                f"{path} holds a run already ({_progress(path)}{restored}). Add --resume to go on with it, "
                "--overwrite to remove it and start again, or choose another --name."
            )
        if overwrite and used:
            _check_contents(path)
            self._replaces = True
            replaced.put_aside(path, (LOCK,))
            self.notes.append(f"{path} holds an earlier run: it is removed when the first step begins")
        elif resume:
            self._resume(config, may_change)

    def begun(self) -> None:
        """The run has begun its first step: remove the earlier run that it replaces."""
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
            back = replaced.recover(self.path, (LOCK,)) == "restored"
        except OSError as error:
            return (
                f"{self.path}: the earlier run could not be put back ({error.strerror or error}). It is not "
                "lost: the next start in this folder puts it back."
            )
        return f"{self.path}: the earlier run is back, since the new one did not begin" if back else ""

    def save_config(self, toml_text: str, data: Mapping[str, Any]) -> None:
        """Write config.toml, for people, and config.json, which `--resume` compares with (it has null)."""
        encoded = json.dumps(data, indent=1, allow_nan=False) + "\n"
        with _failing(self.path):
            FILES.write_atomic(self.config_toml, toml_text.encode())
            FILES.write_atomic(self.config_json, encoded.encode())

    def note_machine(self, machine: Mapping[str, Any]) -> str:
        """Append to machine.json, a list, what computes this run from now on, if it has changed.

        Returns:
            a message that says what differs from the machine that began the run; "" if nothing does.
        """
        known = _read_json(self.path / "machine.json", list) or []
        old = known[-1] if known else None
        if machine == old:
            return ""
        with _failing(self.path):
            encoded = json.dumps([*known, machine], indent=1) + "\n"
            FILES.write_atomic(self.path / "machine.json", encoded.encode())
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

    def close(self) -> None:
        """Put back an earlier run that was not replaced, release the lock. May be called twice."""
        self.restore()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config_toml(self) -> Path:
        return self.path / "config.toml"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

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
        old = _read_json(self.config_json)
        if old is None:
            raise RunDirectoryError(
                f"cannot resume {self.path}: config.json is missing or damaged, so nobody knows what it was "
                "started with. Put it back, or start again with --overwrite."
            )
        new = json.loads(json.dumps(config))
        changed = may_change(old, new)
        if changed:
            lines = [
                f"  {key}: was {_at(old, key)}, now {_at(new, key)}{f' ({why})' if why else ''}"
                for key, why in changed.items()
            ]
            raise RunDirectoryError(
                f"cannot resume {self.path}: these keys may not change in a run:\n" + "\n".join(lines) + "\n"
                "Put them back, or choose another --name."
            )
        summary = _read_json(self.summary)
        steps = new.get("steps", 0)
        if summary is not None and summary.get("steps", -1) >= steps:
            self.state = "finished"
            more = "" if may_change(new, new | {"steps": steps + 1}) else "; raise steps to go on"
            self.notes.append(f"{self.path} has finished ({summary['steps']} steps){more}")
            return
        self.state = "resumed"
        for leftover in self.path.glob(".*.tmp-*"):  # of a write that was killed before its rename
            FILES.remove_tree(leftover)
        if not _checkpoint_names(self.path):
            self.notes.append(f"{self.path} has no checkpoint yet: its steps are done again from the first")


def _untouched(path: Path) -> bool:
    """Killed before its first event: there is nothing that a new start could contradict."""
    traces = (path / name for name in ("ledger.jsonl", "metrics.jsonl", "summary.json"))
    recorded = any(file.exists() and file.stat().st_size for file in traces)
    return not recorded and not _checkpoint_names(path)


def _prepare(path: Path) -> bool:
    """Make the folder if needed; whether there is anything in it but a lock."""
    if path.is_dir():
        return any(entry.name != LOCK for entry in path.iterdir())
    path.mkdir(parents=True)
    FILES.fsync_dir(path.parent)
    return False


def _lock(path: Path) -> TextIO:
    """Hold the lock file, with our process id in it; BlockingIOError becomes a readable refusal."""
    file = open(path / LOCK, "a+")  # noqa: SIM115 (held open as long as the run is)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RunDirectoryError(f"{path} is in use by process {owner}: wait for it, or stop it") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _is_run(path: Path) -> bool:
    """A lock or a ledger. A config.toml is no sign: many a foreign project has one."""
    return (path / LOCK).is_file() or (path / "ledger.jsonl").is_file()


def _check_contents(path: Path) -> None:
    """Refuse to remove what no run writes: a user's file, another run."""
    others = sorted(
        e.name for e in path.iterdir() if e.name not in WRITTEN and not _LEFTOVER.fullmatch(e.name)
    )
    if others:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise RunDirectoryError(
            f"{path} holds more than a run of Silva ({shown}), so --overwrite leaves it alone: move that "
            "away, or choose another --name or --output_dir."
        )


def _progress(path: Path) -> str:
    """How far a run came, in words."""
    summary = _read_json(path / "summary.json")
    if summary is not None and "steps" in summary:
        return f"finished, {summary['steps']} steps"
    checkpoints = _checkpoint_names(path)
    saved = f"newest checkpoint {checkpoints[-1]}" if checkpoints else "no checkpoint"
    return f"{_last_step(path / 'metrics.jsonl')}, {saved}"


def _last_step(metrics: Path) -> str:
    """The last step with a whole line of metrics; a torn line does not count."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):
                return f"step {int(json.loads(line)['step'])} was its last"
    return "no step done"


def _checkpoint_names(path: Path) -> list[str]:
    names = [entry.name for entry in (path / "checkpoints").glob("step_*") if entry.name[5:].isdecimal()]
    return sorted(names, key=lambda name: int(name[5:]))


def _read_json(path: Path, kind: type[T] = dict) -> T | None:  # type: ignore[assignment]
    """An object, or None where the file is missing, unreadable or holds none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, kind) else None


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
    except RunDirectoryError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryError(f"{path} cannot be a run's folder: there is a file in its place") from error
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}") from error

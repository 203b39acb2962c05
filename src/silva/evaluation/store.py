"""`evals/NAME/`: one evaluation on disk, of one model or of a series, which goes on where it stopped.

    config.toml       its configuration, for people; config.json: what the same evaluation must have
    journal.jsonl     episodes as they end (storage/journal.py)
          |  when none is missing
    episodes.parquet  all of them in the order of the jobs, as storage/rollouts.py writes them; `step` is that
                      of the weights
    summary.json, metrics.jsonl, tensorboard/, report.html; then the journal is removed

An episode is known by step, environment and id; each is played once. Those without a usable result are played
again when the same evaluation is asked for again. Not here: who plays, and the numbers.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from silva.config.diff import forbidden_changes
from silva.config.field_types import dotted, leaves
from silva.errors import RecordError, RunFolderError, SilvaError, shorten
from silva.evaluation.evaluator import Job, Key, rollout_row
from silva.ports import FILES
from silva.storage.journal import Journal, read_journal
from silva.storage.layout import Layout
from silva.storage.plain import read_plain, write_plain
from silva.storage.rollouts import RolloutRow, encode_rollouts, read_rollouts
from silva.storage.run_folder import LOCK, lock
from silva.storage.summary import finite
from silva.types import Trajectory

EVALUATION, SYNTHESIS = "evaluation", "synthesis"
"""What a folder may hold; config.json says which."""
SECTIONS = ("seed", "environments", "rendering", "eval", "engine")
ROLLOUT = ("limits", "redo", "context")
"""What of a configuration decides the episodes of an evaluation, besides `rollout` with these keys."""
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""What the operating system says where nothing may be written."""


def identity(
    data: Mapping[str, Any],
    *,
    models: Mapping[int, str],
    model: Mapping[str, Any],
    weights: Mapping[str, str],
    files: Mapping[str, str],
    policy: str,
    jobs: Sequence[Job],
    sections: Sequence[str] = SECTIONS,
) -> dict[str, Any]:
    """What must be equal for an evaluation to go on.

    Args:
        data: the configuration (`Resolved.data`).
        sections: those of it that decide the episodes.
        model: keys of [model] that decide what is sampled, beside name and weights.
        weights: digests of the files of the models.
        files: digests of other files that the configuration points at.
    """
    tasks = hashlib.sha256("\n".join(f"{job.key} {job.task.content()}" for job in jobs).encode()).hexdigest()
    own = {
        "policy": policy, "tasks": tasks, "files": dict(files), "weights": dict(weights),
        "models": {str(step): name for step, name in models.items()}, "model": dict(model),
    }  # fmt: skip
    return json.loads(json.dumps(conditions(data, sections) | own))  # type: ignore[no-any-return]


def conditions(data: Mapping[str, Any], sections: Sequence[str] = SECTIONS) -> dict[str, Any]:
    """What of a configuration (`Resolved.data`) decides the episodes."""
    rollout = {key: data["rollout"][key] for key in ROLLOUT if key in data["rollout"]}
    return {key: data[key] for key in sections} | {"rollout": rollout}


class EvalFolder(Layout):
    """An open evaluation, locked. Use `with`.

    rows: finished episodes by step and key, those without a result among them.
    spent: what a paid service has counted until now.
    read_only: it is finished, and lies where nothing may be written. What it holds can be read, without a
        lock.
    """

    def __init__(self, path: Path, held: TextIO | None) -> None:
        super().__init__(path)
        self.rows: dict[tuple[int, Key], RolloutRow] = {}
        self.spent: dict[str, Any] = {}
        self._lock, self._writer = held, Journal(self.journal)
        self.read_only = held is None

    @classmethod
    def open(
        cls,
        path: Path,
        this: Mapping[str, Any],
        toml: str,
        *,
        overwrite: bool,
        given: Collection[str] = (),
        what: str = EVALUATION,
    ) -> EvalFolder:
        """The folder with what it holds of `this` evaluation (`identity`).

        Args:
            toml: the configuration as text.
            overwrite: an earlier evaluation in the folder is removed.
            given: dotted paths of the configuration that are no defaults. A key that the folder does not
                know is newer than it, and may have its default.
            what: is kept there: an evaluation or a synthesis.

        Raises:
            RunFolderError: it holds something else, or another process uses it.
            RecordError: what it holds is damaged.
        """
        before = _before(path, what)
        folder = cls(path, _held(path, may_read=what == EVALUATION and not overwrite))
        try:
            for leftover in path.glob(".*.tmp-*") if not folder.read_only else ():
                FILES.remove_tree(leftover)  # of a write that was killed before its rename
            if before and overwrite:
                folder._clear()
            elif before and (changed := _changed(before, this, given)):
                raise RunFolderError(f"{path} holds another {what}: {changed}. {_ADVICE}")
            folder._read()
            if not folder.read_only:
                with writing_to(path):
                    FILES.write_atomic(folder.config_toml, toml.encode())
                    write_plain(folder.config_json, {what: this})
        except BaseException:
            folder.close()
            raise
        return folder

    def known(self, step: int) -> dict[Key, Trajectory]:
        """Episodes with a usable result."""
        found = ((key, row.trajectory) for (at, key), row in self.rows.items() if at == step)
        return {key: trajectory for key, trajectory in found if trajectory.has_result}

    def missing(self, step: int, jobs: Iterable[Job]) -> int:
        known = self.known(step)
        return sum(job.key not in known for job in jobs)

    def keep(self, step: int, job: Job, trajectory: Trajectory, spent: Mapping[str, Any] | None) -> None:
        row = rollout_row(step, job.environment, job.task.id, trajectory)
        with writing_to(self.path):
            self._writer.append(row, spent)
        self.rows[step, job.key] = row
        self.spent = dict(spent or self.spent)

    def pay(self, spent: Mapping[str, Any]) -> None:
        """What a paid service has counted, if no episode says it any more."""
        if spent != self.spent:
            with writing_to(self.path):
                self._writer.append_spent(spent)
            self.spent = dict(spent)

    def in_order(self, steps: Iterable[int], jobs: Sequence[Job]) -> list[RolloutRow]:
        """Rows of all jobs that are there, in their order."""
        places = ((step, job.key) for step in steps for job in jobs)
        return [self.rows[place] for place in places if place in self.rows]

    @property
    def finished(self) -> bool:
        """Whether everything is written that follows from its episodes."""
        return _finished(self)

    def write(
        self, rows: Sequence[RolloutRow], summary: Mapping[str, Any], dialogues: bytes | None = None
    ) -> None:
        """The files that hold a whole evaluation, or of a synthesis also its rows."""
        with writing_to(self.path):
            if dialogues is not None:
                FILES.write_atomic(self.dialogues, dialogues)
            FILES.write_atomic(self.episodes, encode_rollouts(rows))
            write_plain(self.summary, finite(summary))

    def done(self) -> None:
        """Remove the journal, once everything else is written."""
        with writing_to(self.path):
            FILES.remove_tree(self.journal)

    def close(self) -> None:
        self._writer.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> EvalFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        with _advised("put it back, or --overwrite plays everything again"):
            stored = read_rollouts(self.episodes) if self.episodes.exists() else []
        played, spent = read_journal(self.journal)
        for row in (*stored, *played):
            self.rows[row.step, (row.environment, row.trajectory.id)] = row
        if not spent and self.summary.exists():
            with _advised("remove it, and the same command writes it again, except what was spent"):
                spent = read_plain(self.summary).get("spent", {})
        self.spent = spent

    def _clear(self) -> None:
        for path in vars(Layout(self.path)).values():
            if path != self.path:
                FILES.remove_tree(path)


def free_name(
    folder: Path, name: str, this: Mapping[str, Any], given: Collection[str] = (), what: str = EVALUATION
) -> str:
    """`name`, or the first of name-2, name-3, ... whose folder holds this evaluation or none. Other arguments
    are those of `EvalFolder.open`."""
    for number in range(1, 1_000_000):
        found = name if number == 1 else f"{name}-{number}"
        try:
            before = _before(folder / found, what)
        except (RunFolderError, RecordError):  # somebody else's
            continue
        if not before or not _changed(before, this, given):
            return found
    raise RunFolderError(f"{folder / name}: there are a million of these; choose another --name")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """A disk that takes no more is said in words."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SilvaError):  # which is said in words already
            raise
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror or error}. What was played before is kept"
        ) from error


def _held(path: Path, *, may_read: bool) -> TextIO | None:
    """The lock of a folder, which is made if it is not there. None, with `may_read`, of a finished one that
    cannot be locked because nothing may be written there."""
    with writing_to(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            return lock(path)
        except OSError as error:
            if may_read and error.errno in READ_ONLY and _finished(Layout(path)):
                return None
            raise


def _finished(files: Layout) -> bool:
    return files.summary.exists() and not files.journal.exists()


@contextmanager
def _advised(what: str) -> Iterator[None]:
    """A damaged file comes with what to do."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{error}; {what}") from error


_ADVICE = "Give this one another --name, or --overwrite to remove the other"


def _before(path: Path, what: str) -> dict[str, Any]:
    """The identity of the evaluation in a folder; {} if there is none."""
    if not path.exists() or not {each.name for each in path.iterdir()} - {LOCK}:
        return {}
    try:
        found: dict[str, Any] = read_plain(path / "config.json")[what]
    except (FileNotFoundError, NotADirectoryError, KeyError) as error:
        raise RunFolderError(
            f"{path} is not empty and no {what} of Silva, so it is left alone: choose another --name"
        ) from error
    return found


def _changed(before: Mapping[str, Any], this: Mapping[str, Any], given: Collection[str]) -> str:
    """What differs, in words; "" if it is the same evaluation."""
    own = {
        key: value for key, value in this.items() if key not in (*SECTIONS, "model", "rollout")
    }  # no defaults
    found = forbidden_changes(before, this, {*given, *map(dotted, leaves(own))})
    keys = [key for key in found if key != "tasks"]  # a digest, which other numbers of tasks change, too
    words = [
        f"{key.replace('[synth]', 'synth')} was {_at(before, key)}, is {_at(this, key)}" for key in keys[:3]
    ]
    if found and not keys:
        words = ["its tasks have other contents"]
    return "; ".join(words) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _at(values: Any, key: str) -> str:
    for part in key.split("."):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return "absent"
    return shorten(json.dumps(values), 60)

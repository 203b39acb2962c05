"""Checkpoints that are whole or not there: written under another name, hashed, renamed, verified.

    checkpoints/tmp-step_20-1f3a/     every file written and synced, then manifest.json (sizes, hashes)
             |  rename, sync of the folder
    checkpoints/step_20/
    checkpoints/latest, best          small text files; `latest` is a hint for people, never trusted
             |  only now
    older ones removed                the last `keep` and the best stay

A crash or a full disk at any point leaves every earlier checkpoint as it was. Readers walk from the
newest and verify all bytes; a damaged one is skipped with a reason, never loaded.

Not here: what the files hold (trainer), and which ledger position belongs to them (in `meta`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from silva.errors import CheckpointError, PartLost
from silva.ports import FILES, crash_point
from silva.storage.layout import step_path, steps_in

MANIFEST = "manifest.json"
SCHEMA = 1

Writer = Callable[[Path], None] | bytes
"""Content of a file, or a function that writes a file (or a folder of files) to the path it gets."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`files`: name -> (bytes, sha256 in hex), of all files but the manifest itself."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]

    def encode(self) -> bytes:
        """The one way to write it; the checksum covers all the rest, so no bit may differ."""
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        body = {"schema": SCHEMA, "step": self.step, "meta": self.meta, "files": files}
        text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)
        checksum = hashlib.sha256(text.encode()).hexdigest()
        return f'{text[:-2]},\n "sha256": "{checksum}"\n}}\n'.encode()


def read_manifest(path: Path) -> Manifest:
    """The verified manifest of a checkpoint folder. CheckpointError where it is missing or altered."""
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: {_reason(error)}: not a complete checkpoint") from error
    try:
        body = json.loads(data)
        schema = body["schema"]
        files = {name: (entry["size"], entry["sha256"]) for name, entry in body["files"].items()}
        manifest = Manifest(body["step"], body["meta"], files)
        intact = schema != SCHEMA or manifest.encode() == data
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged, not a manifest ({error})") from error
    if not intact:
        raise CheckpointError(f"{file}: damaged, its own checksum does not fit")
    if schema != SCHEMA:
        raise CheckpointError(
            f"{file}: got schema {schema!r}, expected {SCHEMA}: damaged, or of another version"
        )
    return manifest


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint folder and return its manifest.

    CheckpointError names the first file that is missing, of another size, or of another content.
    """
    manifest = read_manifest(path)
    if path.name != f"step_{manifest.step}":
        raise CheckpointError(f"{path}: its manifest says step {manifest.step}")
    for name, (size, digest) in manifest.files.items():
        file = path / name
        try:
            got = file.stat().st_size
            intact = got == size and _sha256(file) == digest
        except OSError as error:
            raise CheckpointError(f"{file}: {_reason(error)}") from error
        if got != size:
            raise CheckpointError(f"{file}: got {got} bytes, expected {size}: torn or altered")
        if not intact:
            raise CheckpointError(f"{file}: damaged, its sha256 is not the manifest's")
    return manifest


class CheckpointStore:
    """The checkpoints of one run. One writer at a time (the run's directory holds the lock).

    `skipped` holds, after `newest`, one message for every damaged checkpoint passed over.
    """

    def __init__(self, directory: Path, keep: int = 2, read_only: bool = False) -> None:
        """`keep`: newest checkpoints to keep, 1 or more.

        The writer removes what a crash left half-done; `read_only` touches nothing, so that one may
        read the checkpoints of a run that is still going.
        """
        if keep < 1:
            raise CheckpointError(f"checkpoints to keep: got {keep}, expected 1 or more")
        self.directory, self.keep, self.read_only = directory, keep, read_only
        self.skipped: list[str] = []
        if not read_only:
            with disk_faults(f"cannot use the checkpoint folder {directory}"):
                if not directory.is_dir():
                    directory.mkdir(parents=True)
                    FILES.fsync_dir(directory.parent)
                self._recover()

    def save(self, step: int, files: Mapping[str, Writer], meta: Mapping[str, Any]) -> Path:
        """Write checkpoint `step` durably, then remove old ones; the same step is replaced.

        `files` maps names (relative, "/" for folders) to content; `meta` is plain JSON. CheckpointError
        where the disk does not take it: earlier checkpoints are untouched.
        """
        self._writable()
        _check(step, files)
        temporary = self.directory / f"tmp-step_{step}-{secrets.token_hex(4)}"
        target = self.path(step)
        advice = "Earlier checkpoints are untouched; free some space, then --resume."
        with disk_faults(f"cannot save the checkpoint of step {step} in {self.directory}", advice):
            try:
                temporary.mkdir()
                self._fill(temporary, step, files, meta)
                crash_point("rename")
                self._move_in(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._recover()
                raise
        with disk_faults(f"the checkpoint {target} is safe, but tidying up after it failed"):
            crash_point("latest")
            FILES.write_atomic(self.directory / "latest", f"{target.name}\n".encode())
            crash_point("prune")
            self._prune(step)
        return target

    def newest(self) -> tuple[int, Path] | None:
        """The newest checkpoint of which every byte is right, or None; see `skipped` for the others."""
        self.skipped = []
        for step in reversed(self.steps()):
            try:
                verify(self.path(step))
            except CheckpointError as error:
                self.skipped.append(f"checkpoint of step {step} is not used: {error}")
            else:
                return step, self.path(step)
        return None

    def steps(self) -> list[int]:
        """Steps with a checkpoint (verified or not), oldest first."""
        return list(steps_in(self.directory))

    def path(self, step: int) -> Path:
        return step_path(self.directory, step)

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step` from now on, in place of the best one before it."""
        self._writable()
        if not (self.path(step) / MANIFEST).exists():
            raise CheckpointError(f"cannot mark step {step} as best: no checkpoint at {self.path(step)}")
        with disk_faults(f"cannot mark step {step} as best in {self.directory}"):
            FILES.write_atomic(self.directory / "best", f"step_{step}\n".encode())

    def best(self) -> tuple[int, Path] | None:
        """The checkpoint marked best (not verified: `verify` it before use), or None."""
        try:
            text = (self.directory / "best").read_text(errors="replace")
        except OSError:
            return None
        name = re.fullmatch(r"step_(\d+)\n", text)
        step = int(name[1]) if name else -1
        return (step, self.path(step)) if self.path(step).is_dir() else None

    def _writable(self) -> None:
        if self.read_only:
            raise CheckpointError(f"{self.directory} was opened for reading only")

    def _fill(self, folder: Path, step: int, files: Mapping[str, Writer], meta: Mapping[str, Any]) -> None:
        """Write and sync every file and, last, the manifest."""
        entries = {}
        for name, content in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                FILES.write(target, content)
            else:
                content(target)
            for file in _files_of(target, name):
                FILES.fsync(file)
                entries[file.relative_to(folder).as_posix()] = (file.stat().st_size, _sha256(file))
                crash_point("checkpoint_file")
        try:
            manifest = Manifest(step, meta, entries).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta of step {step}: {error}; expected plain JSON, no NaN") from error
        FILES.write(folder / MANIFEST, manifest)
        FILES.fsync(folder / MANIFEST)
        for inner in folder.rglob("*"):
            if inner.is_dir():
                FILES.fsync_dir(inner)
        FILES.fsync_dir(folder)

    def _move_in(self, temporary: Path, target: Path) -> None:
        """Rename into place. A folder cannot replace a full one, so an old one steps aside first:
        it has its name back at the next `_recover` if the new one never arrives.
        """
        aside = self.directory / f"old-{target.name}"
        replaces = target.exists()
        if replaces:
            FILES.rename(target, aside)
        FILES.rename(temporary, target)
        FILES.fsync_dir(self.directory)
        if replaces:
            FILES.remove_tree(aside)

    def _recover(self) -> None:
        """Put back what stepped aside for nothing, remove what was never finished."""
        for entry in sorted(self.directory.iterdir()):
            if entry.name.startswith("old-step_"):
                target = entry.with_name(entry.name.removeprefix("old-"))
                if not target.exists():
                    FILES.rename(entry, target)
                    FILES.fsync_dir(self.directory)
                    continue
            if entry.name.startswith(("tmp-", "old-step_", ".latest.tmp-", ".best.tmp-")):
                FILES.remove_tree(entry)

    def _prune(self, newest: int) -> None:
        """Remove all but the last `keep` up to `newest` and the best.

        Later steps go too: they are damaged ones that `newest()` passed over, of a history that has
        been rolled back, and must never be picked up again.
        """
        steps = self.steps()
        kept = {*[step for step in steps if step <= newest][-self.keep :]}
        if (best := self.best()) and best[0] <= newest:
            kept.add(best[0])
        for step in steps:
            if step not in kept:  # renamed first: killed half-way it must not look like a damaged one
                doomed = self.directory / f"tmp-pruned-step_{step}-{secrets.token_hex(4)}"
                FILES.rename(self.path(step), doomed)
                FILES.remove_tree(doomed)


@contextlib.contextmanager
def disk_faults(what: str, advice: str = "") -> Iterator[None]:
    """Faults of the disk become a CheckpointError that says where and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # a writer may have words of its own for what the disk said, and lose its trainer in another process
        fault = error.__cause__ if isinstance(error, CheckpointError) else error
        if isinstance(fault, PartLost) or not isinstance(fault, (OSError, SafetensorError)):
            raise
        raise CheckpointError(f"{what}: {error}. {advice}".rstrip()) from error


def _check(step: int, files: Mapping[str, Writer]) -> None:
    if step < 0:
        raise CheckpointError(f"checkpoint: got step {step}, expected 0 or more")
    for name in files:  # a CheckpointError in place of a file outside the folder
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or str(path) == MANIFEST:
            raise CheckpointError(
                f"checkpoint of step {step}: got the file name {name!r}, expected a relative one "
                f"other than {MANIFEST}"
            )


def _files_of(target: Path, name: str) -> list[Path]:
    if target.is_file():
        return [target]
    files = sorted(path for path in target.rglob("*") if path.is_file())
    if not files:
        raise CheckpointError(f"checkpoint file {name!r}: its writer wrote nothing to {target}")
    return files


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))

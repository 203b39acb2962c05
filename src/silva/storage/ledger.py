"""The ledger of a run: what was issued, sealed, trained or dropped, written before its effects.

    work issued ──> work sealed ──> each of its groups: trained | dropped        one line of ledger.jsonl each

One JSON object a line with a running `seq` and a crc32, append-only. `record` buffers, `commit` makes a
batch durable before any effect that depends on it. A checkpoint stores `position`; a restart from it
appends `rolled_back`, and `history` is what counts then: there each group is trained exactly once, and work
that was in flight at the checkpoint is issued again under its id.
Ids of work and keys of groups are unique in a run. Work is sealed in the order of issue; the `step` of
`issued` is the one in which that happened, the `step` of `sealed` the one that its groups are meant for.

Not here: tokens and texts (only their digest), and wall-clock times (two runs of one seed write the
same ledger).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silva.errors import LedgerError
from silva.ports import FILES, crash_point

EVENTS: Mapping[str, tuple[str, ...]] = {
    "issued": ("work", "task", "environment", "step", "attempt"),
    "restarted": ("work", "version"),  # cancelled in flight, and begun again under this version of the policy
    "sealed": ("work", "step", "groups"),  # by key: trajectories (ids), rewards (raw, null: none), digest
    "trained": ("step", "update", "groups"),
    "replayed": ("step", "update", "groups"),  # that were trained in an earlier step
    "dropped": ("group", "reason"),
    "published": ("version",),
    "checkpoint": ("step", "position"),
    "rolled_back": ("to", "step"),
    "files_changed": ("step", "files"),  # by name: digests before and now, accepted at a restart
    "imitated": ("contents",),  # of the tasks of a warm start, see Task.content
}
"""Every event with the fields it must have; more fields of plain JSON are welcome."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line: `fields` are those of `EVENTS[event]`."""

    seq: int
    event: str
    fields: Mapping[str, Any]

    def line(self) -> bytes:
        """The one way this record is written, checksum and newline included."""
        body = json.dumps({"seq": self.seq, "event": self.event, **self.fields}, allow_nan=False)
        return f'{body[:-1]}, "crc": "{zlib.crc32(body.encode()):08x}"}}\n'.encode()


def read(path: Path) -> list[Record]:
    """The records of a ledger in file order, each verified; a torn last line is left out.

    LedgerError where the file is missing, or (with the line's number) where a line is damaged or one
    is missing.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Record], int]:
    """Records, and how many bytes of the file they are."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise LedgerError(
            f"no ledger at {path}: without it nobody knows which groups were trained. "
            "Put the file back, or start again with --overwrite."
        ) from error
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error}") from error
    lines = data.split(b"\n")
    torn = lines.pop()  # what follows the last newline: nothing, or a line whose writer was killed
    records = [_parse(path, number, line) for number, line in enumerate(lines)]
    return records, len(data) - len(torn)


def _parse(path: Path, number: int, line: bytes) -> Record:
    """Line `number` from 0. Writing the record again must give the same bytes: no bit may differ."""
    record = None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        values = json.loads(line)
        del values["crc"]
        found = Record(values.pop("seq"), values.pop("event"), values)
        record = found if found.line() == line + b"\n" else None
    if record is None:
        shown = line[:80].decode(errors="replace")
        raise LedgerError(f"{path}:{number + 1}: damaged line (checksum): got {shown!r}")
    if record.seq != number:
        raise LedgerError(f"{path}:{number + 1}: got seq {record.seq}, expected {number}: lines are missing")
    return record


class Ledger:
    """The writing end. One process at a time (the run's directory holds the lock)."""

    def __init__(self, path: Path, records: Sequence[Record], size: int) -> None:
        self.path = path
        self._size = size
        self._position = len(records)
        self._undone = _undone(records)
        self._buffer: list[bytes] = []

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """An empty ledger. LedgerError where there is one already or it cannot be written."""
        if path.exists():
            raise LedgerError(f"there is a ledger at {path} already: open it, or remove the run first")
        try:
            FILES.write_atomic(path, b"")
        except OSError as error:
            raise LedgerError(f"cannot create the ledger {path}: {error}") from error
        return cls(path, [], 0)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Go on with a ledger; a torn last line is cut off. LedgerError as for `read`."""
        records, size = _read(path)
        if path.stat().st_size != size:
            FILES.truncate(path, size)
            FILES.fsync(path)
        return cls(path, records, size)

    @property
    def position(self) -> int:
        """`seq` of the next record; what a checkpoint remembers."""
        return self._position

    def record(self, event: str, **fields: Any) -> int:
        """Buffer one event and return its seq. LedgerError for what `EVENTS` does not allow."""
        missing = [name for name in EVENTS.get(event, ()) if name not in fields]
        if event not in EVENTS or missing or not fields.keys().isdisjoint(("seq", "event", "crc")):
            expected = ", ".join(EVENTS.get(event, EVENTS))
            raise LedgerError(f"ledger event {event!r}: got {', '.join(fields)}, expected {expected}")
        record = Record(self._position, event, fields)
        try:
            line = record.line()
        except (TypeError, ValueError) as error:  # ValueError: NaN or infinity, which JSON has not
            raise LedgerError(
                f"ledger event {event!r}: {error}; expected plain JSON, null for NaN"
            ) from error
        self._buffer.append(line)
        self._position += 1
        return record.seq

    def commit(self) -> None:
        """Write the buffer in one append and sync it. Call before any effect that depends on it.

        LedgerError where the disk does not take it; the buffer is kept, so a later commit may succeed.
        """
        if not self._buffer:
            return
        data = b"".join(self._buffer)
        try:
            size = self.path.stat().st_size
            if size != self._size:
                raise LedgerError(
                    f"{self.path}: got {size} bytes, expected {self._size}: another process wrote to it, "
                    "or a failed write could not be undone. --resume repairs the second."
                )
            FILES.append(self.path, data)
        except OSError as error:
            raise LedgerError(
                f"cannot write the ledger {self.path}: {error}. Free some space, then --resume."
            ) from error
        self._size += len(data)
        self._buffer.clear()
        crash_point("ledger")

    def roll_back(self, to: int, step: int) -> None:
        """Everything from seq `to` on never happened: the run goes on after `step`. Durable on return.

        LedgerError where the ledger is shorter than `to` (it lost lines its checkpoint relies on), or
        where `to` lies in a history that was itself undone (the checkpoint belongs to that one).
        """
        problem = _wrong_target(to, self._position, self._undone)
        if problem:
            raise LedgerError(f"{self.path}: cannot roll back to seq {to} (step {step}): {problem}")
        seq = self.record("rolled_back", to=to, step=step)
        self.commit()
        self._undone.append((to, seq))


def _undone(records: Sequence[Record]) -> list[tuple[int, int]]:
    """(to, seq) of every roll back: the records from `to` up to `seq` do not count."""
    return [(record.fields["to"], record.seq) for record in records if record.event == "rolled_back"]


def _wrong_target(to: int, position: int, undone: Sequence[tuple[int, int]]) -> str | None:
    if not 0 <= to <= position:
        return f"expected 0 to {position}, the end of the ledger"
    for start, end in undone:
        if start < to <= end:
            return f"seq {start} to {end} were undone by an earlier roll back, that checkpoint went with them"
    return None


def history(records: Sequence[Record]) -> list[Record]:
    """The records that count after all roll backs (which are themselves left out), in order of seq."""
    kept: list[Record] = []
    for record in records:
        if record.event == "rolled_back":
            while kept and kept[-1].seq >= record.fields["to"]:
                kept.pop()
        else:
            kept.append(record)
    return kept


def token_digest(sequences: Iterable[Sequence[int]]) -> str:
    """16 hex digits over token ids, the bounds between sequences included: for `sealed`."""
    digest = hashlib.blake2b(digest_size=8)
    for tokens in sequences:
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return digest.hexdigest()


def audit(records: Sequence[Record], finished: bool = False) -> list[str]:
    """What is wrong with a history, one line each; empty where every group was trained exactly once.

    Work may still be in flight at the end, and groups wait for training, unless `finished`; but once a
    group is trained, what was issued before its work must be sealed, and once a step is trained, what was
    sealed for an earlier one must be trained or dropped.
    """
    problems = []
    undone: list[tuple[int, int]] = []
    for index, record in enumerate(records):
        if record.seq != index:
            problems.append(f"seq {record.seq}: expected {index}")
        if record.event == "rolled_back":
            to = record.fields["to"]
            problem = _wrong_target(to, record.seq, undone)
            problems += [f"seq {record.seq}: rolled back to {to}: {problem}"] if problem else []
            undone.append((to, record.seq))
    lives = _Lives([end for _, end in undone])
    for record in history(records):
        problems += [f"seq {record.seq}: {problem}" for problem in lives.follow(record)]
    return problems + lives.left_behind(finished)


class _Lives:
    """The life of all work and of every group: the last record of each, checked against the next."""

    def __init__(self, restarts: Sequence[int]) -> None:
        self._restarts = restarts
        self._work: dict[str, Record] = {}
        self._group: dict[str, Record] = {}
        self._step: dict[str, int] = {}  # of a group: the one that it is meant for
        self._issued_at: dict[str, int] = {}  # of work and of its groups, in seq
        self._newest = -1  # seq at which the newest work was issued that training has seen
        self._update = (-1, -1)  # step and number of the last one
        self._version: int | None = None

    def follow(self, record: Record) -> list[str]:
        """What is wrong with the record after those before it."""
        check = getattr(self, f"_{record.event}", None)  # a method for each event that something depends on
        return check(record, record.fields) if check else []

    def left_behind(self, finished: bool) -> list[str]:
        """What training went past, or what was left when it ended."""
        problems = []
        for work, record in self._work.items():
            late = self._issued_at.get(work, -1) < self._newest
            if record.event == "issued" and (late or finished):
                reached = "training went on to what was issued later" if late else "the run has finished"
                problems.append(f"work {work} was skipped: issued, then {reached}")
        now, _ = self._update
        for group in (group for group, record in self._group.items() if record.event == "sealed"):
            step = self._step[group]
            if now > step or finished:
                reached = f"training went on to step {now}" if now > step else "the run has finished"
                problems.append(f"group {group} of step {step} was skipped: sealed, then {reached}")
        return problems

    def _issued(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        work = fields["work"]
        last = self._work.get(work)
        self._work[work], self._issued_at[work] = record, record.seq
        # a restart loses what was in flight, so that it is issued again
        if last is None or (
            last.event == "issued" and any(last.seq < seq < record.seq for seq in self._restarts)
        ):
            return []
        return [f"work {work} issued after it was {last.event}, expected once, or again after a restart"]

    def _restarted(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        known = self._work.get(fields["work"])
        return [] if known and known.event == "issued" else [f"work {fields['work']} is not in flight"]

    def _sealed(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        problems = self._move(self._work, "work", fields["work"], record, after="issued")
        for group, result in fields["groups"].items():
            problems += self._move(self._group, "group", group, record, after="")
            self._step[group] = fields["step"]
            self._issued_at[group] = self._issued_at.get(fields["work"], -1)
            if len(result["trajectories"]) != len(result["rewards"]):
                got, expected = len(result["rewards"]), len(result["trajectories"])
                problems.append(f"group {group}: got {got} rewards, expected {expected}")
        return problems

    def _dropped(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        return self._move(self._group, "group", fields["group"], record, after="sealed")

    def _trained(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        problems = []
        now = (fields["step"], fields["update"])
        if now < self._update:
            problems.append(f"trained step {now[0]} update {now[1]} after step {self._update[0]}")
        self._update = now
        for group in fields["groups"]:
            problems += self._move(self._group, "group", group, record, after="sealed")
            self._newest = max(self._newest, self._issued_at.get(group, -1))
        return problems

    def _replayed(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        problems = []
        for group in fields["groups"]:
            last = self._group.get(group)
            if last is None or last.event != "trained" or last.fields["step"] >= fields["step"]:
                what = f"{last.event} in step {last.fields.get('step')}" if last else "never sealed"
                problems.append(f"group {group} replayed, but {what}, expected trained in an earlier step")
        return problems

    def _published(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        before, self._version = self._version, fields["version"]
        if before is None or fields["version"] == before + 1:
            return []
        return [f"published version {fields['version']}, expected {before + 1}"]

    def _checkpoint(self, record: Record, fields: Mapping[str, Any]) -> list[str]:
        if fields["position"] <= record.seq:
            return []
        return [f"checkpoint of step {fields['step']} at {fields['position']}, after itself"]

    @staticmethod
    def _move(lives: dict[str, Record], what: str, name: str, record: Record, *, after: str) -> list[str]:
        before = lives[name].event if name in lives else ""
        lives[name] = record
        if before == after:
            return []
        if before == record.event:
            return [f"{what} {name} {record.event} twice"]
        return [
            f"{what} {name} {record.event} after {before or 'nothing'}, expected after {after or 'nothing'}"
        ]

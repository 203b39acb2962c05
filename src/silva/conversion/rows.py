"""`silva convert` of data: rows of any shape that Silva reads, and rollouts, as rows of another tool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from silva.conversion.tensors import OnDone
from silva.data.dialogues import dialogue, shape_of
from silva.data.recorded import rollout_files, said_in
from silva.data.row_shapes import recognised
from silva.data.rows import read_rows
from silva.data.written import LOST, WRITERS, CannotHold, as_verl, beside, row_of
from silva.errors import ConfigError
from silva.storage.placed import placed, refuse_existing, refuse_lossy, writing
from silva.storage.rollouts import RolloutRow, read_rollouts, state_of

SUFFIXES = (".jsonl", ".parquet")

Found = tuple[str, dict[str, Any] | str, set[str]]
"""Where a row was read, the row that becomes of it (or why there is none), and what it loses."""


class ConvertedRows(NamedTuple):
    """`notes`: in words, what could not be held."""

    path: Path
    rows: int
    notes: list[str]

    def __str__(self) -> str:
        return f"{self.rows} rows"


def convert_rows(
    source: str,
    to: str,
    output: Path | None,
    *,
    overwrite: bool,
    on_row: OnDone,
    best: bool = False,
    min_reward: float | None = None,
) -> ConvertedRows:
    """Write the rows of `source` in the shape `to`: of `WRITERS`, or "verl".

    Args:
        source: a file, a folder of files, a data set of the hub (its split "train"), a run's folder, or its
            rollouts.
        output: ends with .jsonl or .parquet; None: a .jsonl file here, by the name of the source.
        best: of each group that was played in training, only the rollout with the highest raw reward.
        min_reward: the least raw reward of a rollout; None: any.

    Raises:
        ConfigError: a row cannot be read (it names file, line and key), the shape holds none of them, or
            `best` or `min_reward` is given for rows that are no rollouts.
        RunFolderError: something is at `output` already, or it cannot be written.
    """
    path = output or Path(f"{Path(source).expanduser().resolve().stem}-{to}.jsonl")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--output: got {path}, expected a name that ends with {' or '.join(SUFFIXES)}")
    refuse_existing(path, overwrite)
    refuse_lossy(path, Path(source).expanduser())
    files = rollout_files(Path(source).expanduser())
    if files and to == "verl":
        raise ConfigError(
            f"{source}: rollouts hold no answer to grade by, which verl's rows need; convert the data that "
            f"the run was trained on, or take --to {', '.join(WRITERS)}"
        )
    if not files and (best or min_reward is not None):
        raise ConfigError(
            f"{source}: got no rollouts, expected a run's folder or its rollouts to choose from by reward"
        )
    found = _of_rollouts(files, to, best, min_reward) if files else _of_rows(source, to)
    tally = Tally(to, on_row)
    with writing(path), placed(path, overwrite=overwrite) as temporary:
        write = _write_parquet if path.suffix == ".parquet" else _write_lines
        write(temporary, tally.kept(found), path)
        if not tally.rows:
            raise ConfigError(
                f"{source}: no row can be written as {to}: {'; '.join(tally.notes()) or 'there is none'}"
            )
    return ConvertedRows(path, tally.rows, tally.notes())


def _of_rows(source: str, to: str) -> Iterator[Found]:
    shape = None
    name = Path(source).stem
    for number, row in enumerate(read_rows(source)):
        shape = shape or (recognised(row) if to == "verl" else shape_of(row))
        try:
            if to == "verl":
                yield (row.where, *as_verl(row, number, name, shape))
            else:
                yield (row.where, *row_of(dialogue(row, shape), to, beside(row, shape)))
        except CannotHold as error:
            yield row.where, str(error), set()
        for key in row.left_out:
            yield row.where, "", {f"the column {key}, which holds {row.left_out[key]}, is left out"}


def _of_rollouts(files: list[Path], to: str, best: bool, min_reward: float | None) -> Iterator[Found]:
    rows = ((file, row) for file in files for row in read_rollouts(file, tokens=False))
    said_before = set[str]()
    for file, row in _best(rows) if best else rows:
        played = row.trajectory
        where = f"{file}: {played.id}"
        said = said_in(played, where)
        if said is None:
            yield where, "the rollout failed", set()
        elif min_reward is not None and played.raw_reward < min_reward:
            yield where, f"the raw reward is below {min_reward:g}", set()
        elif best and (text := said.content) in said_before:
            yield where, "an earlier row says the same", set()
        else:
            about = {"reward": played.raw_reward, "rewards": dict(played.rewards), "task": row.task,
                     "environment": row.environment, "step": row.step, "status": row.status,
                     "advantage": row.advantage}  # fmt: skip
            said_before |= {text} if best else set()
            try:
                made, missing = row_of(said, to, about)
                yield where, made, missing | ({"held out"} if row.status == "eval" else set())
            except CannotHold as error:
                yield where, str(error), set()


def _best(rows: Iterable[tuple[Path, RolloutRow]]) -> list[tuple[Path, RolloutRow]]:
    """The best rollout of each group. Beside thoughts for an expert's states (rollouts/thoughts.py), each a
    group, whole episodes would say the same again."""
    found = dict[tuple[Path, str], RolloutRow]()
    for file, row in rows:
        played = row.trajectory
        if row.status in ("trained", "dropped") and played.failure is None and played.turns:
            best = found.setdefault((file, row.group), row)
            if played.raw_reward > best.trajectory.raw_reward:
                found[file, row.group] = row
    whole = [(file, row) for (file, _), row in found.items()]
    return [each for each in whole if state_of(each[1].group) is not None] or whole


class Tally:
    """Counts what is written, left out and lost, with the first place of each."""

    def __init__(self, to: str, on_row: OnDone) -> None:
        self.to, self.rows, self._on_row = to, 0, on_row
        self._left_out, self._lost = dict[str, list[str]](), dict[str, list[str]]()

    def kept(self, found: Iterator[Found]) -> Iterator[dict[str, Any]]:
        for where, row, missing in found:
            for kind in missing:
                self._lost.setdefault(LOST.get(kind, kind), []).append(where)
            if isinstance(row, str):
                if row:
                    self._left_out.setdefault(row, []).append(where)
                continue
            self.rows += 1
            self._on_row(self.rows, 0)
            yield row

    def notes(self) -> list[str]:
        rows = [
            f"{len(at)} rows are left out: {why} (the first: {at[0]})" for why, at in self._left_out.items()
        ]
        return rows + [
            f"in {len(at)} rows {what} (the first: {at[0]})" for what, at in sorted(self._lost.items())
        ]


def _write_lines(temporary: Path, rows: Iterator[dict[str, Any]], path: Path) -> None:
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)  # ASCII: texts may hold half a surrogate


def _write_parquet(temporary: Path, rows: Iterator[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    held = list(rows)
    for row in held:
        if isinstance(row.get("tools"), list):  # parquet would give every schema the keys of all
            row["tools"] = json.dumps(row["tools"], ensure_ascii=False)
    names = dict.fromkeys(name for row in held for name in row)
    columns = dict[str, Any]()
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in held])
        except (pa.ArrowException, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{path}: the column {name} has no place in parquet ({error}); write a .jsonl file"
            ) from error
    parquet.write_table(pa.table(columns), temporary)

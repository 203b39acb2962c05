"""Rollouts on disk: one parquet file a step, every rollout of it, exact to the last bit.

One row is one trajectory: the fields of its RolloutRow, of its Trajectory, and numbers derived from them. The
flat columns answer questions (`select avg(reward_raw) ... where environment = 'hanoi'`); the nested ones
(`turns`, `observation`) rebuild the trajectory. Log-probabilities and entropies are float64, as sampled.
Arguments of tool calls and schemas of tools are JSON text, and routes, if there are any, .npy files. What is
not here: which rollouts are trained or dropped, and why.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from silva.errors import RecordError
from silva.ports import FILES
from silva.storage.columns import Columns, arrow, utf8
from silva.storage.layout import step_path, steps_in
from silva.types import Message, Trajectory, Turn
from silva.wire.codec import Aside, hints

Status = Literal["trained", "dropped", "failed", "eval"]
SUFFIX = ".parquet"
ROW_GROUP = 256  # rows
_STATE = re.compile(r"/t(\d+)$")


@dataclass(frozen=True, slots=True)
class LearnedTurn:
    """What training knew of the tokens of a turn. An array has an entry for each token of the reply, those of
    `streams` for each token of the turn, or a single one if it is the same for all of them.

    Attributes:
        turn: its id.
        weights: in the loss, before they are normalised.
        logprobs: of the trainer before its first update; empty if the recipe does not ask for them.
        streams: weights of cross-entropy, by name.
        clipped: by the loss in the update of these tokens; empty if it has no clip.
    """

    turn: str
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    streams: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    clipped: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One trajectory and what became of it. `reason` says why it was dropped or failed, `version` is that of
    the policy trained then, and `learned` with what, turn by turn."""

    step: int
    task: str
    environment: str
    group: str
    trajectory: Trajectory
    status: Status
    reason: str = ""
    advantage: float | None = None
    version: int | None = None
    learned: tuple[LearnedTurn, ...] = ()

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            expected = ", ".join(get_args(Status))
            raise RecordError(
                f"rollout {self.trajectory.id}: status: got {self.status!r}, expected one of {expected}"
            )


_DERIVED: dict[str, tuple[type, Callable[[Trajectory], Any]]] = {
    "reward_raw": (float, lambda t: t.raw_reward),
    "reward_shaped": (float, lambda t: t.shaped_reward),  # raw plus shaped: what training saw
    "turn_count": (int, lambda t: len(t.turns)),
    "tokens": (int, lambda t: t.tokens()),
    "response_tokens": (int, lambda t: t.tokens("policy")),
    "tool_calls": (
        int,
        lambda t: sum(len(turn.messages[-1].tool_calls) for turn in t.turns if turn.messages),
    ),
    "entropy": (float, lambda t: _mean(t, "entropies")),
    "oldest_version": (int, lambda t: min(_sampled(t, "versions"), default=None)),
    "text": (str, lambda t: _text(t)),  # of all messages, to search in
}
_OF_ROW = {name: hint for name, hint in hints(RolloutRow).items() if name != "trajectory"}
_OF_TRAJECTORY = {name: hint for name, hint in hints(Trajectory).items() if name != "id"}


def _schema(without: Collection[str] = ()) -> pa.Schema:
    return pa.schema(
        [
            *((name, arrow(hint)) for name, hint in _OF_ROW.items()),
            ("trajectory", pa.string()),  # its id
            *((name, arrow(kind)) for name, (kind, _) in _DERIVED.items()),
            *((name, arrow(hint, without)) for name, hint in _OF_TRAJECTORY.items()),
        ]
    )


SCHEMA = _schema(without=["routes"])
ROUTED = _schema()
"""Of files whose segments have routes (routes.py): no others have that column."""
_WHOLE = [*_OF_ROW, "trajectory", *_OF_TRAJECTORY]
_WITHOUT_TOKENS = [
    *(name for name in _WHOLE if name not in ("turns", "learned")),
    *(f"turns.list.element.{name}" for name in hints(Turn) if name != "segments"),
]
_ROWS = Columns().fields_of(RolloutRow)
_NOTHING = Aside()  # columns leave nothing beside them


def state_of(group: str) -> int | None:
    """Which of an expert's states the thoughts of a group are for (rollouts/thoughts.py); None for others."""
    found = _STATE.search(group)
    return int(found[1]) if found else None


def work_of(group: str) -> str:
    """The piece of work that a group belongs to: itself, or what the thoughts for a state are part of."""
    return _STATE.sub("", group)


rollouts_path = partial(step_path, suffix=SUFFIX)
"""The file of a step, by its folder and number."""
rollouts_in = partial(steps_in, suffix=SUFFIX)
"""The files in a folder by step, the first step first."""


def truncate_rollouts(folder: Path, last_step: int) -> None:
    """Remove the files of steps after `last_step`, and what a write that was killed has left."""
    for step, path in rollouts_in(folder).items():
        if step > last_step:
            path.unlink()
    for path in folder.glob(".step_*.tmp-*"):
        path.unlink()


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write `rows` to `path` (zstd), all or nothing.

    If the file exists (training and evaluation of a step are reported separately), its rows stay, except
    those with the same trajectory and status, which are replaced.

    Raises:
        OSError: the disk does not take it.
        RecordError: what is there cannot be read.
    """
    table = _table(rows)
    if path.exists():
        old = _read(path, SCHEMA.names, str(path))
        if old.schema.equals(ROUTED) != table.schema.equals(ROUTED):  # one of them has no routes
            old, table = (pa.Table.from_pylist(each.to_pylist(), schema=ROUTED) for each in (old, table))
        table = pa.concat_tables([_without(old.cast(table.schema), table), table])
    FILES.write_atomic(path, _file(table))


def encode_rollouts(rows: Sequence[RolloutRow]) -> bytes:
    """What a file of these rows holds."""
    return _file(_table(rows))


def decode_rollouts(data: bytes, name: str) -> list[RolloutRow]:
    """The rows of a file's content; errors as of `read_rollouts`, about the file `name`."""
    return _rows(io.BytesIO(data), None, _WHOLE, name)


def read_rollouts(path: Path, rows: Sequence[int] | None = None, *, tokens: bool = True) -> list[RolloutRow]:
    """The rows as they were written, every float exact.

    Args:
        rows: only these, by their place in the file.
        tokens: False leaves out the segments of every turn.

    Raises:
        RecordError: the file cannot be read, or is no file of rollouts; or which of its rows is damaged.
    """
    return _rows(path, rows, _WHOLE if tokens else _WITHOUT_TOKENS, str(path))


def read_columns(path: Path, names: Sequence[str], rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Some flat columns, which is fast; `rows` and errors as of `read_rollouts`."""
    return _values(path, rows, names, str(path))


def _table(rows: Sequence[RolloutRow]) -> pa.Table:
    turns = (turn for row in rows for turn in row.trajectory.turns)
    routed = any(segment.routes is not None for turn in turns for segment in turn.segments)
    return pa.Table.from_pylist([_flat(row) for row in rows], schema=ROUTED if routed else SCHEMA)


def _file(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", row_group_size=ROW_GROUP)
    return buffer.getvalue()


def _rows(
    source: Path | io.BytesIO, rows: Sequence[int] | None, columns: Sequence[str], name: str
) -> list[RolloutRow]:
    found = list[RolloutRow]()
    for values in _values(source, rows, columns, name):
        try:
            found.append(_row(values))
        except (ValueError, TypeError, KeyError) as error:  # JSON in a column, a map or a list that is null
            number = 1 + (len(found) if rows is None else rows[len(found)])
            what = str(error) if isinstance(error, RecordError) else repr(error)
            raise RecordError(f"{name}: row {number}: {what}: damaged, or of another version") from error
    return found


def _values(
    source: Path | io.BytesIO, rows: Sequence[int] | None, columns: Sequence[str], name: str
) -> list[dict[str, Any]]:
    if rows is None:
        return _read(source, columns, name).to_pylist()
    groups = sorted({row // ROW_GROUP for row in rows})  # every file is written with groups of this size
    place = {group: at * ROW_GROUP for at, group in enumerate(groups)}
    table = _read(source, columns, name, groups)
    return table.take([place[row // ROW_GROUP] + row % ROW_GROUP for row in rows]).to_pylist()


def _read(
    source: Path | io.BytesIO, columns: Sequence[str], name: str, groups: Sequence[int] | None = None
) -> pa.Table:
    """`groups`: only these groups of rows."""
    try:
        with pq.ParquetFile(source) as file:
            wanted = range(file.num_row_groups) if groups is None else groups
            table = file.read_row_groups(list(wanted), columns=list(columns))
    except (OSError, pa.ArrowException, UnicodeEncodeError) as error:  # the last one: of a path
        raise RecordError(f"{name}: cannot be read as parquet: {error}") from error
    if missing := {column.partition(".")[0] for column in columns} - set(table.column_names):
        raise RecordError(f"{name}: no column {', '.join(sorted(missing))}: damaged, or of another version")
    return table


def _sampled(trajectory: Trajectory, name: str) -> list[Any]:
    """What the segments of the policy have under a name, token by token."""
    segments = (s for turn in trajectory.turns for s in turn.segments if s.source == "policy")
    return [value for segment in segments for value in getattr(segment, name)]


def _mean(trajectory: Trajectory, name: str) -> float | None:
    values = _sampled(trajectory, name)
    return sum(values) / len(values) if values else None


def _text(trajectory: Trajectory) -> str:
    """What was shown, thought, called and said, each text once, also where a context repeats it."""
    last = trajectory.observation
    messages = [m for turn in trajectory.turns for m in turn.messages] + [*(last.context or last.messages)]
    parts = dict.fromkeys(part for message in messages for part in said_in(message) if part)
    return utf8("\n".join(parts))


def said_in(message: Message) -> list[str]:
    """The texts of a message: its thought, its content, its calls, and errors in them."""
    calls = [f"{c.name}({json.dumps(c.arguments, ensure_ascii=False)})" for c in message.tool_calls]
    return [message.reasoning or "", message.content, *calls, *message.errors]


def _without(old: pa.Table, new: pa.Table) -> pa.Table:
    def keys(table: pa.Table) -> pa.Array:
        return pc.binary_join_element_wise(table["status"], table["trajectory"], "\n")

    return old.filter(pc.invert(pc.is_in(keys(old), value_set=keys(new).combine_chunks())))


def _flat(row: RolloutRow) -> dict[str, Any]:
    values = _ROWS.pack(row, _NOTHING)
    trajectory = values.pop("trajectory")
    derived = {name: value(row.trajectory) for name, (_, value) in _DERIVED.items()}
    return {**values, **trajectory, **derived, "trajectory": trajectory["id"]}


def _row(values: dict[str, Any]) -> RolloutRow:
    values.setdefault("learned", [])
    for turn in values["turns"]:
        for segment in turn.setdefault("segments", []):
            segment.setdefault("routes", None)
    trajectory = {name: values[name] for name in _OF_TRAJECTORY if name in values}
    row = {name: values[name] for name in _OF_ROW if name in values}
    return _ROWS.unpack({**row, "trajectory": {**trajectory, "id": values["trajectory"]}}, _NOTHING)

"""Rollouts on disk: one parquet file a step, every rollout of it, exact to the last bit.

One row is one trajectory. The flat columns answer questions (`select avg(reward_raw) ... where
environment = 'hanoi'`); the nested ones (`turns`, `observation`) rebuild the trajectory. Log-probabilities
and entropies are float64, as sampled. Only plain data: no pickle. Arguments of tool calls, tool schemas
and observations are JSON text. What is not here: which rollouts are trained or dropped, and why.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from silva.errors import RecordError
from silva.ports import FILES
from silva.storage.layout import step_path, steps_in
from silva.types import Message, Observation, Segment, ToolCall, ToolSpec, Trajectory, Turn

Status = Literal["trained", "dropped", "failed", "eval"]
SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One trajectory and what became of it. `reason` says why it was dropped or failed."""

    step: int
    task: str
    environment: str
    group: str
    trajectory: Trajectory
    status: Status
    reason: str = ""
    advantage: float | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            expected = ", ".join(get_args(Status))
            raise RecordError(
                f"rollout {self.trajectory.id}: status: got {self.status!r}, expected one of {expected}"
            )


_NUMBERS = pa.map_(pa.string(), pa.float64())
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.string()),  # JSON: [{"name", "arguments", "id"}], null where there is none
        ("raw", pa.string()),
        ("id", pa.string()),
        ("name", pa.string()),
        ("errors", pa.list_(pa.string())),
    ]
)
_SEGMENT = pa.struct(
    [
        ("source", pa.string()),
        ("tokens", pa.list_(pa.int64())),
        ("logprobs", pa.list_(pa.float64())),
        ("raw_logprobs", pa.list_(pa.float64())),
        ("entropies", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("temperature", pa.float64()),
    ]
)
_TURN = pa.struct(
    [
        ("id", pa.string()),
        ("fresh", pa.bool_()),
        ("stop_reason", pa.string()),
        ("rewards", _NUMBERS),
        ("shaped", _NUMBERS),
        ("metrics", _NUMBERS),
        ("messages", pa.list_(_MESSAGE)),
        ("segments", pa.list_(_SEGMENT)),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("environment", pa.string()),
        ("task", pa.string()),
        ("group", pa.string()),
        ("trajectory", pa.string()),
        ("parent", pa.string()),
        ("fork_turn", pa.int64()),
        ("agent", pa.string()),
        ("episode", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("stop_reason", pa.string()),
        ("failure", pa.string()),
        ("error", pa.string()),
        ("reward_raw", pa.float64()),
        ("reward_shaped", pa.float64()),  # raw plus shaped: what training saw
        ("rewards", _NUMBERS),
        ("shaped", _NUMBERS),
        ("metrics", _NUMBERS),
        ("advantage", pa.float64()),
        ("turn_count", pa.int64()),
        ("tokens", pa.int64()),
        ("response_tokens", pa.int64()),
        ("turns", pa.list_(_TURN)),
        ("observation", pa.string()),  # JSON of the last observation, null where it is empty
    ]
)


def rollouts_path(folder: Path, step: int) -> Path:
    return step_path(folder, step, SUFFIX)


def rollouts_in(folder: Path) -> dict[int, Path]:
    """The files in `folder` by step, the first step first."""
    return steps_in(folder, SUFFIX)


def truncate_rollouts(folder: Path, last_step: int) -> None:
    """Remove the files of steps after `last_step`, and what a write that was killed has left."""
    for step, path in rollouts_in(folder).items():
        if step > last_step:
            path.unlink()
    for path in folder.glob(".step_*.tmp-*"):
        path.unlink()


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write `rows` to `path` (zstd), all or nothing.

    Where the file is there already (evaluation and training of one step are reported apart), its rows
    stay, but for those of the same trajectory and status, which are replaced. OSError where the disk
    does not take it.
    """
    table = pa.Table.from_pylist([_flat(row) for row in rows], schema=SCHEMA)
    if path.exists():
        table = pa.concat_tables([_without(pq.read_table(path, schema=SCHEMA), table), table])
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", row_group_size=256)
    FILES.write_atomic(path, buffer.getvalue())


def read_rollouts(path: Path) -> list[RolloutRow]:
    """The rows as they were written, every float exact. Raises OSError or pyarrow.ArrowInvalid."""
    return [_row(values) for values in pq.read_table(path).to_pylist()]


def _without(old: pa.Table, new: pa.Table) -> pa.Table:
    def keys(table: pa.Table) -> pa.Array:
        return pc.binary_join_element_wise(table["status"], table["trajectory"], "\n")

    return old.filter(pc.invert(pc.is_in(keys(old), value_set=keys(new).combine_chunks())))


def _flat(row: RolloutRow) -> dict[str, Any]:
    t = row.trajectory
    return {
        "step": row.step,
        "environment": _text(row.environment),
        "task": _text(row.task),
        "group": _text(row.group),
        "trajectory": _text(t.id),
        "parent": _text(t.parent),
        "fork_turn": t.fork_turn,
        "agent": _text(t.agent),
        "episode": _text(t.episode),
        "status": row.status,
        "reason": _text(row.reason),
        "stop_reason": t.stop_reason,
        "failure": t.failure,
        "error": _text(t.error),
        "reward_raw": t.raw_reward,
        "reward_shaped": t.shaped_reward,
        "rewards": _numbers(t.rewards),
        "shaped": _numbers(t.shaped),
        "metrics": _numbers(t.metrics),
        "advantage": row.advantage,
        "turn_count": len(t.turns),
        "tokens": t.tokens(),
        "response_tokens": t.tokens("policy"),
        "turns": [_flat_turn(turn) for turn in t.turns],
        "observation": None if t.observation == Observation() else _flat_observation(t.observation),
    }


def _flat_turn(turn: Turn) -> dict[str, Any]:
    return {
        "id": _text(turn.id),
        "fresh": turn.fresh,
        "stop_reason": turn.stop_reason,
        "rewards": _numbers(turn.rewards),
        "shaped": _numbers(turn.shaped),
        "metrics": _numbers(turn.metrics),
        "messages": [_flat_message(message) for message in turn.messages],
        "segments": [{name: getattr(s, name) for name in _SEGMENT.names} for s in turn.segments],
    }


def _flat_message(message: Message) -> dict[str, Any]:
    calls = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in message.tool_calls]
    return {
        "role": message.role,
        "content": _text(message.content),
        "reasoning": _text(message.reasoning),
        "tool_calls": json.dumps(calls) if calls else None,
        "raw": _text(message.raw),
        "id": _text(message.id),
        "name": _text(message.name),
        "errors": [_text(error) for error in message.errors],
    }


def _flat_observation(observation: Observation) -> str:
    context = observation.context
    return json.dumps(
        {
            "messages": [_flat_message(m) for m in observation.messages],
            "prefill": observation.prefill,
            "context": None if context is None else [_flat_message(m) for m in context],
            "tools": [[t.name, t.description, t.parameters] for t in observation.tools],
        }
    )


def _numbers(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in values.items()]


def _text(text: str | None) -> str | None:
    """Half a surrogate pair (a tool call may hold one) cannot be UTF-8: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode() if text else text


def _row(values: Mapping[str, Any]) -> RolloutRow:
    trajectory = Trajectory(
        id=values["trajectory"],
        turns=tuple(_turn(turn) for turn in values["turns"]),
        stop_reason=values["stop_reason"],
        rewards=dict(values["rewards"]),
        shaped=dict(values["shaped"]),
        metrics=dict(values["metrics"]),
        observation=_observation(values["observation"]),
        failure=values["failure"],
        error=values["error"],
        parent=values["parent"],
        fork_turn=values["fork_turn"],
        agent=values["agent"],
        episode=values["episode"],
    )
    return RolloutRow(
        step=values["step"],
        task=values["task"],
        environment=values["environment"],
        group=values["group"],
        trajectory=trajectory,
        status=values["status"],
        reason=values["reason"],
        advantage=values["advantage"],
    )


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(
        id=values["id"],
        segments=tuple(_segment(segment) for segment in values["segments"]),
        messages=tuple(_message(message) for message in values["messages"]),
        rewards=dict(values["rewards"]),
        shaped=dict(values["shaped"]),
        metrics=dict(values["metrics"]),
        fresh=values["fresh"],
        stop_reason=values["stop_reason"],
    )


def _segment(values: Mapping[str, Any]) -> Segment:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Segment(**fields)


def _message(values: Mapping[str, Any]) -> Message:
    calls = json.loads(values["tool_calls"] or "[]")
    return Message(
        **{**values, "tool_calls": tuple(ToolCall(**c) for c in calls), "errors": tuple(values["errors"])}
    )


def _observation(text: str | None) -> Observation:
    if text is None:
        return Observation()
    values = json.loads(text)
    context = values["context"]
    return Observation(
        messages=tuple(_message(m) for m in values["messages"]),
        prefill=values["prefill"],
        context=None if context is None else tuple(_message(m) for m in context),
        tools=tuple(
            ToolSpec(name, description, parameters) for name, description, parameters in values["tools"]
        ),
    )

"""Rollouts come back from parquet exactly as they were written."""

from __future__ import annotations

import math
import struct
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import records, same

from silva.errors import RecordError
from silva.storage.rollouts import (
    ROW_GROUP,
    SCHEMA,
    LearnedTurn,
    RolloutRow,
    decode_rollouts,
    read_columns,
    read_rollouts,
    write_rollouts,
)
from silva.types import Message, Observation, Segment, ToolCall, ToolSpec, Trajectory, Turn

ASSISTANT = Message(
    "assistant", "42", reasoning="6 * 7", raw="<think>6 * 7</think>42", id="m1", errors=("bad JSON",),
    tool_calls=(ToolCall("calculator", {"expression": "6 * 7", "deep": {"list": [1, None, 2.5]}}, id="c1"),),
)  # fmt: skip


def trajectory(logprobs: tuple[float, ...] = (-0.1, -1e-17, -0.3), **changes: object) -> Trajectory:
    n = len(logprobs)
    policy = Segment(
        "policy", tuple(range(n)), logprobs, logprobs, logprobs, tuple(range(n)), temperature=0.7
    )
    turn = Turn(
        id="t0",
        segments=(Segment("environment", (7, 8)), policy, Segment("expert", (9,))),
        messages=(Message("system", "be brief"), Message("tool", "", name="calculator", id=""), ASSISTANT),
        rewards={"b": 0.1, "a": 0.2},
        shaped={"format": -0.5},
        metrics={"valid": 1.0},
        fresh=True,
        stop_reason="length",
    )
    spec = ToolSpec("calculator", "adds", {"type": "object"})
    values: dict = {
        "id": "x/1", "turns": (turn, replace(turn, id="t1", fresh=False)), "stop_reason": "max_turns",
        "rewards": {"b": 0.2, "a": 0.4}, "shaped": {"format": -1.0}, "metrics": {"valid": 2.0},
        "observation": Observation((Message("user", "next"),), "pre", (Message("user", "all"),), (spec,)),
        "failure": "mask", "error": "judge timed out", "parent": "x/0", "fork_turn": 1,
        "agent": "b", "episode": "e",
    }  # fmt: skip
    return Trajectory(**(values | changes))


def row(**changes: object) -> RolloutRow:
    values: dict = {
        "step": 3, "task": "calc/7", "environment": "calc", "group": "calc/7", "trajectory": trajectory(),
        "status": "dropped", "reason": "zero variance", "advantage": None,
    }  # fmt: skip
    return RolloutRow(**(values | changes))


def test_every_field_comes_back(tmp_path: Path) -> None:
    rows = [row(), row(trajectory=trajectory(id="x/2", turns=(), observation=Observation()), advantage=-0.25)]
    write_rollouts(tmp_path / "step_3.parquet", rows)
    assert read_rollouts(tmp_path / "step_3.parquet") == rows


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(records(Trajectory), st.none() | st.floats())
def test_any_trajectory_comes_back_except_half_surrogate_pairs(
    tmp_path_factory: pytest.TempPathFactory, played: Trajectory, advantage: float | None
) -> None:
    path = tmp_path_factory.mktemp("any") / "step_1.parquet"
    written = row(trajectory=played, advantage=advantage)
    write_rollouts(path, [written])
    (found,) = read_rollouts(path)
    assert same(found, whole(written))


def whole(value: Any) -> Any:
    """`value` with a question mark in place of half a surrogate pair, except in the arguments of a tool."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, tuple):
        return tuple(map(whole, value))
    if isinstance(value, dict):
        return {whole(key): whole(each) for key, each in value.items()}
    if is_dataclass(value):
        kept = ("arguments", "parameters")
        changes = {f.name: whole(getattr(value, f.name)) for f in fields(value) if f.name not in kept}
        return replace(value, **changes)  # type: ignore[type-var]
    return value


def test_some_rows_can_be_read_without_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "step_3.parquet"
    rows = [row(trajectory=trajectory(id=f"x/{i}")) for i in range(4)]
    write_rollouts(path, rows)
    assert read_rollouts(path, [3, 1]) == [rows[3], rows[1]]
    (found,) = read_rollouts(path, [2], tokens=False)
    turns = tuple(replace(turn, segments=()) for turn in rows[2].trajectory.turns)
    assert found == replace(rows[2], trajectory=replace(rows[2].trajectory, turns=turns))
    assert read_columns(path, ["trajectory", "tokens"], [2]) == [{"trajectory": "x/2", "tokens": 12}]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_logprobs_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.mktemp("bits") / "step_1.parquet"
    write_rollouts(path, [row(trajectory=trajectory(tuple(values)))])
    segment = read_rollouts(path)[0].trajectory.turns[1].segments[1]
    for got in (segment.logprobs, segment.raw_logprobs, segment.entropies):
        for value, expected in zip(got, values, strict=True):
            same = struct.pack("<d", value) == struct.pack("<d", expected)
            assert same or (math.isnan(value) and math.isnan(expected))


def test_flat_columns_can_be_queried(tmp_path: Path) -> None:
    write_rollouts(
        tmp_path / "step_3.parquet", [row(), row(status="trained", trajectory=trajectory(id="x/2"))]
    )
    table = pq.read_table(tmp_path / "step_3.parquet")
    trained = table.filter(pc.field("status") == "trained").to_pylist()
    assert [r["trajectory"] for r in trained] == ["x/2"]
    assert trained[0]["reward_raw"] == pytest.approx(0.6)
    assert trained[0]["reward_shaped"] == pytest.approx(-0.4)
    assert (trained[0]["turn_count"], trained[0]["tokens"], trained[0]["response_tokens"]) == (2, 12, 6)
    assert (trained[0]["stop_reason"], trained[0]["failure"], trained[0]["parent"]) == (
        "max_turns",
        "mask",
        "x/0",
    )
    assert (
        table["turns"].type.value_type.field("segments").type.value_type.field("logprobs").type.value_type
        == "double"
    )


def test_numbers_of_a_rollout_and_its_text_are_columns(tmp_path: Path) -> None:
    calls = trajectory(id="x/1", logprobs=(0.5, 1.0, 3.0))
    silent = trajectory(id="x/2", turns=(), observation=Observation())
    write_rollouts(tmp_path / "step_3.parquet", [row(trajectory=calls), row(trajectory=silent)])
    names = ["tool_calls", "entropy", "oldest_version", "text"]
    call = 'calculator({"expression": "6 * 7", "deep": {"list": [1, null, 2.5]}})'
    said = ["be brief", "6 * 7", "42", call, "bad JSON", "all"]
    assert read_columns(tmp_path / "step_3.parquet", names) == [
        {"tool_calls": 2, "entropy": 1.5, "oldest_version": 0, "text": "\n".join(said)},
        {"tool_calls": 0, "entropy": None, "oldest_version": None, "text": ""},
    ]


def test_what_training_knew_comes_back(tmp_path: Path) -> None:
    learned = (
        LearnedTurn("t0", (0.5,), (1.0, 1.0, 0.0, 1.0), (-0.1, math.nan, -3e-17, -0.2), {"echo": (0.0,) * 6}),
        LearnedTurn("t1", (0.5,), (1.0,)),
    )
    write_rollouts(tmp_path / "step_3.parquet", [row(version=4, learned=learned)])
    (found,) = read_rollouts(tmp_path / "step_3.parquet")
    assert same(found, row(version=4, learned=learned))


def test_rows_are_found_in_whatever_group_of_the_file_they_are(tmp_path: Path) -> None:
    path, count = tmp_path / "step_3.parquet", 2 * ROW_GROUP + 7
    write_rollouts(path, [row(trajectory=trajectory(id=str(i), turns=())) for i in range(count)])
    wanted = [count - 1, 0, ROW_GROUP, ROW_GROUP - 1, count - 1]
    assert [each.trajectory.id for each in read_rollouts(path, wanted)] == [str(i) for i in wanted]
    with pytest.raises((IndexError, RecordError)):
        read_rollouts(path, [count])


@pytest.mark.parametrize("places", [None, [2, 1]])
def test_a_damaged_row_is_named_with_its_file(tmp_path: Path, places: list[int] | None) -> None:
    """A file of an older version, whose turns lack a field, and one with a map that is null."""
    path = tmp_path / "step_3.parquet"
    write_rollouts(path, [row(trajectory=trajectory(id=f"x/{i}")) for i in range(3)])
    rows = pq.read_table(path).to_pylist()
    turn = SCHEMA.field("turns").type.value_type
    fields = [field for field in turn if field.name != "after"]
    schema = SCHEMA.set(SCHEMA.get_field_index("turns"), pa.field("turns", pa.list_(pa.struct(fields))))
    number = 1 if places is None else 3
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    with pytest.raises(
        RecordError, match=rf"step_3\.parquet: row {number}: Turn\.after: the field is missing"
    ):
        read_rollouts(path, places)
    rows[1]["rewards"] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    with pytest.raises(RecordError, match=r"step_3\.parquet: row 2: .*damaged"):
        read_rollouts(path, places)
    with pytest.raises(RecordError, match=r"^replay\.parquet: row 2: "):
        decode_rollouts(path.read_bytes(), "replay.parquet")


def test_a_second_write_adds_and_replaces_by_trajectory_and_status(tmp_path: Path) -> None:
    path = tmp_path / "step_3.parquet"
    write_rollouts(path, [row(), row(status="trained", trajectory=trajectory(id="x/2"))])
    write_rollouts(path, [row(reason="new"), row(status="eval", trajectory=trajectory(id="x/2"))])
    found = [(r.trajectory.id, r.status, r.reason) for r in read_rollouts(path)]
    assert found == [
        ("x/2", "trained", "zero variance"),
        ("x/1", "dropped", "new"),
        ("x/2", "eval", "zero variance"),
    ]


def test_half_a_surrogate_pair_is_replaced_in_text_and_kept_in_arguments(tmp_path: Path) -> None:
    message = Message("assistant", "a\ud800b", tool_calls=(ToolCall("f", {"x": "\ud800"}),))
    turn = replace(trajectory().turns[0], messages=(message,))
    write_rollouts(tmp_path / "step_1.parquet", [row(trajectory=trajectory(turns=(turn,)))])
    got = read_rollouts(tmp_path / "step_1.parquet")[0].trajectory.turns[0].messages[0]
    assert (got.content, got.tool_calls[0].arguments) == ("a?b", {"x": "\ud800"})


def test_half_a_surrogate_pair_in_the_name_of_a_number_is_replaced(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "step_1.parquet", [row(trajectory=trajectory(metrics={"a\ud800": 1.0}))])
    assert read_rollouts(tmp_path / "step_1.parquet")[0].trajectory.metrics == {"a?": 1.0}


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(
        RecordError, match="rollout x/1: status: got 'lost', expected one of trained, dropped"
    ):
        row(status="lost")


def test_routes_are_a_column_of_files_that_have_some(tmp_path: Path) -> None:
    """Of any type, also where a file without is added to."""
    plain, routed = row(), trajectory(id="x/2")
    segments = tuple(
        replace(each, routes=np.arange(2 * len(each.tokens), dtype=np.uint16).reshape(-1, 1, 2) + 60_000)
        for each in routed.turns[0].segments[:2]
    )
    first = replace(routed.turns[0], segments=(*segments, routed.turns[0].segments[2]))
    other = row(trajectory=replace(routed, turns=(first, *routed.turns[1:])))
    one, two = tmp_path / "step_1.parquet", tmp_path / "step_2.parquet"
    write_rollouts(one, [plain])
    assert pq.read_schema(one).field("turns").type.value_type.field("segments").type.value_type.names == [
        "source", "tokens", "logprobs", "raw_logprobs", "entropies", "versions", "temperature", "reported"
    ]  # fmt: skip
    write_rollouts(one, [other])
    write_rollouts(two, [other])
    write_rollouts(two, [plain])
    for path in (one, two):
        found = {each.trajectory.id: each for each in read_rollouts(path)}
        assert found == {"x/1": plain, "x/2": other}
        mine = found["x/2"].trajectory.turns[0].segments
        for got, expected in zip(mine[:2], segments, strict=True):
            assert got.routes is not None and got.routes.dtype == np.uint16
            assert np.array_equal(got.routes, expected.routes)
        assert mine[2].routes is None and found["x/1"].trajectory.turns[0].segments[0].routes is None

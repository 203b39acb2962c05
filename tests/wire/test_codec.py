"""Records come back from bytes as they were, and what is no record is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records import PLAIN, RECORDS, records, same

from silva.errors import RecordError
from silva.protocols import TrainerCapabilities
from silva.types import (
    Group,
    LossSpec,
    Message,
    Sample,
    SamplingParams,
    Segment,
    Signals,
    Step,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from silva.wire.codec import decode, encode

pytestmark = pytest.mark.slow


def turn(name: str, **changes: Any) -> Turn:
    sampled = Segment("policy", (5, 6), (-0.5, -1e-17), versions=(3, 3))
    return replace(Turn(name, (Segment("environment", (1, 2)), sampled), fresh=True), **changes)


def trajectory(name: str, *turns: Turn) -> Trajectory:
    return Trajectory(name, turns, "terminated", rewards={"solved": 1.0})


def sample(**changes: Any) -> Sample:
    arrays = {
        "tokens": np.array([1, 5, 6]), "loss_weights": np.array([0, 1, 1], np.float32),
        "logprobs": np.array([np.nan, -0.5, -np.inf]), "temperatures": np.ones(3),
        "versions": np.array([-1, 3, 3]), "turn_spans": ((1, 3),),
    }  # fmt: skip
    return Sample(**(arrays | changes), trajectory="a", group="g", turn_ids=("a/0",))


def line(data: bytes) -> Any:
    """The first line, which must be strict JSON."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data.partition(b"\n")[0], parse_constant=refuse)


def test_every_record_is_tested() -> None:
    names = (
        "Task ToolSpec ToolCall Message Observation Step SamplingParams Completion Segment Turn Trajectory "
    )
    assert {kind.__name__ for kind in RECORDS} >= {*(names + "Group Sample LossSpec Signals").split()}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_record_comes_back_equal(kind: Any, data: st.DataObject) -> None:
    record = data.draw(records(kind))
    encoded = encode(record)
    assert same(decode(kind, encoded), record)
    line(encoded)


@given(PLAIN)
def test_plain_data_comes_back_equal(value: Any) -> None:
    spec = LossSpec("pg", {"value": value})
    assert same(decode(LossSpec, encode(spec)), spec)


def test_a_record_without_arrays_is_one_line_of_json() -> None:
    task = Task("lake/7", "lake", 3, {"map": ["SF", "FG"], "wind": (0.5, float("inf"))}, answer=float("nan"))
    assert encode(task) == (
        b'{"record":{"id":"lake/7","environment":"lake","seed":3,"data":{"map":["SF","FG"],'
        b'"wind":{"$tuple":[0.5,{"$float":"Infinity"}]}},"answer":{"$float":"NaN"},"split":"train"},"turns":[]}\n'
    )
    step = Step(rewards={"a": float("-inf"), "b": 1.0})
    assert line(encode(step))["record"]["rewards"] == {"a": "-Infinity", "b": 1.0}


def test_arrays_follow_the_line_in_their_own_types() -> None:
    encoded = encode(sample())
    assert line(encoded)["record"] == {
        "tokens": 0, "loss_weights": 1, "logprobs": 2, "temperatures": 3, "versions": 4, "trajectory": "a",
        "group": "g", "advantages": None, "entropies": None, "old_logprobs": None, "values": None,
        "routes": None,
        "returns": None, "turn_spans": [[1, 3]], "turn_ids": ["a/0"], "streams": {},
    }  # fmt: skip
    found = decode(Sample, encoded)
    assert (found.tokens.dtype, found.loss_weights.dtype) == (np.int64, np.float32)
    assert np.array_equal(found.logprobs, [np.nan, -0.5, -np.inf], equal_nan=True)
    assert found.turn_spans == ((1, 3),) and found.tokens.flags.writeable


def test_a_list_of_records_has_a_type_too() -> None:
    found: Any = decode(
        tuple[Sample, ...], encode([sample(), sample(tokens=np.arange(3))], tuple[Sample, ...])
    )
    assert [one.tokens.tolist() for one in found] == [[1, 5, 6], [0, 1, 2]]


@pytest.mark.parametrize("view", [slice(None, None, -1), slice(0, 6, 2)])
def test_an_array_that_is_a_view_keeps_its_order(view: slice) -> None:
    tokens = np.arange(12).reshape(6, 2)[view, 1][:3]
    assert decode(Sample, encode(sample(tokens=tokens))).tokens.tolist() == tokens.tolist()


def test_a_group_holds_each_turn_once_and_shares_it_again() -> None:
    first, second = turn("t/0"), turn("t/1")
    trunk, other = trajectory("a", first, second), trajectory("b", first, turn("t/1"))
    group = Group("lake/7", Task("lake/7", "lake", 0, {}), (trunk, other))
    encoded = encode(group)
    assert [each["turns"] for each in line(encoded)["record"]["trajectories"]] == [[0, 1], [0, 2]]
    assert [each["id"] for each in line(encoded)["turns"]] == ["t/0", "t/1", "t/1"]
    found = decode(Group, encoded)
    assert found == group
    a, b = found.trajectories
    assert a.turns[0] is b.turns[0] and a.turns[1] is not b.turns[1]


def test_numbers_of_numpy_become_plain() -> None:
    step = Step(rewards={"a": np.float32(0.5), "b": 2}, terminated=np.bool_(True))  # type: ignore[arg-type]
    assert same(decode(Step, encode(step)), Step(rewards={"a": 0.5, "b": 2.0}, terminated=True))
    segment = Segment("expert", tuple(np.arange(3)))
    assert same(decode(Segment, encode(segment)).tokens, (0, 1, 2))


def test_two_arrays_of_signals_and_none() -> None:
    signals = Signals(logprobs=(np.zeros(2), np.full(1, np.nan)))
    assert same(decode(Signals, encode(signals)), signals)


def changed(record: Any, change: Any) -> bytes:
    content = line(encode(record))
    change(content["record"])
    return json.dumps(content).encode() + b"\n"


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        (Task("a", "w", 0, {}), lambda r: r.update(colour=1),
         "Task.colour: unknown field, expected id, environment, seed, data, answer, split"),
        (Task("a", "w", 0, {}), lambda r: r.pop("answer"), "Task.answer: the field is missing"),
        (Message("user", "hi", tool_calls=(ToolCall("f", {}),)), lambda r: r["tool_calls"][0].pop("id"),
         "ToolCall.id: the field is missing"),
        (Task("a", "w", 0, {}), lambda r: r.update(seed="0"), "Task.seed: got '0', expected int"),
        (Task("a", "w", 0, {}), lambda r: r.update(data=[1]), "Task.data: got [1], expected an object"),
        (Task("a", "w", 0, {}), lambda r: r.update(split="test"),
         "Task.split: got 'test', expected one of train, eval"),
        (Step(rewards={"a": 1.0}), lambda r: r["rewards"].update(a="much"),
         "Step.rewards: got 'much', expected a number or one of NaN, Infinity, -Infinity"),
        (Segment("expert", (1,)), lambda r: r.update(tokens=[1, 2.5]),
         "Segment.tokens: got 2.5, expected int"),
        (Segment("expert", (1,)), lambda r: r.update(tokens=7), "Segment.tokens: got 7, expected an array"),
        (Message("user", "hi"), lambda r: r.update(tool_calls=["f"]),
         "ToolCall: got 'f', expected an object"),
        (trajectory("a", turn("t")), lambda r: r.update(turns=[1]),
         "Trajectory.turns: got 1, expected a number below 1"),
        (Signals(), lambda r: r.update(values=[0]), "Signals.values: got 0, expected a number below 0"),
        (SamplingParams(4), lambda r: r.update(max_tokens=0), "max_tokens: got 0, expected 1 or more"),
        (Step(rewards={"a": 1.0}), lambda r: r["rewards"].update(a=10**400),
         f"Step.rewards: got 1{'0' * 76}..., expected a number that a float can hold"),
        (Task("a", "w", 0, {}), lambda r: r.update(answer={"$tuple": 3}),
         "Task.answer: got 3, expected an array"),
        (Task("a", "w", 0, {}), lambda r: r.update(answer={"$dict": 3}),
         "Task.answer: got 3, expected an object"),
    ],
)  # fmt: skip
def test_what_is_no_such_record_is_refused_by_name(record: Any, change: Any, message: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(type(record), changed(record, change))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Task("a", "w", 0, {"when": object}), "Task.data: got <class 'object'>, expected plain JSON"),
        (Task("a", "w", 0, {"by": {1: 2}}), "Task.data: got 1, expected a str as key"),
        (Task("a", "w", 0, {1: 2}), "Task.data: got 1, expected a str as key"),  # type: ignore[dict-item]
        (Task("a", "w", 0.5, {}), "Task.seed: got 0.5, expected int"),  # type: ignore[arg-type]
        (Message("judge", "hi"), "Message.role: got 'judge', expected one of system, user, assistant, tool"),  # type: ignore[arg-type]
        (Message("user", "hi", errors="no"), "Message.errors: got 'no', expected a tuple"),  # type: ignore[arg-type]
        (Message("user", "hi", tool_calls=({},)), "ToolCall: got {}, expected a ToolCall"),  # type: ignore[arg-type]
        (sample(advantages=np.array([1, 2, None])),
         "Sample.advantages: got array([1, 2, None], dtype=object), expected an array of numbers"),
        (Step(rewards={"a": 10**400}),
         f"Step.rewards: got 1{'0' * 76}..., expected a number that a float can hold"),
        (TrainerCapabilities(frozenset({"values", 1})),  # type: ignore[arg-type]
         "TrainerCapabilities.needs: got 1, expected str"),
        (sample(turn_spans=((1, 2, 3),)), "Sample.turn_spans: got (1, 2, 3), expected 2 values"),
    ],
)  # fmt: skip
def test_what_a_field_may_not_hold_is_never_written(record: Any, message: str) -> None:
    with pytest.raises(RecordError) as caught:
        encode(record)
    assert str(caught.value) == message


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_data_that_python_cannot_walk_is_refused_both_ways(depth: int) -> None:
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    with pytest.raises(RecordError, match=r"^Task: its data is nested too deeply$"):
        encode(Task("a", "w", 0, {"deep": deep}))
    around, data = encode(Task("a", "w", 0, {"deep": 7})).split(b"7"), b"[" * depth + b"]" * depth
    with pytest.raises(RecordError, match=r"^Task: its data is nested too deeply$"):
        decode(Task, data.join(around))


@pytest.mark.parametrize("cut", [0, 1, 30, -1, -40])
def test_cut_off_bytes_are_refused(cut: int) -> None:
    with pytest.raises(RecordError, match=r"^Sample: got .*expected an encoded record"):
        decode(Sample, encode(sample())[:cut])


@pytest.mark.parametrize("data", [b"[]\n", b'{"record": {}}\n', b"\xff\xfe", b'{"record": 1, "turns": 2}\n'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match=r"^Task: got .*expected an encoded record"):
        decode(Task, data)

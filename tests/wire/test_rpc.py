"""A call crosses by the type hints of a protocol alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from silva.environments.process.worker import WorkerEpisode
from silva.errors import CheckpointError, RecordError
from silva.trainer.remote import ServedTrainer
from silva.types import LossSpec, Sample
from silva.wire import rpc

Way = Literal["up", "down"]


class Base(Protocol):
    count: int

    async def add(self, number: int, times: int = 1) -> None: ...


class Desk(Base, Protocol):
    """Every form of argument and result."""

    said: tuple[str, ...]

    async def sort(
        self, names: frozenset[str], where: Path, how: Literal["up", "down"]
    ) -> frozenset[str]: ...
    async def numbers(self, samples: Sequence[Sample], loss: LossSpec | None) -> Mapping[str, float]: ...
    async def _hidden(self) -> None: ...
    def plain(self) -> int: ...


class Here:
    """Implements `Desk`."""

    def __init__(self) -> None:
        self.count, self.said, self.got = 0, ("a",), list[Any]()

    async def add(self, number: int, times: int = 1) -> None:
        self.count += number * times

    async def sort(self, names: frozenset[str], where: Path, how: str) -> frozenset[str]:
        self.got = [names, where, how]
        return names | {how}

    async def numbers(self, samples: Sequence[Sample], loss: LossSpec | None) -> Mapping[str, float]:
        if loss is None:
            raise CheckpointError("no loss")
        self.got = [samples, loss]
        return {"loss": np.float32(0.1), "nan": float("nan")}


class There(rpc.proxy(Desk)):  # type: ignore[misc]
    """A desk at the other end of a list of bytes."""

    def __init__(self, desk: Here) -> None:
        self.desk, self.crossed = desk, list[bytes]()

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        call = rpc.encode(Desk, method, arguments)
        answer = await rpc.dispatch(self.desk, Desk, call)
        self.crossed += [call, answer]
        self.answer = rpc.decode(Desk, method, answer)
        return self.answer.result


@pytest.fixture
def there() -> There:
    return There(Here())


def test_a_call_and_its_answer_are_a_few_readable_bytes(there: There) -> None:
    assert asyncio.run(there.add(3)) is None  # type: ignore[func-returns-value]
    assert there.crossed == [
        b'add\n{"record":{"number":3,"times":1},"turns":[]}\n',
        b'{"record":{"result":null,"count":3,"said":["a"]},"turns":[]}\n',
    ]
    assert (there.answer.count, there.answer.said) == (3, ("a",))


def test_arguments_arrive_as_their_hints_say(there: There) -> None:
    found = asyncio.run(there.sort(frozenset({"b", "a"}), how="up", where=Path("x/y")))
    assert there.desk.got == [frozenset({"a", "b"}), Path.cwd() / "x/y", "up"]  # its folder is another one
    assert found == frozenset({"a", "b", "up"})


@pytest.mark.parametrize("long", [False, True])
def test_records_and_numbers_cross_also_on_a_thread(
    there: There, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(rpc, "LONG", 0 if long else 1 << 30)
    here, read, decode = threading.current_thread(), list[bool](), rpc.codec.decode
    monkeypatch.setattr(
        rpc.codec, "decode", lambda *of: (read.append(threading.current_thread() is here), decode(*of))[1]
    )
    ones = np.ones(3)
    row = Sample(np.arange(3), np.array([0, 1, 1]), ones * np.nan, ones, np.arange(3), "t", "g")
    rows, loss = [row, row.replace(logprobs=-ones)], LossSpec("reinforce", {"k": (1, float("inf"))})
    found = asyncio.run(there.numbers(rows, loss))
    assert found["loss"] == float(np.float32(0.1)) and np.isnan(found["nan"])
    assert read == [not long, True]  # at the far end, and here
    samples, told = there.desk.got
    assert told == loss and type(samples) is tuple
    for sent, got in zip(rows, samples, strict=True):
        assert np.array_equal(sent.logprobs, got.logprobs, equal_nan=True)


def test_what_a_method_raises_is_for_the_border_to_write(there: There) -> None:
    with pytest.raises(CheckpointError, match="no loss"):
        asyncio.run(there.numbers([], None))


@pytest.mark.parametrize("name", ["_hidden", "plain", "count", "__init__", "", "x" * 500, "\xff"])
def test_only_coroutine_methods_of_the_protocol_can_be_called(there: There, name: str) -> None:
    with pytest.raises(RecordError, match=r"^no method .{2,82}; expected one of add, numbers, sort$"):
        asyncio.run(rpc.dispatch(there.desk, Desk, name.encode("latin-1") + b"\n{}"))


@pytest.mark.parametrize(
    "arguments, where",
    [
        ([["a"], Path("x"), "up"], "Desk.sort.names: got"),
        ([frozenset("a"), "x", "up"], "Desk.sort.where: got 'x', expected a Path"),
        ([frozenset("a"), Path("x"), "left"], "Desk.sort.how: got 'left', expected one of up, down"),
    ],
)
def test_an_argument_of_another_type_is_named_before_it_is_sent(
    there: There, arguments: list[Any], where: str
) -> None:
    with pytest.raises(RecordError, match=where):
        asyncio.run(there.sort(*arguments))
    assert there.crossed == []
    with pytest.raises(TypeError, match="missing a required argument: 'where'"):
        asyncio.run(there.sort(frozenset("a")))


@pytest.mark.parametrize("protocol", [ServedTrainer, WorkerEpisode])
def test_every_method_of_our_protocols_has_types_that_cross(protocol: type) -> None:
    for name, signature in rpc.methods(protocol).items():
        with pytest.raises(RecordError):  # neither None as every argument nor nothing as an answer
            rpc.encode(protocol, name, [None] * (len(signature.parameters) - 1))
            rpc.decode(protocol, name, b"{}")

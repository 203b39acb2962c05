"""The client of a trainer elsewhere: what a lost one costs, and how soon that is noticed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.server.running import run, until

from silva import __version__
from silva.errors import CapabilityError, CheckpointError, ModelError, NonFiniteError, PartLost, SilvaError
from silva.ports import CLOCK, Clock, use_clock
from silva.protocols import TrainerCapabilities
from silva.trainer.remote import (
    CHECK,
    DEAD_AFTER,
    Open,
    Opened,
    RemoteTrainer,
    ServedTrainer,
    plain_config,
)
from silva.types import OptimParams, Snapshot
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.transport import Peer, Refused, Unreachable

ADDRESS = "unix:/nowhere/trainer.sock"
ALIVE = {"silva": __version__}
PARAMS = OptimParams(lr=0.1)


class Quick(Clock):
    """Sleeping moves the time; nothing waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Stub:
    """As much of a trainer as is asked for."""

    capabilities, version, said = TrainerCapabilities(frozenset({"values"})), 3, ("published",)

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None) -> dict[str, float]:
        return {"lr": policy.lr}

    async def publish(self) -> Snapshot:
        return Snapshot(3)


class FakePeer(Peer):
    """Answers as told.

    Attributes:
        alive: what a question whether it is alive comes to; called with its number.
        answer: what a call comes to.
        sent: (path, bytes) of all calls; `asked_at`: when the last one was made.
    """

    def __init__(self) -> None:
        super().__init__(ADDRESS, name="trainer")
        self.alive: Callable[[int], object] = lambda number: ALIVE
        self.questions = itertools.count()
        self.sent: list[tuple[str, Any]] = []
        self.answer: Callable[[str, bytes], Awaitable[bytes]] = self.usual
        self.cancelled, self.asked_at = 0, 0.0
        self.timeouts: list[float | None] = []

    async def usual(self, path: str, call: bytes) -> bytes:
        return await rpc.dispatch(Stub(), ServedTrainer, call)

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        assert path == "/alive"
        self.timeouts.append(timeout)
        found = self.alive(next(self.questions))
        if isinstance(found, Exception):
            raise found
        return found

    async def send(self, path: str, body: bytes, *, timeout: float | None = None) -> bytes:
        self.asked_at = CLOCK.monotonic()
        self.sent.append((path, body))
        if path == "/open":
            return encode(Opened("s1", TrainerCapabilities(frozenset({"logprobs"}), "folder"), 2, ("hello",)))
        try:
            return await self.answer(path, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def with_trainer(
    peer: FakePeer,
    ask: Callable[[RemoteTrainer], Awaitable[Any]],
    *,
    patience: float = 10,
    timeout: float = 600,
    connect: bool = True,
) -> tuple[Any, list[str], Quick]:
    """What `ask` comes to with a connected trainer, what people were told, and the clock."""
    said: list[str] = []

    async def work() -> Any:
        asked = Open({"steps": 1}, True, "/run", "parameters")
        trainer = RemoteTrainer(peer, asked, patience=patience, timeout=timeout, say=said.append)
        if connect:
            await trainer.connect()
        return await ask(trainer)

    with use_clock(Quick()) as clock:
        return run(work()), said, clock


async def hanging(path: str, call: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_session_is_opened_and_every_answer_says_how_the_trainer_is() -> None:
    peer = FakePeer()

    async def ask(trainer: RemoteTrainer) -> list[Any]:
        found = [(trainer.capabilities.publishes, trainer.version)]
        await trainer.connect()
        found.append((trainer.capabilities.publishes, trainer.version))
        assert await trainer.publish() == Snapshot(3)
        return [*found, (trainer.capabilities.needs, trainer.version)]

    found, said, _ = with_trainer(peer, ask, connect=False)
    assert found == [("parameters", 0), ("folder", 2), ({"values"}, 3)] and said == ["hello", "published"]
    (open_, opening), (path, call) = peer.sent
    assert (open_, decode(Open, opening)) == ("/open", Open({"steps": 1}, True, "/run", "parameters"))
    assert (path, call) == ("/sessions/s1", rpc.encode(ServedTrainer, "publish", []))


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    peer = FakePeer()
    peer.alive = lambda number: Unreachable("no") if number < 13 else ALIVE

    _, said, _ = with_trainer(peer, RemoteTrainer.connect, patience=60, connect=False)
    assert peer.asked_at == 100 + 13 * CHECK
    assert said == [f"waiting for the trainer at {ADDRESS}", "hello"]  # said once


@pytest.mark.parametrize("theirs", [{}, {"silva": "9.9.9"}])
def test_a_trainer_of_another_version_of_silva_is_told_before_anything_is_sent(theirs: object) -> None:
    peer = FakePeer()
    peer.alive = lambda number: theirs

    async def ask(trainer: RemoteTrainer) -> str:
        with pytest.raises(CapabilityError) as refused:
            await trainer.connect()
        return str(refused.value)

    text, *_ = with_trainer(peer, ask, connect=False)
    assert "install the same version at both ends" in text and peer.sent == []


def test_patience_ends() -> None:
    peer = FakePeer()
    peer.alive = lambda number: Unreachable("the trainer at x: gone")

    async def ask(trainer: RemoteTrainer) -> str:
        with pytest.raises(Unreachable) as lost:
            await trainer.connect()
        assert not isinstance(lost.value, PartLost)  # the run would go on, and wait as long again
        return str(lost.value)

    text, _, clock = with_trainer(peer, ask, patience=2, connect=False)
    assert text == "the trainer at x: gone (waited 2 s: placement.patience)" and peer.sent == []
    assert 2 < clock.now - 100 <= 2 + 2 * CHECK


def test_a_server_that_wants_another_key_is_not_waited_for() -> None:
    peer = FakePeer()
    peer.alive = lambda number: Refused("the trainer at x: /alive: HTTP 401: a key is needed", 401, "")

    async def ask(trainer: RemoteTrainer) -> None:
        with pytest.raises(Refused, match="a key is needed"):
            await trainer.connect()

    assert with_trainer(peer, ask, connect=False)[2].now == 100


@pytest.mark.parametrize(("works", "seconds"), [(0, 30), (5, 30 + 5 * CHECK)])
def test_an_answer_that_was_lost_where_nobody_cuts_the_connection(works: int, seconds: float) -> None:
    """The trainer lives. It worked at `works` questions, and then it had nothing to do."""
    peer = FakePeer()
    peer.answer = hanging
    peer.alive = lambda number: ALIVE | {"doing": "optim_step" if 1 <= number <= works else ""}

    async def ask(trainer: RemoteTrainer) -> str:
        with pytest.raises(PartLost) as lost:
            await trainer.optim_step(PARAMS)
        return str(lost.value)

    text, _, clock = with_trainer(peer, ask, timeout=30)
    assert "it answers, and has not worked at this for 30 s" in text and "optim_step" in text
    assert clock.now - peer.asked_at == pytest.approx(seconds, abs=CHECK)


def test_a_call_takes_as_long_as_it_takes_while_the_server_lives() -> None:
    peer, go = FakePeer(), asyncio.Event()

    async def slow(path: str, call: bytes) -> bytes:
        await go.wait()
        return await peer.usual(path, call)

    peer.answer = slow
    # Some answers are missing, but never for DEAD_AFTER.
    missing = int(DEAD_AFTER / CHECK) - 2

    def alive(number: int) -> object:
        if number > 40 * missing:
            go.set()
        return ALIVE if number % missing == 0 else Unreachable("no")

    peer.alive = alive

    async def ask(trainer: RemoteTrainer) -> Any:
        return await trainer.optim_step(PARAMS)

    metrics, _, clock = with_trainer(peer, ask)
    assert metrics == {"lr": 0.1} and clock.now - 100 > 10 * DEAD_AFTER and peer.cancelled == 0


def test_silence_ends_a_call() -> None:
    peer = FakePeer()
    peer.answer = hanging
    peer.alive = lambda number: Unreachable("no") if number else ALIVE

    async def ask(trainer: RemoteTrainer) -> tuple[str, float]:
        with pytest.raises(PartLost) as lost:
            await trainer.optim_step(PARAMS)
        return str(lost.value), CLOCK.monotonic() - peer.asked_at

    (text, seconds), _, _ = with_trainer(peer, ask)
    assert text == (
        f"the trainer at {ADDRESS}: no sign of life for {DEAD_AFTER:g} s (while it was asked to optim_step)"
    )
    assert DEAD_AFTER <= seconds <= DEAD_AFTER + CHECK
    assert peer.cancelled == 1
    assert all(timeout is not None and 0 < timeout <= DEAD_AFTER for timeout in peer.timeouts)


@pytest.mark.parametrize(
    "said", [b"<html>It works!</html>", b"null", Refused("x: HTTP 502: Bad Gateway", 502)]
)
def test_who_answers_but_is_no_trainer_is_a_lost_trainer(said: bytes | Refused) -> None:
    """A proxy before it, say: nobody knows what became of the call."""
    peer = FakePeer()

    async def other(path: str, call: bytes) -> bytes:
        if isinstance(said, Refused):
            raise said
        return said

    async def ask(trainer: RemoteTrainer) -> None:
        peer.answer = other
        with pytest.raises(PartLost, match=r"while it was asked to publish"):
            await trainer.publish()

    with_trainer(peer, ask)


def test_a_proxy_before_a_trainer_that_does_not_run_yet_is_waited_for() -> None:
    peer = FakePeer()
    peer.alive = lambda number: Refused("x: HTTP 503: no upstream", 503) if number < 3 else ALIVE
    with_trainer(peer, RemoteTrainer.connect, connect=False)
    assert peer.asked_at == 100 + 3 * CHECK


@pytest.mark.parametrize("answer", [None, [], "alive"])
def test_who_says_that_it_lives_and_is_no_trainer_is_refused(answer: object) -> None:
    peer = FakePeer()
    peer.alive = lambda number: answer

    async def ask(trainer: RemoteTrainer) -> None:
        with pytest.raises(CapabilityError, match=r"is of Silva before 0\.1\.0"):
            await trainer.connect()

    with_trainer(peer, ask, connect=False)


def test_a_cut_connection_is_a_lost_trainer_at_once() -> None:
    peer = FakePeer()

    async def cut(path: str, call: bytes) -> bytes:
        raise Unreachable("the trainer at x: connection reset")

    peer.answer = cut

    async def ask(trainer: RemoteTrainer) -> None:
        with pytest.raises(PartLost, match=r"connection reset \(while it was asked to publish\)"):
            await trainer.publish()

    with_trainer(peer, ask)
    assert len(peer.sent) == 2  # asked once: nobody knows how far it came


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NonFiniteError", NonFiniteError),
        ("CheckpointError", CheckpointError),
        ("ModelError", ModelError),
        ("PartLost", PartLost),
        ("ValueError", Refused),
        ("SystemExit", Refused),
        ("error_named", Refused),
        ("", Refused),
    ],
)
def test_the_trainers_errors_are_raised_here(kind: str, expected: type[SilvaError]) -> None:
    peer = FakePeer()

    async def refuse(path: str, call: bytes) -> bytes:
        raise Refused(f"the trainer at {ADDRESS}: {path}: HTTP 500: loss: HTTP 500: nan", 500, kind)

    peer.answer = refuse

    async def ask(trainer: RemoteTrainer) -> SilvaError:
        with pytest.raises(SilvaError) as raised:
            await trainer.optim_step(PARAMS)
        return raised.value

    raised = with_trainer(peer, ask)[0]
    assert type(raised) is expected
    if expected is not Refused:
        assert str(raised) == "loss: HTTP 500: nan"


def test_a_cancelled_call_leaves_nothing_behind() -> None:
    peer = FakePeer()
    peer.answer = hanging

    async def ask(trainer: RemoteTrainer) -> Sequence[asyncio.Task[Any]]:
        call = asyncio.create_task(trainer.optim_step(PARAMS))
        await until(lambda: len(peer.sent) == 2, "the call is made")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return [task for task in asyncio.all_tasks() if "_watch" in str(task) or "send" in str(task)]

    assert with_trainer(peer, ask)[0] == [] and peer.cancelled == 1


def test_environments_stay_at_home() -> None:
    assert plain_config({"steps": 4, "environments": [{"type": "file.py:World"}]}) == {"steps": 4}

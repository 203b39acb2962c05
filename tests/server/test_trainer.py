"""The trainer behind HTTP: sessions, one call at a time, and what becomes of errors and lost clients."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from tests.server.running import asking, listening, run, until

from silva.codec import decode, encode
from silva.errors import CheckpointError, NonFiniteError, OutOfMemory, PartLost, RecordError, SilvaError
from silva.protocols import Trainer, TrainerCapabilities
from silva.server.guard import Guard
from silva.server.serving import Bind
from silva.server.trainer import TrainerServer
from silva.trainer.remote import RemoteTrainer
from silva.trainer.wire import METHODS, Call, Open, Opened, Reply
from silva.transport import Peer, Refused
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot, WeightFolder

KEY = "a-key"
LOSS = LossSpec("reinforce", {"kl_coef": 0.5})
PARAMS = OptimParams(lr=1e-2)


class Scripted:
    """A trainer that computes nothing: it notes what it is asked, and waits or fails when it is told to."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.say = say
        self.version, self.closed, self.running = 0, False, 0
        self.calls: list[tuple[Any, ...]] = []
        self.ended: list[str] = []
        self.go: asyncio.Event | None = None
        self.fault: Exception | None = None
        self.capabilities = TrainerCapabilities(frozenset({"values", "logprobs"}), "folder")

    async def _do(self, *call: Any) -> None:
        self.running += 1
        assert self.running == 1, "two calls at once"
        try:
            self.calls.append(call)
            self.say(f"doing {call[0]}")
            if self.go is not None:
                await self.go.wait()
            if self.fault is not None:
                raise self.fault
        finally:
            self.running -= 1
            self.ended.append(call[0])

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        await self._do("score", samples, needs)
        return Signals(values=tuple(sample.loss_weights * np.float32(0.1) for sample in samples))

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        await self._do("forward_backward", samples, loss)
        return {"loss": 0.1 + 0.2, "nan": float("nan"), "of_numpy": np.float32(0.1)}

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        await self._do("optim_step", policy, critic)
        return {"lr": policy.lr}

    async def publish(self) -> Snapshot:
        await self._do("publish")
        self.version += 1
        return await self.snapshot()

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.version, WeightFolder("/weights", "d"))

    async def refresh_reference(self) -> None:
        await self._do("refresh_reference")

    async def restart(self) -> None:
        await self._do("restart")

    async def save(self, path: Path) -> None:
        await self._do("save", path)

    async def load(self, path: Path) -> None:
        await self._do("load", path)

    async def export(self, path: Path) -> None:
        await self._do("export", path)

    async def close(self) -> None:
        self.closed = True


class Park:
    """A server and the trainers that it has built."""

    def __init__(self, folder: Path, lines: list[str] | None = None) -> None:
        self.folder = folder
        self.built: list[Scripted] = []
        self.asked: list[Open] = []
        self.fault: Exception | None = None
        self.server = TrainerServer(self.build)
        log = (lines if lines is not None else []).append
        self.guard = Guard(self.server.app(), Bind(), key=KEY, log=log)

    async def build(self, asked: Open, say: Callable[[str], None]) -> Trainer:
        assert all(trainer.closed for trainer in self.built), "two trainers at once"
        self.asked.append(asked)
        say("built")
        if self.fault is not None:
            raise self.fault
        self.built.append(Scripted(say))
        return self.built[-1]

    def open(self, **changes: Any) -> bytes:
        fields = {"config": {"steps": 4}, "recipe": True, "folder": str(self.folder), "publishes": "folder"}
        return encode(Open(**fields | changes))

    def client(self, client: httpx2.AsyncClient) -> Asked:
        return Asked(client, self)


class Asked:
    """Calls over one client; `session` of the last `open`."""

    def __init__(self, client: httpx2.AsyncClient, park: Park) -> None:
        self.client, self.park, self.session = client, park, ""

    async def open(self, **changes: Any) -> Opened:
        response = await self.client.post("/open", content=self.park.open(**changes))
        assert response.status_code == 200, response.text
        opened = decode(Opened, response.content)
        self.session = opened.session
        return opened

    async def __call__(self, method: str, session: str = "", **call: Any) -> Reply | dict[str, Any]:
        """The reply, or the error."""
        url = f"/sessions/{session or self.session}/{method}"
        response = await self.client.post(url, content=encode(Call(**call)))
        if response.status_code == 200:
            return decode(Reply, response.content)
        return {"status": response.status_code, **response.json()["error"]}


def told(park: Park, ask: Callable[[Asked], Any]) -> Any:
    """What `ask` returns, after an `open`."""

    async def work() -> Any:
        async with asking(park.guard, authorization=f"Bearer {KEY}") as client:
            asked = park.client(client)
            await asked.open()
            return await ask(asked)

    return run(work())


@pytest.fixture
def park(tmp_path: Path) -> Park:
    return Park(tmp_path)


@pytest.fixture
def rows() -> tuple[Sample, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        Sample(
            tokens=rng.integers(0, 256, length),
            loss_weights=np.append(0.0, np.full(length - 1, 1 / length)),
            logprobs=np.append(np.nan, rng.normal(size=length - 1)),
            temperatures=np.full(length, 0.7),
            versions=np.zeros(length, dtype=np.int64),
            trajectory=f"t{length}",
            group="g",
            advantages=rng.normal(size=length),
        )
        for length in (5, 9)
    )


def test_every_method_reaches_the_trainer_with_its_arguments(park: Park, rows: tuple[Sample, ...]) -> None:
    inside = str(park.folder / "checkpoints" / "step_2")

    async def ask(asked: Asked) -> list[Any]:
        return [
            await asked("score", samples=rows, needs=("logprobs", "values")),
            await asked("forward_backward", samples=rows, loss=LOSS),
            await asked("optim_step", policy=PARAMS),
            await asked("optim_step", policy=PARAMS, critic=OptimParams(lr=1e-3)),
            await asked("refresh_reference"),
            await asked("restart"),
            await asked("save", path=inside),
            await asked("load", path=inside),
            await asked("export", path=inside),
            await asked("publish"),
            await asked("snapshot"),
        ]

    replies = told(park, ask)
    trainer = park.built[0]
    assert [call[0] for call in trainer.calls] == [
        "score", "forward_backward", "optim_step", "optim_step", "refresh_reference", "restart", "save",
        "load", "export", "publish",
    ]  # fmt: skip
    assert {call[0] for call in trainer.calls} | {"snapshot"} == {*METHODS}
    score, update, step, both = trainer.calls[:4]
    assert score[2] == {"logprobs", "values"} and update[2] == LOSS
    for sent, got in zip(rows, update[1], strict=True):
        for name in ("tokens", "loss_weights", "logprobs", "advantages"):
            assert np.array_equal(getattr(sent, name), getattr(got, name), equal_nan=True)
    assert step[1:] == (PARAMS, None) and both[1:] == (PARAMS, OptimParams(lr=1e-3))
    assert [call[1] for call in trainer.calls[6:9]] == [Path(inside).resolve()] * 3
    assert np.array_equal(replies[0].signals.values[1], rows[1].loss_weights * np.float32(0.1))
    numbers = replies[1].numbers
    assert (numbers["loss"], numbers["of_numpy"]) == (0.1 + 0.2, float(np.float32(0.1)))
    assert np.isnan(numbers["nan"])
    assert replies[9].snapshot == replies[10].snapshot == Snapshot(1, WeightFolder("/weights", "d"))
    assert [reply.version for reply in replies] == [0] * 9 + [1, 1]


def test_open_says_what_the_trainer_can_do(park: Park) -> None:
    async def ask(asked: Asked) -> Opened:
        return await asked.open(recipe=False, publishes="parameters")

    opened = told(park, ask)
    assert opened.needs == ("logprobs", "values") and opened.version == 0
    assert opened.publishes == "folder"  # what it does, not what it was asked for
    assert [(each.recipe, each.publishes) for each in park.asked] == [(True, "folder"), (False, "parameters")]
    assert park.asked[0].config == {"steps": 4}


def test_who_opens_last_has_the_trainer_and_the_one_before_has_lost_it(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        first = asked.session
        await asked.open()
        lost = await asked("publish", session=first)
        return first, asked.session, lost, await asked("publish")

    first, second, lost, reply = told(park, ask)
    assert first != second
    assert (lost["status"], lost["type"]) == (500, "PartLost")
    assert f"session '{first}' has ended" in lost["message"]
    assert reply.version == 1
    assert [trainer.closed for trainer in park.built] == [True, False]
    assert park.built[0].calls == []


def test_a_call_of_the_session_before_waits_in_vain(park: Park) -> None:
    """It was admitted while the trainer computed; when its turn comes, somebody else has the trainer."""

    async def ask(asked: Asked) -> Any:
        trainer, first = park.built[0], asked.session
        trainer.go = asyncio.Event()
        running = asyncio.create_task(asked("restart", session=first))
        await until(lambda: trainer.running == 1, "the first call computes")
        waiting = asyncio.create_task(asked("publish", session=first))
        await asyncio.sleep(0)
        opening = asyncio.create_task(asked.open())
        await until(lambda: not park.server._session, "the session has ended")
        trainer.go.set()
        await opening
        return await running, await waiting

    running, waiting = told(park, ask)
    assert isinstance(running, Reply)  # it had begun
    assert waiting["type"] == "PartLost"
    assert [call[0] for call in park.built[0].calls] == ["restart"]
    assert park.built[0].closed and not park.built[1].calls


def test_a_session_of_nobody_is_lost(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        return [await asked("publish", session=name) for name in ("x", "0" * 16, "ü", "%00")]

    assert {error["type"] for error in told(park, ask)} == {"PartLost"}
    assert park.built[0].calls == []


def test_before_the_first_open_there_is_no_session(park: Park) -> None:
    async def work() -> Any:
        async with asking(park.guard, authorization=f"Bearer {KEY}") as client:
            return await park.client(client)("publish", session="x")

    assert run(work())["type"] == "PartLost"


def test_calls_come_one_at_a_time_in_order(park: Park, rows: tuple[Sample, ...]) -> None:
    async def ask(asked: Asked) -> Any:
        trainer = park.built[0]
        trainer.go = asyncio.Event()
        first = asyncio.create_task(asked("forward_backward", samples=rows, loss=LOSS))
        await until(lambda: trainer.running == 1, "the first call computes")
        rest = [asyncio.create_task(asked(name)) for name in ("restart", "refresh_reference", "publish")]
        await until(lambda: len(park.server._lock._waiters or ()) == 3, "the others wait")
        assert len(trainer.calls) == 1
        trainer.go.set()
        return await asyncio.gather(first, *rest)

    told(park, ask)  # the trainer asserts that nobody else is there
    assert sorted(park.built[0].ended[1:]) == ["publish", "refresh_reference", "restart"]
    assert park.built[0].ended[0] == "forward_backward"


@pytest.mark.parametrize("method", ["save", "load", "export"])
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc",
        "{run}/..",
        "{run}/../other",
        "{run}/checkpoints/../../other",
        "{run}2",
        "relative",
        "{run}/link",
    ],
)
def test_a_path_outside_the_runs_folder_is_refused(park: Park, method: str, path: str) -> None:
    (park.folder / "link").symlink_to("/etc")

    async def ask(asked: Asked) -> Any:
        return await asked(method, path=path.format(run=park.folder))

    error = told(park, ask)
    assert error["type"] == "CheckpointError" and "expected one in the run's folder" in error["message"]
    assert park.built[0].calls == []


@pytest.mark.parametrize(
    "fault",
    [
        NonFiniteError("the loss of update 7 was not finite"),
        CheckpointError("step_2/weights.safetensors: not there"),
        OutOfMemory("lower trainer.micro_batch_tokens: HTTP 500: out of memory"),
        RecordError("advantages must align"),
    ],
)
def test_an_error_comes_back_as_the_same_class_with_the_same_words(park: Park, fault: SilvaError) -> None:
    async def work() -> SilvaError:
        async with listening(park.guard) as address:
            peer = Peer(address, name="trainer", key=KEY)
            asked = decode(Open, park.open())
            trainer = RemoteTrainer(peer, asked, patience=10)
            await trainer.connect()
            park.built[0].fault = fault
            with pytest.raises(SilvaError) as caught:
                await trainer.restart()
            park.built[0].fault = None
            await trainer.restart()  # the session goes on
            await trainer.close()
            return caught.value

    caught = run(work())
    assert type(caught) is type(fault) and str(caught) == str(fault)


def test_an_error_nobody_planned_gives_its_name_and_no_more(tmp_path: Path) -> None:
    lines: list[str] = []
    park = Park(tmp_path, lines)

    async def ask(asked: Asked) -> Any:
        park.built[0].fault = ZeroDivisionError("at /secret/place")
        return await asked("restart")

    error = told(park, ask)
    assert (error["status"], error["type"]) == (500, "ZeroDivisionError")
    assert "/secret/place" not in error["message"] and "/secret/place" in lines[0]


def test_a_trainer_that_cannot_be_built_leaves_no_session_and_may_be_asked_for_again(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        park.fault = OutOfMemory("lower something")
        response = await asked.client.post("/open", content=park.open())
        lost = await asked("restart")
        park.fault = None
        await asked.open()
        return response, lost, await asked("restart")

    response, lost, reply = told(park, ask)
    assert response.status_code == 500 and response.json()["error"]["type"] == "OutOfMemory"
    assert lost["type"] == "PartLost" and isinstance(reply, Reply)
    assert park.built[0].closed


def test_what_the_trainer_says_comes_once(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        opened = await asked.open()
        return opened.said, [(await asked(name)).said for name in ("restart", "snapshot", "publish")]

    opened, said = told(park, ask)
    assert opened == ("built",)
    assert said == [("doing restart",), (), ("doing publish",)]


def test_what_was_said_in_a_call_that_failed_comes_with_the_next_one(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        park.built[0].fault = CheckpointError("no")
        await asked("restart")
        park.built[0].fault = None
        return (await asked("snapshot")).said

    assert told(park, ask) == ("doing restart",)


def test_a_client_that_goes_away_does_not_cut_a_call_short(park: Park) -> None:
    async def work() -> None:
        async with listening(park.guard) as address:
            headers = {"authorization": f"Bearer {KEY}"}
            async with httpx2.AsyncClient(base_url=address, headers=headers) as client:
                asked = park.client(client)
                await asked.open()
                trainer = park.built[0]
                trainer.go = asyncio.Event()
                call = asyncio.create_task(asked("publish"))
                await until(lambda: trainer.running == 1, "the call computes")
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            async with httpx2.AsyncClient(base_url=address, headers=headers) as client:
                asked = park.client(client)
                opening = asyncio.create_task(asked.open())
                await until(lambda: not park.server._session, "somebody else opens")
                assert not trainer.ended and not opening.done()  # the call before it ends first
                trainer.go.set()
                await opening
            assert trainer.ended == ["publish"] and trainer.version == 1 and trainer.closed
            assert len(park.built) == 2

    run(work())


def test_alive_answers_while_a_call_computes(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        async def alive() -> dict[str, Any]:
            return (await asked.client.get("/alive")).json()

        idle, trainer = await alive(), park.built[0]
        trainer.go = asyncio.Event()
        call = asyncio.create_task(asked("restart"))
        await until(lambda: trainer.running == 1, "the call computes")
        busy = await alive()
        trainer.go.set()
        await call
        return idle, busy, await alive()

    idle, busy, after = told(park, ask)
    expected = {"role": "trainer", "pid": os.getpid(), "open": True, "doing": "", "seconds": 0.0}
    assert idle == after == expected
    assert busy | {"seconds": 0.0} == expected | {"doing": "restart"} and 0 <= busy["seconds"] < 60


def test_every_route_needs_the_key(park: Park) -> None:
    routes = [("GET", "/alive"), ("POST", "/open"), ("GET", "/nothing")]
    routes += [("POST", f"/sessions/x/{method}") for method in METHODS]

    async def work() -> None:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
            async with asking(park.guard, **header) as client:
                for method, path in routes:
                    response = await client.request(method, path, content=park.open())
                    assert response.status_code == 401, (path, header)

    run(work())
    assert park.built == []


def test_an_unknown_method_or_path_or_verb_is_refused(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        named = [
            await asked(name) for name in ("close", "_restart", "capabilities", "__init__", "optim step")
        ]
        others = [
            await asked.client.request(verb, path)
            for verb, path in (("GET", "/open"), ("POST", "/alive"), ("POST", "/sessions/x"), ("GET", "/"))
        ]
        return named, [response.status_code for response in others]

    named, statuses = told(park, ask)
    assert {error["status"] for error in named} == {404}
    assert "expected one of score, forward_backward" in named[0]["message"]
    assert {*statuses} <= {404, 405}
    assert not park.built[0].closed


@pytest.mark.parametrize("method", ["forward_backward", "optim_step"])
def test_missing_arguments_are_refused(park: Park, method: str) -> None:
    async def ask(asked: Asked) -> Any:
        return await asked(method)

    assert told(park, ask)["status"] == 400 and park.built[0].calls == []


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_bytes_that_are_no_record_are_refused_and_nothing_in_them_is_run(
    park: Park, rows: tuple[Sample, ...], tmp_path: Path
) -> None:
    whole = encode(Call(samples=rows, loss=LOSS))
    line, _, arrays = whole.partition(b"\n")
    touched = tmp_path / "touched"
    bodies = [
        b"", b"\n", b"{}", b"null\n", b"\xff\xfe\n", whole[: len(whole) // 2], whole[:-1], line + b"\n",
        line + b"\n" + arrays[::-1], whole.replace(b'"needs"', b'"nedes"'),
        whole.replace(b'"path":""', b'"path":1'), encode(Snapshot(1)),
        pickle.dumps(Bomb(touched)), line + b"\n" + pickle.dumps(Bomb(touched)),
        json.dumps({"record": {}, "turns": []}).encode() + b"\n",
    ]  # fmt: skip

    async def ask(asked: Asked) -> Any:
        paths = [f"/sessions/{asked.session}/forward_backward", "/open"]
        found = []
        for path in paths:
            for body in bodies:
                response = await asked.client.post(path, content=body)
                found.append((response.status_code, response.json()["error"]["type"], path, body[:40]))
        return found, await asked("snapshot")

    found, _ = told(park, ask)
    assert {(status, kind) for status, kind, *_ in found} == {(400, "RecordError")}, found
    assert park.built[0].calls == [] and len(park.built) == 1 and not touched.exists()


def test_what_the_server_holds_is_closed_with_it(park: Park) -> None:
    async def ask(asked: Asked) -> Any:
        await park.server.close()
        return await asked("restart")

    assert told(park, ask)["type"] == "PartLost"
    assert park.built[0].closed


def test_the_client_says_what_is_wrong_with_its_key(park: Park) -> None:
    async def work() -> None:
        async with listening(park.guard) as address:
            peer = Peer(address, name="trainer", key="wrong")
            with pytest.raises(Refused, match="a key is needed") as refused:
                await RemoteTrainer(peer, decode(Open, park.open()), patience=10).connect()
            assert refused.value.status == 401 and not isinstance(refused.value, PartLost)
            await peer.close()

    run(work())

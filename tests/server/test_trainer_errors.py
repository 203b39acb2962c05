"""The trainer behind HTTP: how its errors reach the client, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import asking, listening
from tests.server.scripted_trainer import KEY, LOSS, Park, opened

from silva.errors import CheckpointError, NonFiniteError, OutOfMemory, PartLost, RecordError, SilvaError
from silva.storage.checkpoints import CheckpointStore
from silva.trainer.remote import Open, RemoteTrainer, ServedTrainer
from silva.types import Sample, Snapshot
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.transport import Peer, Refused

CIRCLE = pytest.mark.skipif(sys.version_info >= (3, 13), reason="pathlib follows no circle from 3.13 on")


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
        pytest.param("{run}/circle/step_1", marks=CIRCLE),
        "{run}/\0",
        "{run}/\ud800",
    ],
)
async def test_a_path_outside_the_runs_folder_is_refused(park: Park, path: str) -> None:
    (park.folder / "link").symlink_to("/etc")
    (park.folder / "circle").symlink_to("circle")
    async with opened(park) as asked:
        for method in ("save", "load", "export"):
            error = await asked(method, Path(path.format(run=park.folder)))
            assert error["type"] == "CheckpointError"
            assert "expected one in the run's folder" in error["message"]
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
async def test_an_error_comes_back_as_the_same_class_with_the_same_words(
    park: Park, fault: SilvaError
) -> None:
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
    assert type(caught.value) is type(fault) and str(caught.value) == str(fault)


async def test_a_full_disk_is_told_with_the_advice_of_who_asked(park: Park, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    async with listening(park.guard) as address:
        peer = Peer(address, name="trainer", key=KEY)
        trainer = RemoteTrainer(peer, decode(Open, park.open()), patience=10)
        await trainer.connect()
        park.built[0].fault = full
        loop, said = asyncio.get_running_loop(), []

        def write(path: Path) -> None:
            asyncio.run_coroutine_threadsafe(trainer.save(path), loop).result()

        for doing in (asyncio.to_thread(store.save, 1, {"trainer": write}, {}), trainer.publish()):
            with pytest.raises(CheckpointError) as caught:
                await doing
            said.append(str(caught.value))
        park.built[0].fault = ZeroDivisionError()
        with pytest.raises(Refused) as refused:
            await trainer.publish()
        await trainer.close()
        assert trainer._session and trainer._session not in str(refused.value)
        saved, published = said
    assert "No space left on device" in saved and "free some space, then --resume" in saved
    assert "No space left on device" in published


async def test_an_error_nobody_planned_gives_its_name_and_no_more(tmp_path: Path) -> None:
    lines: list[str] = []
    park = Park(tmp_path, lines)
    async with opened(park) as asked:
        park.built[0].fault = ZeroDivisionError("at /secret/place")
        error = await asked("restart")
    assert (error["status"], error["type"]) == (500, "ZeroDivisionError")
    assert "/secret/place" not in error["message"] and "/secret/place" in lines[0]


async def test_a_trainer_that_cannot_be_built_leaves_no_session_and_may_be_asked_for_again(
    park: Park,
) -> None:
    async with opened(park) as asked:
        park.fault = OutOfMemory("lower something")
        response = await asked.client.post("/open", content=park.open())
        lost = await asked("restart")
        park.fault = None
        await asked.open()
        reply = await asked("restart")
    assert response.status_code == 500 and response.json()["error"]["type"] == "OutOfMemory"
    assert lost["type"] == "PartLost" and reply.version == 0
    assert park.built[0].closed


async def test_every_route_needs_the_key(park: Park) -> None:
    routes = [("GET", "/alive"), ("POST", "/open"), ("POST", "/sessions/x"), ("GET", "/nothing")]
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
        async with asking(park.guard, **header) as client:
            for method, path in routes:
                response = await client.request(method, path, content=park.open())
                assert response.status_code == 401, (path, header)
    assert park.built == []


async def test_an_unknown_method_or_path_or_verb_is_refused(park: Park) -> None:
    async with opened(park) as asked:
        names = ("_call", "capabilities", "__init__", "optim step", "", "\xff")
        named = [(await asked.send(f"{name}\n".encode("latin-1"))).json()["error"] for name in names]
        closed = await asked("close")
        others = [
            await asked.client.request(verb, path)
            for verb, path in (("GET", "/open"), ("POST", "/alive"), ("POST", "/sessions/x/y"), ("GET", "/"))
        ]
        statuses = [response.status_code for response in others]
    assert {error["type"] for error in named} == {"RecordError"}
    assert "no method '_call'; expected one of clipped, close, export, " in named[0]["message"]
    assert (closed["status"], closed["type"]) == (400, "CapabilityError")
    assert {*statuses} <= {404, 405}
    assert not park.built[0].closed


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


async def test_bytes_that_are_no_record_are_refused_and_nothing_in_them_is_run(
    park: Park, rows: tuple[Sample, ...], tmp_path: Path
) -> None:
    whole = rpc.encode(ServedTrainer, "forward_backward", [rows, LOSS])
    name, line, arrays = whole.split(b"\n", 2)
    line = name + b"\n" + line
    touched = tmp_path / "touched"
    bodies = [
        b"", b"\n", b"{}", b"null\n", b"\xff\xfe\n", whole[: len(whole) // 2], whole[:-1], line + b"\n",
        line + b"\n" + arrays[::-1], whole.replace(b'"loss"', b'"lsos"'),
        whole.replace(b'"reinforce"', b'1'), name + b"\n" + encode(LOSS), encode(Snapshot(1)),
        pickle.dumps(Bomb(touched)), line + b"\n" + pickle.dumps(Bomb(touched)),
        name + b"\n" + json.dumps({"record": {}, "turns": []}).encode() + b"\n",
    ]  # fmt: skip
    async with opened(park) as asked:
        paths = [f"/sessions/{asked.session}", "/open"]
        found = []
        for path in paths:
            for body in bodies:
                response = await asked.client.post(path, content=body)
                found.append((response.status_code, response.json()["error"]["type"], path, body[:40]))
        await asked("snapshot")
    assert {(status, kind) for status, kind, *_ in found} == {(400, "RecordError")}, found
    assert park.built[0].calls == [] and len(park.built) == 1 and not touched.exists()


async def test_the_client_says_what_is_wrong_with_its_key(park: Park) -> None:
    async with listening(park.guard) as address:
        peer = Peer(address, name="trainer", key="wrong")
        with pytest.raises(Refused, match="a key is needed") as refused:
            await RemoteTrainer(peer, decode(Open, park.open()), patience=10).connect()
        assert refused.value.status == 401 and not isinstance(refused.value, PartLost)
        await peer.close()

"""The trainer behind HTTP: sessions, one call at a time, and what becomes of lost clients."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import numpy as np
import pytest
from tests.server.running import asking, listening, run, until
from tests.server.scripted_trainer import KEY, LOSS, Park, opened

from silva import __version__
from silva.errors import CheckpointError
from silva.protocols import Trainer
from silva.server.trainer import TAKES
from silva.storage.run_folder import LOCK
from silva.types import OptimParams, Sample, Snapshot, WeightFolder
from silva.wire import rpc

PARAMS = OptimParams(lr=1e-2)


async def test_every_method_reaches_the_trainer_with_its_arguments(
    park: Park, rows: tuple[Sample, ...]
) -> None:
    inside = park.folder / "checkpoints" / "step_2"
    async with opened(park) as asked:
        replies = [
            await asked("score", rows, frozenset({"logprobs", "values"})),
            await asked("forward_backward", rows, LOSS),
            await asked("optim_step", PARAMS, None),
            await asked("optim_step", PARAMS, OptimParams(lr=1e-3)),
            await asked("refresh_reference"),
            await asked("restart"),
            await asked("save", inside),
            await asked("load", inside),
            await asked("export", inside),
            await asked("publish"),
            await asked("snapshot"),
            await asked("clipped"),
        ]
    trainer = park.built[0]
    assert [call[0] for call in trainer.calls] == [
        "score", "forward_backward", "optim_step", "optim_step", "refresh_reference", "restart", "save",
        "load", "export", "publish", "clipped",
    ]  # fmt: skip
    assert {call[0] for call in trainer.calls} | {"snapshot", "close"} == {*rpc.methods(Trainer)}
    score, update, step, both = trainer.calls[:4]
    assert score[2] == {"logprobs", "values"} and update[2] == LOSS
    for sent, got in zip(rows, update[1], strict=True):
        for name in ("tokens", "loss_weights", "logprobs", "advantages"):
            assert np.array_equal(getattr(sent, name), getattr(got, name), equal_nan=True)
    assert step[1:] == (PARAMS, None) and both[1:] == (PARAMS, OptimParams(lr=1e-3))
    assert [call[1] for call in trainer.calls[6:9]] == [inside.resolve()] * 3
    assert np.array_equal(replies[0].result.values[1], rows[1].loss_weights * np.float32(0.1))
    numbers = replies[1].result
    assert (numbers["loss"], numbers["of_numpy"]) == (0.1 + 0.2, float(np.float32(0.1)))
    assert np.isnan(numbers["nan"])
    assert replies[9].result == replies[10].result == Snapshot(1, WeightFolder("/weights", "d"))
    assert [each.tolist() for each in replies[11].result] == [[False, True]]
    assert [reply.version for reply in replies] == [0] * 9 + [1] * 3


async def test_open_says_what_the_trainer_can_do(park: Park) -> None:
    async with opened(park) as asked:
        made = await asked.open(recipe=False, publishes="parameters")
    assert made.capabilities.needs == {"logprobs", "values"} and made.version == 0
    assert made.capabilities.publishes == "folder"  # what it does, not what it was asked for
    assert [(each.recipe, each.publishes) for each in park.asked] == [(True, "folder"), (False, "parameters")]
    assert park.asked[0].config == {"steps": 4}


async def test_who_opens_last_has_the_trainer_and_the_one_before_has_lost_it(park: Park) -> None:
    async with opened(park) as asked:
        first = asked.session
        await asked.open()
        lost = await asked("publish", session=first)
        second, reply = asked.session, await asked("publish")
    assert first != second
    assert (lost["status"], lost["type"]) == (410, "PartLost")
    assert f"session '{first}' has ended" in lost["message"]
    assert reply.version == 1
    assert [trainer.closed for trainer in park.built] == [True, False]
    assert park.built[0].calls == []


async def test_a_call_of_the_session_before_waits_in_vain(park: Park) -> None:
    """It was admitted while the trainer computed; when its turn comes, somebody else has the trainer."""
    async with opened(park) as asked:
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
        running, waiting = await running, await waiting
    assert running.version == 0  # it had begun
    assert waiting["type"] == "PartLost"
    assert [call[0] for call in park.built[0].calls] == ["restart"]
    assert park.built[0].closed and not park.built[1].calls


async def test_another_run_gets_the_trainer_only_when_nobody_runs_the_one_before(park: Park) -> None:
    other = park.folder.parent / "other"
    async with opened(park) as asked:
        (park.folder / LOCK).write_text("4711")
        with open(park.folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused = await asked.client.post("/open", content=park.open(folder=str(other)))
            went_on = await asked("publish")
            await asked.open()  # the same run again
        await asked.open(folder=str(other))
        refused, reply = refused.json()["error"], await asked("publish")
    assert refused["type"] == "ConfigError" and "in which process 4711 runs" in refused["message"]
    assert went_on.version == reply.version == 1  # each the first of its trainer


@pytest.mark.parametrize(
    "folder", ["", "/etc", "{runs}", "{runs}/..", "{runs}/../elsewhere", "{runs}2/run", "{runs}/\0"]
)
async def test_a_run_outside_the_trainers_own_output_dir_is_refused(park: Park, folder: str) -> None:
    async with opened(park) as asked:
        where = folder.format(runs=park.folder.parent)
        error = (await asked.client.post("/open", content=park.open(folder=where))).json()["error"]
    assert error["type"] == "ConfigError" and "output_dir of this trainer" in error["message"]
    assert len(park.built) == 1 and not park.built[0].closed


async def test_a_run_whose_folder_is_a_link_is_trained_where_it_leads(park: Park) -> None:
    link = park.folder.parent / f"{park.folder.name}-link"
    with TemporaryDirectory() as scratch:
        link.symlink_to(scratch)
        async with opened(park) as asked:
            await asked.open(folder=str(link))
            assert (await asked("save", link / "step_1")).version == 0
        assert park.built[1].calls == [("save", Path(scratch).resolve() / "step_1")]


async def test_a_session_of_nobody_is_lost(park: Park) -> None:
    async with opened(park) as asked:
        found = [await asked("publish", session=name) for name in ("x", "0" * 16, "ü", "%00")]
    assert {error["type"] for error in found} == {"PartLost"}
    assert park.built[0].calls == []


def test_before_the_first_open_there_is_no_session(park: Park) -> None:
    async def work() -> Any:
        async with asking(park.guard, authorization=f"Bearer {KEY}") as client:
            return await park.client(client)("publish", session="x")

    assert run(work())["type"] == "PartLost"


async def test_calls_come_one_at_a_time_in_order(park: Park, rows: tuple[Sample, ...]) -> None:
    async with opened(park) as asked:
        trainer = park.built[0]
        trainer.go = asyncio.Event()
        first = asyncio.create_task(asked("forward_backward", rows, LOSS))
        await until(lambda: trainer.running == 1, "the first call computes")
        rest = [asyncio.create_task(asked(name)) for name in ("restart", "refresh_reference", "publish")]
        await until(lambda: len(park.server._lock._waiters or ()) == 3, "the others wait")
        assert len(trainer.calls) == 1
        trainer.go.set()
        await asyncio.gather(first, *rest)  # the trainer asserts that nobody else is there
    assert sorted(park.built[0].ended[1:]) == ["publish", "refresh_reference", "restart"]
    assert park.built[0].ended[0] == "forward_backward"


async def test_what_the_trainer_says_comes_once(park: Park) -> None:
    async with opened(park) as asked:
        assert (await asked.open()).said == ("built",)
        said = [(await asked(name)).said for name in ("restart", "snapshot", "publish")]
    assert said == [("doing restart",), (), ("doing publish",)]


async def test_what_was_said_in_a_call_that_failed_comes_with_the_next_one(park: Park) -> None:
    async with opened(park) as asked:
        park.built[0].fault = CheckpointError("no")
        await asked("restart")
        park.built[0].fault = None
        found = (await asked("snapshot")).said
    assert found == ("doing restart",)


async def test_a_client_that_goes_away_does_not_cut_a_call_short(park: Park) -> None:
    async with listening(park.guard) as address:
        headers = {"authorization": f"Bearer {KEY}", "content-type": TAKES}
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


async def test_alive_answers_while_a_call_computes(park: Park) -> None:
    async with opened(park) as asked:

        async def alive() -> dict[str, Any]:
            return (await asked.client.get("/alive")).json()

        idle, trainer = await alive(), park.built[0]
        trainer.go = asyncio.Event()
        call = asyncio.create_task(asked("restart"))
        await until(lambda: trainer.running == 1, "the call computes")
        busy = await alive()
        trainer.go.set()
        await call
        after = await alive()
    expected = {"role": "trainer", "pid": os.getpid(), "open": True, "doing": "", "seconds": 0.0,
                "silva": __version__}  # fmt: skip
    assert idle == after == expected
    assert busy | {"seconds": 0.0} == expected | {"doing": "restart"} and 0 <= busy["seconds"] < 60


async def test_what_the_server_holds_is_closed_with_it(park: Park) -> None:
    async with opened(park) as asked:
        await park.server.close()
        found = await asked("restart")
    assert found["type"] == "PartLost"
    assert park.built[0].closed

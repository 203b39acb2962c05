"""Whose weights an inference server holds, and what they are called."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine
from tests import virtual_clock
from tests.server.running import asking, guarded, says
from tests.virtual_clock import LoopClock, now

from silva.errors import ModelError
from silva.ports import use_clock
from silva.rendering.renderer import Renderer
from silva.server.engine import LEASE
from silva.types import Snapshot


class Owned:
    """A server that loads anything, and what it answers to loads for owners."""

    def __init__(self, folder: Path, client: Any) -> None:
        self.client, self.folder = client, folder

    async def load(self, owner: str, digest: str = "d", version: int = 1) -> tuple[int, str]:
        folder = {"path": str(self.folder), "digest": digest}
        body = {"version": version, "folder": folder, "owner": owner}
        answer = await self.client.post("/load", json=body)
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]

    async def lives(self, owner: str) -> None:
        assert (await self.client.get("/alive", params={"owner": owner})).status_code == 200


def owned(renderer: Renderer, folder: Path, work: Any) -> Any:
    async def ask() -> Any:
        async with asking(guarded(says(renderer, "yes"), renderer)) as client:
            return await work(Owned(folder, client))

    with use_clock(LoopClock()):
        return virtual_clock.run(ask())


def test_weights_have_one_owner_as_long_as_it_is_alive(renderer: Renderer, tmp_path: Path) -> None:
    async def work(server: Owned) -> None:
        assert (await server.load("runs/a"))[0] == (await server.load("runs/a", version=2))[0] == 200
        began = now()
        loading = asyncio.ensure_future(server.load("runs/b"))
        await asyncio.sleep(1.0)
        await server.lives("runs/b")  # its signs of life do not count for the owner
        assert not loading.done()
        await server.lives("runs/a")
        status, words = await loading
        assert status == 409 and "belong to runs/a, which is alive" in words and now() - began == 1.0
        # without a sign of life for long enough, they go to whoever asks
        assert (await server.load("runs/b"))[0] == 200 and now() - began == 1.0 + LEASE
        asyncio.get_running_loop().call_later(1.0, asyncio.ensure_future, server.lives("runs/b"))
        assert (await server.load("", version=3))[0] == 409

    owned(renderer, tmp_path, work)


def test_answers_name_the_weights_they_were_computed_with(renderer: Renderer, tmp_path: Path) -> None:
    async def work(server: Owned) -> str:
        async def names() -> str:
            body = {"prompt": [65, 66], "return_token_ids": True}
            answers = [
                await server.client.post("/v1/completions", json=body),
                await server.client.post("/score", json={"tokens": [1, 2], "start": 1}),
                await server.client.get("/alive"),
                await server.client.get("/capabilities"),
            ]
            (one,), *others = [answer.json()["weights"] for answer in answers]
            assert others == [[one], one, one]
            return one

        first = await names()
        assert first.startswith("start-")
        await server.load("", "a")
        await server.load("", "b")
        assert await names() == "b"
        return first

    assert owned(renderer, tmp_path, work) != owned(
        renderer, tmp_path, work
    )  # another process, other weights


async def test_a_load_that_fails_leaves_the_name(renderer: Renderer, tmp_path: Path) -> None:
    class Refusing(ScriptedEngine):
        async def load(self, snapshot: Snapshot) -> None:
            if snapshot.version == 2:
                raise ModelError("not these")

    async with asking(guarded(Refusing(lambda tokens, params: [1]), renderer)) as client:
        server = Owned(tmp_path, client)
        assert (await server.load("", "a", 1))[0] == 200
        assert (await server.load("", "b", 2))[0] == 409
        found = (await client.get("/alive")).json()["weights"]
    assert found == "a"

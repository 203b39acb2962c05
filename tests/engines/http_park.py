"""Scripted servers on Unix sockets and a client of them, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from scripted_engine import ScriptedEngine
from tests import virtual_clock
from tests.engines.inference_server import InferenceServer
from tests.virtual_clock import LoopClock

from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import SilvaDialect
from silva.ports import use_clock
from silva.types import SamplingParams
from silva.wire.transport import Peer

T = TypeVar("T")
FAST = {"check_every": 0.02, "dead_after": 0.3, "patience": 10.0, "timeout": 10.0, "retries": 3}
LONG = 5_000.0  # seconds of the loop's clock within which a test ends, or fails


def counting() -> ScriptedEngine:
    """Counts on from the last token."""
    return ScriptedEngine(lambda tokens, params: [tokens[-1] + 1 + i for i in range(params.max_tokens)])


class Slow(ScriptedEngine):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, params: [1])
        self.go = asyncio.Event()

    async def sample(self, tokens: Any, params: Any, *, session: str = "") -> Any:
        await self.go.wait()
        return await super().sample(tokens, params, session=session)


class Park:
    """Servers and a client of them in one event loop."""

    def __init__(self, folder: Path, engines: list[Any], **settings: Any) -> None:
        self.servers = [InferenceServer(engine, folder / f"{i}.sock") for i, engine in enumerate(engines)]
        peers = [Peer(server.address, name="inference", key="k") for server in self.servers]
        self.said: list[str] = []
        self.engine = HttpEngine(
            peers, ClientSettings(**FAST | settings), SilvaDialect(), say=self.said.append
        )

    async def __aenter__(self) -> Park:
        for server in self.servers:
            await server.start()
        await self.engine.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        for server in self.servers:
            await server.stop()

    async def ask(self, *prompts: list[int], session: str = "", **params: Any) -> list[tuple[int, ...]]:
        asked = (
            self.engine.sample(prompt, SamplingParams(**{"max_tokens": 3} | params), session=session)
            for prompt in prompts
        )
        return [found.tokens for found in await asyncio.gather(*asked)]

    def sent(self) -> list[int]:
        return [len(server.called("/v1/completions")) for server in self.servers]


def run(work: Awaitable[T]) -> T:
    """On a clock that stands still while anything is done: a slow machine changes nothing."""

    async def timed() -> T:
        return await asyncio.wait_for(work, LONG)

    with use_clock(LoopClock()):
        return virtual_clock.run(timed())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)

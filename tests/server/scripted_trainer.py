"""A trainer that computes nothing, the server of it, and calls over a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from tests.server.running import asking

from silva.protocols import Trainer, TrainerCapabilities
from silva.server.trainer import TAKES, TrainerServer
from silva.trainer.remote import Open, Opened, ServedTrainer
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot, WeightFolder
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.guard import Guard
from silva.wire.listening import Bind

KEY = "a-key"
LOSS = LossSpec("reinforce", {"kl_coef": 0.5})


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

    async def clipped(self) -> Sequence[np.ndarray]:
        await self._do("clipped")
        return [np.array([False, True])]

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
        self.server = TrainerServer(self.build, folder.parent)
        log = (lines if lines is not None else []).append
        self.guard = Guard(self.server.app(), Bind(), key=KEY, log=log, takes=(TAKES,))

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

    async def __call__(self, method: str, *arguments: Any, session: str = "") -> rpc.Answer | dict[str, Any]:
        """The answer, or the error."""
        response = await self.send(rpc.encode(ServedTrainer, method, arguments), session)
        if response.status_code == 200:
            return rpc.decode(ServedTrainer, method, response.content)
        return {"status": response.status_code, **response.json()["error"]}

    async def send(self, call: bytes, session: str = "") -> httpx2.Response:
        return await self.client.post(f"/sessions/{session or self.session}", content=call)


@asynccontextmanager
async def opened(park: Park) -> AsyncIterator[Asked]:
    """Calls after an `open`."""
    async with asking(park.guard, authorization=f"Bearer {KEY}") as client:
        asked = park.client(client)
        await asked.open()
        yield asked

"""Servers that die, stop and come back, and a network that loses, delays, doubles and garbles what they say.

    wire.transport.Peer ──request──> Network ──fate──> Node ──> its app (parts.py), a new one after each death

Only what stands below `Peer` is replaced: clients, sessions and retries are Silva's own.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

import httpx2
from tests.simulation.loop import ORCHESTRATOR, PROCESS, SimulatedLoop

WOKEN: contextvars.ContextVar[bool] = contextvars.ContextVar("WOKEN", default=False)
"""Whether a request found its server stopped: whoever asked may be gone when it is answered."""
SLOW = 1.0  # seconds that an answer takes at most if it is not late
LATE = 8.0


@dataclass(frozen=True)
class Answer:
    status_code: int
    content: bytes


class App(Protocol):
    """What a node runs. `shielded`: a request goes on if its client goes away."""

    shielded: bool

    async def answer(self, method: str, path: str, body: bytes) -> Answer: ...


class Node:
    """A process at an address; `make` builds what it runs, at each start."""

    def __init__(self, loop: SimulatedLoop, name: str, make: Callable[[Node], App]) -> None:
        self.loop, self.name, self._make = loop, name, make
        self.number, self.up = 0, False
        self.dead: asyncio.Future[None] = loop.create_future()
        self._going = asyncio.Event()

    @property
    def process(self) -> str:
        return f"{self.name}#{self.number}"

    def start(self) -> None:
        if self.up:
            return
        self.number, self.up, self.dead = self.number + 1, True, self.loop.create_future()
        self._going.set()
        self.app = self._make(self)

    def kill(self) -> None:
        if not self.up:
            return
        self.up = False
        self.dead.set_result(None)
        for task in self.loop.tasks.pop(self.process, ()):
            task.cancel()

    @property
    def going(self) -> bool:
        return self._going.is_set()

    def stop(self) -> None:
        """As SIGSTOP does: connections stay, nothing answers."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    async def works(self, seconds: float) -> None:
        """Takes so long, and the time in which it is stopped."""
        await asyncio.sleep(seconds)
        await self._going.wait()

    def asked(self, method: str, path: str, body: bytes) -> asyncio.Task[Answer]:
        context = contextvars.copy_context()
        context.run(PROCESS.set, self.process)
        context.run(WOKEN.set, not self.going)

        async def answer() -> Answer:
            await self._going.wait()
            return await self.app.answer(method, path, body)

        return self.loop.create_task(answer(), context=context)


class Network:
    """Args:
    fate: what befalls the next request to a node at a path: "" or one of `FATES`.
    lives: the number of the orchestrator's life; requests of an earlier one never end.
    """

    def __init__(
        self, loop: SimulatedLoop, rng: Random, fate: Callable[[Node, str], str], lives: Callable[[], int]
    ) -> None:
        self.loop, self.rng, self.fate, self.lives = loop, rng, fate, lives
        self.nodes: dict[str, Node] = {}

    def client(self, address: str) -> Client:
        return Client(self, self.nodes[address], self.lives())

    async def request(self, node: Node, method: str, path: str, body: bytes) -> Answer:
        await asyncio.sleep(self.rng.uniform(0.001, 0.04))
        if not node.up:
            raise httpx2.ConnectError("connection refused")
        fate = self.fate(node, path)
        if not fate and path.startswith("/alive") and node.going:
            return await node.app.answer(method, path, body)
        if fate == "lost":
            raise httpx2.ReadError("connection reset")
        if fate == "never":
            await asyncio.wait({node.dead})
            raise httpx2.ReadError("connection reset")
        if fate in ANSWERS:
            return ANSWERS[fate]
        if fate == "twice":
            await self._answered(node, method, path, body)
        answer = await self._answered(node, method, path, body)
        if fate == "cut":
            raise httpx2.RemoteProtocolError("peer closed the connection without an answer")
        if fate == "late":
            await asyncio.sleep(self.rng.uniform(SLOW, LATE))
        return answer

    async def _answered(self, node: Node, method: str, path: str, body: bytes) -> Answer:
        task = node.asked(method, path, body)
        try:
            await asyncio.wait({task, node.dead}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.cancelled():
                raise httpx2.ReadError("connection reset")
            return task.result()
        finally:
            if not task.done() and not node.app.shielded:
                task.cancel()


def refusal(status: int, message: str, kind: str = "") -> Answer:
    return Answer(status, json.dumps({"error": {"message": message, "type": kind, "code": None}}).encode())


ANSWERS: Mapping[str, Answer] = {
    "garbage": Answer(200, b"<html><body>It works!</body></html>"),
    "other": Answer(200, b'{"choices": [], "version": null}'),
    "null": Answer(200, b"null"),
    "error": refusal(500, "the server failed (RuntimeError); its log says more", "RuntimeError"),
    "busy": refusal(429, "enough to do"),
    "gateway": Answer(502, b"<html>Bad Gateway</html>"),
}
FATES = ("lost", "never", "twice", "cut", "late", *ANSWERS)


class Client:
    """As the httpx2 client of a `Peer`."""

    def __init__(self, network: Network, node: Node, life: int) -> None:
        self._network, self._node, self._life = network, node, life

    async def request(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        if PROCESS.get() != ORCHESTRATOR or self._life != self._network.lives():
            await asyncio.Event().wait()
        if not path.startswith("/alive"):
            self._network.loop.moved()
        return await self._network.request(self._node, method, path, content or b"")

    async def aclose(self) -> None:
        pass

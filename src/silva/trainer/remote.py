"""A trainer in another process, as a `Trainer`.

    RemoteTrainer ──records──> server/trainer.py ──> the trainer
          └── every CHECK s: is it alive?            both a cut connection and silence end the call

A call is made once: nobody knows how far a lost one came. So what a lost trainer costs is a PartLost, after
which the run goes back to its last checkpoint and opens a trainer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from silva.aio import first
from silva.errors import PartLost, SilvaError, error_named
from silva.ports import CLOCK
from silva.protocols import TrainerCapabilities
from silva.trainer.wire import Call, Open, Opened, Reply
from silva.types import LossSpec, OptimParams, Sample, Signals, Snapshot
from silva.wire.codec import decode, encode
from silva.wire.transport import DISK, Peer, Refused, Unreachable, check_version, silence

CHECK = 0.5  # seconds between questions whether it is alive
DEAD_AFTER = 4.0  # seconds without an answer


class RemoteTrainer:
    """Implements `protocols.Trainer`. `connect` comes before everything else.

    Args:
        peer: the server.
        asked: what it is to build.
        patience: seconds that `connect` waits for a server that does not answer yet.
        say: takes what people should know.
    """

    def __init__(
        self, peer: Peer, asked: Open, *, patience: float, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._peer, self._asked, self._patience, self._say = peer, asked, patience, say
        self._session = ""
        self.capabilities = TrainerCapabilities(publishes=asked.publishes)
        self.version = 0

    async def connect(self) -> None:
        """Wait for the server, and have it build the trainer.

        Raises:
            Unreachable: no answer for `patience` seconds: unlike a lost trainer, the run does not go on.
            SilvaError: what building it raised there.
        """
        await self._awake()
        opened = decode(Opened, await self._asking("open", "/open", encode(self._asked)))
        self._session, self.version = opened.session, opened.version
        self.capabilities = TrainerCapabilities(frozenset(opened.needs), opened.publishes)
        self._repeat(opened.said)

    async def score(self, samples: Sequence[Sample], needs: frozenset[str]) -> Signals:
        reply = await self._call("score", Call(samples=tuple(samples), needs=tuple(sorted(needs))))
        assert reply.signals is not None
        return reply.signals

    async def forward_backward(self, samples: Sequence[Sample], loss: LossSpec) -> Mapping[str, float]:
        return (await self._call("forward_backward", Call(samples=tuple(samples), loss=loss))).numbers or {}

    async def optim_step(self, policy: OptimParams, critic: OptimParams | None = None) -> Mapping[str, float]:
        return (await self._call("optim_step", Call(policy=policy, critic=critic))).numbers or {}

    async def publish(self) -> Snapshot:
        return await self._snapshot("publish")

    async def snapshot(self) -> Snapshot:
        return await self._snapshot("snapshot")

    async def refresh_reference(self) -> None:
        await self._call("refresh_reference", Call())

    async def restart(self) -> None:
        await self._call("restart", Call())

    async def save(self, path: Path) -> None:
        await self._call("save", Call(path=str(path.absolute())))

    async def load(self, path: Path) -> None:
        await self._call("load", Call(path=str(path.absolute())))

    async def export(self, path: Path) -> None:
        await self._call("export", Call(path=str(path.absolute())))

    async def close(self) -> None:
        await self._peer.close()

    async def _snapshot(self, method: str) -> Snapshot:
        reply = await self._call(method, Call())
        assert reply.snapshot is not None
        return reply.snapshot

    async def _call(self, method: str, call: Call) -> Reply:
        body = await asyncio.to_thread(encode, call) if call.samples else encode(call)
        answer = await self._asking(method, f"/sessions/{self._session}/{method}", body)
        reply = await asyncio.to_thread(decode, Reply, answer) if call.samples else decode(Reply, answer)
        self.version = reply.version
        self._repeat(reply.said)
        return reply

    async def _asking(self, doing: str, path: str, body: bytes) -> bytes:
        """The answer, as long as the server lives."""
        watch = silence(self._peer, patience=DEAD_AFTER, every=CHECK)
        try:
            if done := await first(self._peer.send(path, body), watch):
                return done.result()
            where = f"the trainer at {self._peer.address}"
            raise Unreachable(f"{where}: no sign of life for {DEAD_AFTER:g} s")
        except Unreachable as error:
            raise PartLost(f"{self._without_session(error)} (while it was asked to {doing})") from error
        except Refused as error:
            raised = self._raised(error)
            raise raised from raised.__cause__ or error

    async def _awake(self) -> None:
        began, told = CLOCK.monotonic(), False
        while True:
            try:
                check_version(self._peer, await self._peer.get("/alive", timeout=DEAD_AFTER))
                return
            except Unreachable as error:
                if CLOCK.monotonic() - began > self._patience:
                    raise Unreachable(f"{error} (waited {self._patience:g} s: placement.patience)") from error
                if not told and CLOCK.monotonic() - began > DEAD_AFTER:
                    self._say(f"waiting for the trainer at {self._peer.address}")
                    told = True
            except Refused as error:
                raise self._raised(error) from error
            await CLOCK.sleep(CHECK)

    def _raised(self, refused: Refused) -> SilvaError:
        """What the trainer raised, as here; a fault of its disk is the cause of it here too."""
        text = self._without_session(refused)
        words = text.partition(f"HTTP {refused.status}: ")[2]
        error = error_named(refused.kind, words or text) or Refused(text, refused.status, refused.kind)
        if refused.code == DISK:
            error.__cause__ = OSError(words)
        return error

    def _without_session(self, error: Exception) -> str:
        """Whoever knows the session can use the trainer."""
        return str(error).replace(self._session, "...") if self._session else str(error)

    def _repeat(self, said: Sequence[str]) -> None:
        for line in said:
            self._say(line)


def plain_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer needs of a run's configuration: all but its environments, whose code it never runs."""
    return {key: value for key, value in data.items() if key != "environments"}

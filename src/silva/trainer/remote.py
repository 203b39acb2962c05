"""A trainer in another process, as a `Trainer`.

    RemoteTrainer ──calls of wire/rpc.py──> server/trainer.py ──> the trainer
          └── every CHECK s: is it alive?          both a cut connection and silence end the call

    POST /open                Open -> Opened      builds a trainer; whoever had one before has lost it
    POST /sessions/SESSION    call -> answer      of `ServedTrainer`

A session ends with the next `open`. So a process that was thought dead, and wakes up, changes nothing.
A call is made once: nobody knows how far a lost one came. So what a lost trainer costs is a PartLost, after
which the run goes back to its last checkpoint and opens a trainer again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from silva.aio import first
from silva.errors import PartLost, RecordError, SilvaError, error_named
from silva.ports import CLOCK
from silva.protocols import Publishes, Trainer, TrainerCapabilities
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.transport import DISK, Peer, Refused, Unreachable, check_version, silence

CHECK = 0.5  # seconds between questions whether it is alive
DEAD_AFTER = 4.0  # seconds without an answer


@dataclass(frozen=True, slots=True)
class Open:
    """Attributes:
    config: the run's configuration as plain data; its environments are not needed and left out.
    recipe: whether what the algorithm needs beside the policy, a reference or a critic, is made too.
    folder: of the run; the trainer reads and writes nowhere else.
    publishes: what the engine can load.
    servers: addresses of inference servers that weights are sent to, if they are sent.
    """

    config: Mapping[str, Any]
    recipe: bool
    folder: str
    publishes: Publishes
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    session: str
    capabilities: TrainerCapabilities
    version: int
    said: tuple[str, ...] = ()


class ServedTrainer(Trainer, Protocol):
    """A trainer as its server has it."""

    said: tuple[str, ...]  # what people should know, since it was read last


class RemoteTrainer(rpc.proxy(Trainer)):  # type: ignore[misc]
    """Implements `protocols.Trainer`. `connect` comes before everything else.

    Args:
        peer: the server.
        asked: what it is to build.
        patience: seconds that `connect` waits for a server that does not answer yet.
        timeout: seconds that a trainer which answers may do nothing while it is asked for something.
        say: takes what people should know.
    """

    def __init__(
        self,
        peer: Peer,
        asked: Open,
        *,
        patience: float,
        timeout: float = 600.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._peer, self._asked, self._say = peer, asked, say
        self._patience, self._timeout = patience, timeout
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
        data = await self._asking("open", "/open", encode(self._asked))
        with self._makes_sense("open"):
            opened = decode(Opened, data)
        self._session = opened.session
        self._update(opened)

    async def close(self) -> None:
        await self._peer.close()

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        call = await asyncio.to_thread(rpc.encode, ServedTrainer, method, arguments)
        data = await self._asking(method, f"/sessions/{self._session}", call)
        with self._makes_sense(method):
            answer = await asyncio.to_thread(rpc.decode, ServedTrainer, method, data)
        self._update(answer)
        return answer.result

    async def _asking(self, doing: str, path: str, body: bytes) -> bytes:
        """The answer, as long as the server lives and works at it."""
        why = ""

        async def lost() -> None:
            nonlocal why
            why = await silence(
                self._peer, patience=DEAD_AFTER, every=CHECK, works=_works, longest_rest=self._timeout
            )

        try:
            if done := await first(self._peer.send(path, body), lost()):
                return done.result()
            raise Unreachable(f"the trainer at {self._peer.address}: {why}")
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and not _of_a_proxy(error):
                raised = self._raised(error)
                raise raised from raised.__cause__ or error
            raise PartLost(f"{self._without_session(error)} (while it was asked to {doing})") from error

    @contextmanager
    def _makes_sense(self, doing: str) -> Iterator[None]:
        """Whoever answers so is no trainer, and what became of the call nobody knows."""
        try:
            yield
        except RecordError as error:
            raise PartLost(
                f"the trainer at {self._peer.address}: its answer makes no sense: {error} "
                f"(while it was asked to {doing})"
            ) from error

    async def _awake(self) -> None:
        began, told = CLOCK.monotonic(), False
        while True:
            try:
                check_version(self._peer, await self._peer.get("/alive", timeout=DEAD_AFTER))
                return
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and not _of_a_proxy(error):
                    raise self._raised(error) from error
                if CLOCK.monotonic() - began > self._patience:
                    raise Unreachable(f"{error} (waited {self._patience:g} s: placement.patience)") from error
                if not told and CLOCK.monotonic() - began > DEAD_AFTER:
                    self._say(f"waiting for the trainer at {self._peer.address}")
                    told = True
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

    def _update(self, answer: Any) -> None:
        """How the trainer is, which every answer tells, and what people should know."""
        self.capabilities, self.version = answer.capabilities, answer.version
        for line in answer.said:
            self._say(line)


def _of_a_proxy(refused: Refused) -> bool:
    """Said by what stands before a trainer that it does not reach."""
    return refused.status in (502, 503, 504) and not refused.kind


def _works(alive: Any) -> bool:
    """Whether the answer of `/alive` names a call; one that makes no sense says nothing against it."""
    return not isinstance(alive, Mapping) or bool(alive.get("doing", True))


def plain_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer needs of a run's configuration: all but its environments, whose code it never runs."""
    return {key: value for key, value in data.items() if key != "environments"}

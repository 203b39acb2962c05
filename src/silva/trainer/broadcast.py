"""Weights straight into the workers of vLLM's servers, as vLLM's own trainers send them (its backend "nccl").

    the first rank                                             each server
    /weight_info, /get_world_size        ───────────────>      what it holds, how many workers it has
    /init_weight_transfer_engine         an id, a rank ──>     its workers join the group
    /pause?mode=keep                     ───────────────>      requests in flight stand still
    /start_weight_update, /update_weights    shapes ────>      its workers wait for bytes
    broadcast, broadcast, ...            chunks ────────>      and load the tensors in them
    /finish_weight_update                a name ────────>      /weight_info tells it from now on
    /reset_prefix_cache, /resume         ───────────────>      requests are computed again

A chunk is whole tensors, up to the one that makes it longer than CHUNK: vLLM's workers count in the same way.
Parameters that are divided among ranks are gathered one after the other, on all ranks, so that none ever
holds the model. `Engine.load` asks the servers for the name. Not here: what carries the bytes (nccl.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from silva.aio import gather
from silva.errors import EngineError, PartLost
from silva.ports import CLOCK
from silva.trainer.nccl import Nccl, NcclGroup
from silva.types import Snapshot
from silva.wire.transport import Peer, Refused, Unreachable

if TYPE_CHECKING:
    from silva.trainer.learner import Learner

CHUNK = 1 << 28  # bytes
SOON = (
    60.0  # seconds in which a server says what it holds, or is left out: its core answers between two steps
)
CHECK = 1.0  # seconds between two questions whether any server is there
T = TypeVar("T")


class Broadcast:
    """Implements `WeightTransfer`.

    Args:
        servers: those of vLLM; one that does not answer is left out until the next version.
        patience: seconds to wait for the first one to answer.
        timeout: seconds that each call may take, a whole transfer too.
        make: a group of so many ranks; this process is the first.
    """

    kind: Literal["sent"] = "sent"

    def __init__(
        self,
        servers: Sequence[Peer],
        *,
        patience: float,
        timeout: float,
        make: Callable[[int, torch.device], NcclGroup] = Nccl,
    ) -> None:
        self._servers, self._patience, self._timeout, self._make = servers, patience, timeout, make
        self._name = secrets.token_hex(4)
        self._group: NcclGroup | None = None
        self._members: list[Peer] = []
        self._held = ""  # what the members hold
        self._loop: asyncio.AbstractEventLoop | None = None

    def publish(self, learner: Learner) -> Snapshot:
        """Send the weights of now.

        Raises:
            PartLost: a server was lost meanwhile. The others stay paused, as their weights are incomplete.
            EngineError: a server has refused them, or none answers.
        """
        mesh, name = learner.mesh, f"silva-{self._name}-{learner.version}"
        whole = _Whole(learner)
        update: Future[Any] | None = None
        with mesh.agreed(), _understood():
            if mesh.rank == 0:
                update = self._begin(whole, learner.loaded.device)
        problem = self._send(whole.tensors(), update)
        with mesh.agreed(), _understood():
            if problem:
                raise problem
            if update:
                self._done(self._end(name))
        return Snapshot(learner.version, sent=mesh.gather(name)[0])

    def close(self) -> None:
        if self._group:
            self._group.abort()
        self._group, self._members, self._held = None, [], ""

    def _send(self, tensors: Iterable[torch.Tensor], update: Future[Any] | None) -> Exception | None:
        """Gather all parameters, on all ranks and to the end, whatever happens. What the first rank could not
        send it says."""
        problem: Exception | None = None

        def check() -> None:
            if update and update.done():
                update.result()

        for chunk in _chunks(tensors):
            if update and not problem:
                problem = self._tried(chunk, check)
        if update and not problem:
            problem = self._tried([], check)
            try:
                update.result()
            except Exception as error:
                problem = problem or error
        if problem:
            self.close()  # the others are in the middle of it
        return problem

    def _tried(self, chunk: Sequence[torch.Tensor], check: Callable[[], None]) -> Exception | None:
        """Wait for the chunk before, and send this one."""
        assert self._group
        try:
            check()
            self._group.wait(check)
            if chunk:
                self._group.broadcast(torch.cat([each.reshape(-1).view(torch.uint8) for each in chunk]))
        except Exception as error:
            return error
        return None

    def _begin(self, whole: _Whole, device: torch.device) -> Future[Any]:
        """What the servers make of the bytes that are sent from here on."""
        described = whole.described()
        self._done(self._pause(device))
        info = {
            "names": [name for name, _ in described],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for _, each in described],
            "shapes": [list(each.shape) for _, each in described],
        }
        return self._start(self._all("/update_weights", {"update_info": info}))

    async def _pause(self, device: torch.device) -> None:
        live = await self._live()
        if {*live} != {*self._members} or any(held != self._held for held in live.values()):
            await self._meet(list(live), device)
        try:
            await self._all("/pause?mode=keep")
            await gather(self._started(peer) for peer in self._members)
        except Exception:
            await self._all("/resume")
            raise

    async def _live(self) -> dict[Peer, str]:
        """The servers that answer, each with the name of its weights."""
        began = CLOCK.monotonic()
        while True:
            asked = (peer.get("/weight_info", timeout=SOON) for peer in self._servers)
            found = await asyncio.gather(*asked, return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException) and not isinstance(each, Unreachable):
                    raise each
            live = zip(self._servers, found, strict=True)
            if known := {peer: a["weight_version"] for peer, a in live if not isinstance(a, BaseException)}:
                return known
            if CLOCK.monotonic() - began > self._patience:
                raise EngineError(f"no inference server for {self._patience:g} s: {found[0]}")
            await CLOCK.sleep(CHECK)

    async def _meet(self, servers: list[Peer], device: torch.device) -> None:
        """A group with the workers of these servers takes the place of the one before."""
        self.close()
        await gather(self._forgotten(peer) for peer in servers)
        answers = await gather(peer.get("/get_world_size", timeout=self._timeout) for peer in servers)
        sizes = [int(answer["world_size"]) for answer in answers]
        self._group = group = self._make(1 + sum(sizes), device)
        shared = {"world_size": 1 + sum(sizes), "packed": True, "packed_buffer_size_bytes": CHUNK}

        async def invited(number: int) -> None:
            info = {**group.invitation, **shared, "rank_offset": 1 + sum(sizes[:number])}
            body = {"init_info": info}
            await servers[number].post("/init_weight_transfer_engine", body, timeout=self._timeout)

        try:
            await gather([_apart(group.join), *map(invited, range(len(servers)))])
        except Refused as refused:
            self.close()
            raise EngineError(
                f'{refused} (it needs --weight-transfer-config \'{{"backend": "nccl"}}\')'
            ) from refused
        except Exception:
            self.close()
            raise
        self._members = servers

    async def _forgotten(self, peer: Peer) -> None:
        """Its workers leave the group that they are in."""
        with suppress(Refused):
            await peer.post("/shutdown_weight_transfer_engine", timeout=self._timeout)

    async def _started(self, peer: Peer) -> None:
        """An update that another trainer has begun and never ended is ended first."""
        try:
            await peer.post("/start_weight_update", timeout=self._timeout)
        except Refused:
            with suppress(Refused):
                await peer.post("/finish_weight_update", timeout=self._timeout)
            await peer.post("/start_weight_update", timeout=self._timeout)

    async def _end(self, name: str) -> None:
        await self._all("/finish_weight_update", {"weight_version": name})
        answers = await self._all("/reset_prefix_cache?reset_running_requests=true")
        if not all(answer["success"] for answer in answers):
            raise EngineError("an inference server did not drop the keys and values of earlier weights")
        await self._all("/resume")
        self._held = name

    async def _all(self, path: str, body: Mapping[str, Any] | None = None) -> list[Any]:
        return await gather(peer.post(path, body, timeout=self._timeout) for peer in self._members)

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """In an event loop of its own, as the calls block while the bytes go out."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@contextmanager
def _understood() -> Iterator[None]:
    """What a server's answer, or its silence, means to a run."""
    try:
        yield
    except Unreachable as error:
        raise PartLost(f"{error} (while weights were sent to it)") from error
    except Refused as error:
        raise EngineError(f"{error} (while weights were sent to it)") from error


async def _apart(work: Callable[[], None]) -> None:
    """In a thread that no end of the process waits for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def run() -> None:
        problem: Exception | None = None
        try:
            work()
        except Exception as error:
            problem = error
        loop.call_soon_threadsafe(end, problem)

    threading.Thread(target=run, daemon=True).start()
    await done


class _Whole:
    """The model as its checkpoint has it, one parameter at a time, whatever part of it this rank has.

    It is made, and iterated, on all ranks.
    """

    def __init__(self, learner: Learner) -> None:
        self._mesh, self._loaded = learner.mesh, learner.loaded
        names = [name for name, _ in self._loaded.model.named_parameters()]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        self._stages = len({*self._mesh.gather(digest)}) > 1
        self._model = self._mesh.outline(self._loaded) if self._stages else self._loaded.model

    def described(self) -> list[tuple[str, torch.Tensor]]:
        """What is sent, without its content."""
        dtype = self._loaded.dtype
        return [
            each
            for name, parameter in self._model.named_parameters()
            for each in self._named(name, torch.empty(parameter.shape, dtype=dtype, device="meta"))
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is sent; of stages of layers the first rank alone gets all."""
        for name, parameter in self._model.named_parameters():
            full: torch.Tensor | None = parameter
            if self._stages:
                full = self._mesh.bring(self._loaded, name, 0)
            elif isinstance(parameter, DTensor):
                full = parameter.full_tensor()
            if full is not None:
                sent = full.detach().to(self._loaded.device, self._loaded.dtype)
                yield from (tensor.contiguous() for _, tensor in self._named(name, sent))

    def _named(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """As checkpoints name it: they hold the weights of each expert apart."""
        return list(revert_weight_conversion(self._model, {name: tensor}).items())


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk, size = list[torch.Tensor](), 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.nbytes
        if size > CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk

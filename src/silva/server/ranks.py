"""A trainer of several processes: the first answers HTTP and hands every call on, the others follow it.

    POST ──> TrainerServer ──> Leader ──call──> rank 1: rpc.dispatch ─┐
                                 │              rank 2: rpc.dispatch ─┤ the same call, at the same time
                                 └── its own trainer                 ─┘

Either `silva trainer` starts the others itself (`trainer.ranks`), on this machine and as its children, or all
were started by `torchrun` or a launcher like it, which has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

A rank that fails alone leaves the others waiting for it in the middle of an update. So what fails on one rank
and not on all ends every process: whoever started them starts them again, and the run goes on from its last
checkpoint.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from silva.errors import ConfigError
from silva.protocols import Trainer
from silva.server.trainer import InFront
from silva.signals import is_stopped, stop_signals
from silva.trainer.remote import Open
from silva.trainer.sharding.ranks import PATIENCE
from silva.wire import rpc
from silva.wire.codec import decode, encode
from silva.wire.listening import Bind

T = TypeVar("T")
Say = Callable[[str], None]
Build = Callable[[Open, Say], Awaitable[Trainer]]
Answer = Callable[[bytes], Awaitable[object]]

OPEN = b"open\n"
TICK = 0.2  # seconds between two looks at the processes of other ranks
AFTER = 20.0  # seconds within which what fails on one rank fails on the others
SOON, LATER = 0.001, 0.05  # seconds between two questions for the next call, at first and after a while


def place() -> tuple[int, int]:
    """Rank of this process and number of ranks, as a launcher says in the environment; alone without one.

    Raises:
        ConfigError: what it says are no such numbers.
    """
    given = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not all(each.isdecimal() for each in given) or int(given[0]) >= int(given[1]):
        raise ConfigError(
            f"environment variables RANK and WORLD_SIZE: got {given[0]!r} and {given[1]!r}, expected a rank "
            "below the number of ranks"
        )
    return int(given[0]), int(given[1])


@contextmanager
def joined(ranks: int, device: str, say: Say) -> Iterator[SharedCalls | None]:
    """This process among the ranks of the trainer, all of which have come; None if it is alone.

    Args:
        ranks: of the configuration: if no launcher has started this process, it starts as many.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: a launcher has started another number of them, or does not say where they meet.
    """
    rank, size = place()
    if size > 1 and ranks not in (1, size):
        raise ConfigError(
            f"trainer.ranks = {ranks}: got {size} from the launcher; set {size}, or leave it out"
        )
    if max(size, ranks) == 1:
        yield None
        return
    others: list[subprocess.Popen[bytes]] = []
    if size > 1:
        store = _store(*_meeting(), rank, size)
    else:
        store, size = _store("127.0.0.1", 0, 0, ranks), ranks
        others = [_start(number, ranks, store.port) for number in range(1, ranks)]
        threading.Thread(target=_watch, args=(others, say), daemon=True).start()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield SharedCalls(store, say)
    finally:
        for other in others:
            other.kill()


def _meeting() -> tuple[str, int]:
    """Host and port at which ranks meet, as a launcher says in the environment."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"environment variables MASTER_ADDR and MASTER_PORT: got {host!r} and {port!r}, expected the "
            "host of the first rank, and a port of it"
        )
    return host, int(port)


def _store(host: str, port: int, rank: int, size: int) -> dist.TCPStore:
    """What ranks meet at: if they all are on this machine, on the loopback interface, for nobody else.

    Torch itself listens on all interfaces, whatever the host is. `torchrun` has done so before a rank starts.
    """
    agent, listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", None
    if Bind(host).local:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        if not agent:
            host = "127.0.0.1"
            port, listens = _listening(port) if rank == 0 else (port, None)
    first = rank == 0 and not agent
    return dist.TCPStore(host, port, size, first, PATIENCE, wait_for_workers=False, master_listen_fd=listens)


def _listening(port: int) -> tuple[int, int]:
    """The port, and the file descriptor of a socket that nobody closes."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"MASTER_PORT = {port}: {error.strerror}; expected a free one") from error
        listening.listen()
        return listening.getsockname()[1], listening.detach()


def _start(rank: int, ranks: int, port: int) -> subprocess.Popen[bytes]:
    """The command of this process, as another rank."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "SILVA_PARENT": os.getpid()}  # fmt: skip
    env = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen([sys.executable, "-m", "silva", *sys.argv[1:]], env=env, stdin=subprocess.DEVNULL)


def _watch(others: Sequence[subprocess.Popen[bytes]], say: Say) -> None:
    """End with a rank that has ended or was stopped: it never answers."""
    while True:
        time.sleep(TICK)
        for rank, other in enumerate(others, 1):
            code = other.poll()
            if code is None and not is_stopped(other.pid):
                continue
            how = "was stopped" if code is None else f"ended with exit code {code}"
            for each in others:
                each.kill()
            _end(f"rank {rank} {how}", say)


def _end(why: str, say: Say) -> NoReturn:
    say(f"trainer: {why}: all ranks end")
    os._exit(1)


class SharedCalls:
    """How the first rank has the others do what it does."""

    def __init__(self, store: dist.Store, say: Say) -> None:
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store, self._say, self._number = store, say, 0

    async def make(self, call: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """On the first rank: `work`, which is `call` here."""

        async def called() -> T:
            await asyncio.to_thread(_broadcast, call)
            return await work()

        self._store.set(f"call/{self._next()}", "")
        return await self._together(called)

    async def follow(self, answer: Answer) -> NoReturn:
        """On the others: `answer` the calls of the first rank, until the process ends."""
        while True:
            call = await asyncio.to_thread(self._wait)
            try:
                await self._together(functools.partial(answer, call))
            except Exception:  # the first rank tells of it
                continue

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _wait(self) -> bytes:
        key = f"call/{self._next()}"
        pause = SOON
        try:
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, LATER)
        except RuntimeError as error:  # as all errors of a store
            _end(f"rank {self.rank} has lost the first one ({error})", self._say)
        return _broadcast(b"")

    async def _together(self, work: Callable[[], Awaitable[T]]) -> T:
        """What one rank raises, all raise; else the processes end."""
        done = f"done/{self._number}"
        try:
            result = await work()
        except Exception as error:
            self._store.set(f"{done}/{self.rank}", f"{type(error).__name__}: {error}")
            await asyncio.to_thread(self._expect_failures, done, error)
            raise
        self._store.set(f"{done}/{self.rank}", "")
        return result

    def _expect_failures(self, done: str, error: Exception) -> None:
        others = [rank for rank in range(self._size) if rank != self.rank] if self.rank == 0 else [0]
        try:
            keys = [f"{done}/{rank}" for rank in others]
            self._store.wait(keys, timedelta(seconds=AFTER))
            alone = not all(self._store.get(key) for key in keys)
        except dist.DistError:
            alone = True
        if alone:
            _end(f"rank {self.rank} alone failed ({type(error).__name__}: {error})", self._say)


def _broadcast(data: bytes) -> bytes:
    """The bytes of the first rank."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    content = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return content.numpy().tobytes()


class Leader(InFront):
    """Implements `protocols.Trainer`: every call is made on all ranks."""

    def __init__(self, inner: Trainer, calls: SharedCalls) -> None:
        super().__init__(inner)
        self._calls = calls

    async def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        call = await asyncio.to_thread(rpc.encode, Trainer, method, arguments)
        return await self._calls.make(call, lambda: getattr(self.inner, method)(*arguments))


def answering(build: Build) -> Answer:
    """Makes the calls of `Leader` here, on what `build` makes."""
    trainer: Trainer | None = None

    async def answer(call: bytes) -> None:
        nonlocal trainer
        if call.startswith(OPEN):
            trainer = await build(decode(Open, call.removeprefix(OPEN)), lambda text: None)
        else:
            await rpc.dispatch(trainer, Trainer, call)

    return answer


def leading(build: Build, calls: SharedCalls) -> Build:
    """Builds a trainer on all ranks."""

    async def lead(asked: Open, say: Say) -> Trainer:
        return Leader(await calls.make(OPEN + encode(asked), lambda: build(asked, say)), calls)

    return lead


def follow(calls: SharedCalls, answer: Answer) -> NoReturn:
    """Be a rank that follows, until the process is told to end, at once: it holds nothing that is not in a
    checkpoint."""
    for number in stop_signals():
        signal.signal(number, lambda *_: os._exit(0))
    asyncio.run(calls.follow(answer))
    raise AssertionError("it follows for ever")

"""A trainer's server as it is served, in a thread of its own, for tests of more than one event loop."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from silva.server.trainer import TAKES, Build, TrainerServer
from silva.trainer.remote import Open, RemoteTrainer
from silva.wire.guard import Guard
from silva.wire.listening import Bind, serve
from silva.wire.transport import Peer

SOON = 30.0  # seconds within which a server listens, and ends
KEY = "a-key"


def asked(folder: Path, **changes: object) -> Open:
    return Open(**{"config": {}, "recipe": True, "folder": str(folder), "publishes": "parameters", **changes})


def client(address: str, folder: Path, **options: object) -> RemoteTrainer:
    peer = Peer(address, name="trainer", key=KEY)
    return RemoteTrainer(peer, asked(folder), **{"patience": SOON, **options})


@contextmanager
def serving(build: Build) -> Iterator[str]:
    """Gives the address of a Unix socket, whose path is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="silva-") as folder:
        bind = Bind(unix=f"{folder}/trainer.sock")
        ready, loop, tasks = threading.Event(), asyncio.new_event_loop(), list[asyncio.Task[None]]()

        async def listen() -> None:
            server = TrainerServer(build, Path("/"))
            guard = Guard(server.app(), bind, key=KEY, log=lambda line: None, takes=(TAKES,))
            tasks.append(asyncio.create_task(serve(guard, bind, ready=lambda address: ready.set())))
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.close()

        thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), daemon=True)
        thread.start()
        assert ready.wait(SOON)
        try:
            yield bind.address
        finally:
            loop.call_soon_threadsafe(tasks[0].cancel)
            thread.join(SOON)
            loop.close()

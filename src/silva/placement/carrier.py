"""What stands in a Ray actor, and what carries requests there: the bytes of the HTTP services.

    Peer ──> Carrier ──head, body──> CarriedPart.ask ──> routes of server/trainer.py or server/inference.py
                     <──status, body──

Ray does not pickle bytes. Its own records and errors it does. Not here: who starts an actor (ray.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from silva.errors import SilvaError, one_line
from silva.wire.rpc import LONG
from silva.wire.transport import Peer

TOKEN, MODE, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
"""Environment variables of Ray: who may use a cluster."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CarriedPart:
    """What runs in an actor: a part and those who ask it, in one event loop."""

    def __init__(self) -> None:
        die_with_parent()  # Ray's own end would leave a stopped process
        self._stack, self._lines = contextlib.ExitStack(), list[str]()
        self._said, self._opened = asyncio.Event(), asyncio.Event()
        self._client: Any = None

    async def open(self, make: str, part: str, spec: bytes) -> bytes:
        """Build the part: the error as JSON, or nothing.

        Args:
            make: "module:function", as `commands.serve.carried`; a client of httpx2 asks what it has made.
            spec: JSON of the configuration (`values`), of the `folder` to work in, "" for Ray's, and of more
                variables for the environment (`env`).
        """
        asked, loop = json.loads(spec), asyncio.get_running_loop()

        def say(line: str) -> None:
            self._lines.append(line)
            loop.call_soon_threadsafe(self._said.set)

        def build() -> Any:
            os.environ.update(asked["env"])
            if asked["folder"]:
                os.chdir(asked["folder"])
            module, _, function = make.partition(":")
            return getattr(importlib.import_module(module), function)(part, asked["values"], self._stack, say)

        try:
            self._client = await asyncio.to_thread(build)
        except SilvaError as error:
            return json.dumps([type(error).__name__, str(error)]).encode()
        self._opened.set()
        return b""

    async def place(self) -> bytes:
        """Address of the node and a free port, with a space between them."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()} {probe.getsockname()[1]}".encode()

    async def ask(self, head: bytes, body: bytes) -> bytes:
        """The status, a line feed and the content of the answer to a request.

        Args:
            head: method, path and media type of the body, with spaces between them.
        """
        await self._opened.wait()
        if self._client is None:  # it follows another part, and lives
            return b"200\n{}"
        method, path, kind = head.decode().split(" ", 2)
        headers = {"content-type": kind} if kind else {}
        response = await self._client.request(method, path, headers=headers, content=body)
        return b"%d\n%b" % (response.status_code, response.content)

    async def well(self) -> bytes:
        """A sign of life, also while it is opened."""
        return b""

    async def lines(self) -> bytes:
        """What the part has to say since the last call, as soon as there is something."""
        await self._said.wait()
        self._said.clear()
        said, self._lines[:] = "\n".join(self._lines), []
        return said.encode()


class Carrier:
    """A transport of httpx2: requests are calls of the actor that has the name now."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name, self._namespace = name, namespace
        self._actor: Any = None

    async def handle_async_request(self, request: Any) -> Any:
        import httpx2
        import ray

        kind = request.headers.get("content-type", "").encode()
        head = b" ".join((request.method.encode(), request.url.raw_path, kind))
        try:
            answer = await self._asked(head, request.content)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: nobody has the name
            self._actor = None
            raise httpx2.ConnectError(words(error)) from error
        status, _, content = answer.partition(b"\n")
        return httpx2.Response(int(status), content=content)

    async def _asked(self, head: bytes, body: bytes) -> bytes:
        import ray

        if self._actor is None:
            self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
        return await asked(self._actor.ask, head, body)

    async def aclose(self) -> None:
        self._actor = None


async def asked(method: Any, *arguments: bytes) -> bytes:
    """What a method of an actor answers; it is cancelled if nobody waits for that any more."""
    import ray

    long = sum(map(len, arguments)) >= LONG
    call = await asyncio.to_thread(method.remote, *arguments) if long else method.remote(*arguments)
    try:
        answer: bytes = await call
        return answer
    except asyncio.CancelledError:
        ray.cancel(call)
        raise


def part_of(name: str) -> str:
    """What an actor is: "inference" of "inference1"."""
    return name.rstrip("0123456789")


def peer(name: str, namespace: str) -> Peer:
    return Peer(f"ray:{name}", name=part_of(name), carrier=partial(Carrier, name, namespace))


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it is gone, also if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def words(error: Exception) -> str:
    """The first line of Ray's that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return one_line(next(filter(None, lines), type(error).__name__), 120)

"""An HTTP server on 127.0.0.1 that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: Any


class Reply(NamedTuple):
    body: Any = b""  # bytes, or anything for JSON
    status: int = 200
    headers: Mapping[str, str] = {}


HANG, CUT, ENDLESS = "hang", "cut", "endless"
Script = Callable[[int, Request], Any]


class Server:
    """Attributes: `requests` so far, and `sent`, bytes of an endless answer."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.url, self.port, self.sent = "", 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await self._read(reader)
                self.requests.append(request)
                answer = self.script(len(self.requests) - 1, request)
                if answer == HANG:
                    await reader.read()  # until the client gives up
                if answer in (HANG, CUT):
                    break
                if answer == ENDLESS:
                    writer.write(b"HTTP/1.1 200 X\r\nContent-Type: text/plain\r\n\r\n")
                    while True:
                        writer.write(b"x" * 65536)
                        await writer.drain()
                        self.sent += 65536
                reply = answer if isinstance(answer, Reply) else Reply(answer)
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | dict(
                    reply.headers
                )
                lines = [f"HTTP/1.1 {reply.status} X", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
                writer.write("\r\n".join(lines).encode("latin-1") + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        return Request(
            method, parts.path, dict(parse_qsl(parts.query)), headers, json.loads(data) if data else None
        )


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server, ready = Server(script), threading.Event()
    stop: list[Callable[[], None]] = []

    async def listen() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{server.port}"
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        ready.set()
        await stopped.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        stop[0]()
        thread.join()

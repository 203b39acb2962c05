"""A chat API on localhost that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = dict[str, Any] | bytes | str | tuple[int, dict[str, str], Any]
Script = Callable[[int, dict[str, Any]], Answer]
HANG, CUT = "hang", "cut"


def said(
    content: str | None = "yes", *, finish: str = "stop", usage: Any = (10, 4), **more: Any
) -> dict[str, Any]:
    """The body of an answer; `usage`: tokens of input and output, or None."""
    body: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": content, **more},
                                         "finish_reason": finish}]}  # fmt: skip
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return body


def called(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]


class Server:
    """Attributes: `bodies` and `headers` of every request so far."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET "):  # nothing but chats is served here
                    writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    continue
                length = next(
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.headers.append(head)
                answer = self.script(len(self.bodies) - 1, body)
                if answer == HANG:
                    await reader.read()  # until the client gives up
                if answer in (HANG, CUT):
                    break
                status, headers, content = answer if isinstance(answer, tuple) else (200, {}, answer)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                lines = [
                    f"HTTP/1.1 {status} X",
                    f"Content-Length: {len(data)}",
                    "Content-Type: application/json",
                    *(f"{name}: {value}" for name, value in headers.items()),
                ]
                writer.write("\r\n".join([*lines, "", ""]).encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server, ready = Server(script), threading.Event()
    stop: list[Callable[[], None]] = []

    async def listen() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
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

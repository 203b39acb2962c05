"""Silva's wire format over any engine, on a socket, with the faults that a test asks for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from silva import __version__
from silva.errors import SilvaError
from silva.protocols import Engine
from silva.server.completions import exact
from silva.types import SamplingParams, Snapshot, WeightFolder

CUT, HANG = "cut", "hang"
Fault = str | tuple[int, str] | None  # CUT, HANG, or a status with the name of the error
STATUS = {"ContextOverflow": 400, "ModelError": 409}


class InferenceServer:
    """Attributes:
    calls: paths and bodies of all requests but those to /alive.
    fault: what becomes of a request instead of an answer.
    cancelled: how many completions ended because the client was gone.
    process: which the server says it is; changed by `restart`.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine, self.path = engine, path
        self.address = f"unix:{path}"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fault: Callable[[str, dict[str, Any]], Fault] = lambda path, body: None
        self.cancelled, self.process = 0, 1
        self.held, self.model = ["start"], "tiny"
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None

    def called(self, path: str) -> list[dict[str, Any]]:
        return [body for each, body in self.calls if each == path]

    async def start(self) -> InferenceServer:
        self._listening = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def stop(self) -> None:
        """As a process that is killed: no more connections, and those it has are cut."""
        assert self._listening is not None
        self._listening.close()
        for writer in [*self._writers]:
            writer.transport.abort()
        self.path.unlink(missing_ok=True)
        await asyncio.sleep(0)

    async def restart(self, engine: Engine) -> None:
        self.engine, self.process, self.held = engine, self.process + 1, ["start"]
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *headers = head.split("\r\n")
                sizes = [h.split(":")[1] for h in headers if h.lower().startswith("content-length")]
                content = await reader.readexactly(int(sizes[0])) if sizes else b""
                path, body = line.split(" ")[1].partition("?")[0], json.loads(content) if content else {}
                if path != "/alive":
                    self.calls.append((path, body))
                if not await self._answer(path, body, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        fault = self.fault(path, body)
        if fault == CUT:
            writer.transport.abort()
            return False
        gone = asyncio.ensure_future(reader.read(1))  # nobody sends a request before the last is answered
        if fault == HANG:
            await gone
            self.cancelled += path == "/v1/completions"
            return False
        if isinstance(fault, tuple):
            gone.cancel()
            await _send(writer, fault[0], {"error": {"message": "as planned", "type": fault[1]}})
            return True
        work = asyncio.ensure_future(self._result(path, body))
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            self.cancelled += path == "/v1/completions"
            return False
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        await _send(writer, *work.result())
        return True

    async def _result(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            return 200, await self._content(path, body)
        except SilvaError as error:
            kind = type(error).__name__
            return STATUS.get(kind, 500), {"error": {"message": str(error), "type": kind}}

    async def _content(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine
        match path:
            case "/alive":
                return {
                    "role": "inference",
                    "version": engine.version,
                    "weights": self.held[-1],
                    "pid": self.process,
                    "counts": dict(engine.counts()),
                }
            case "/capabilities":
                own = engine.capabilities
                return {
                    "context": own.context, "entropies": own.entropies, "loads": sorted(own.loads),
                    "routes": own.routes,
                    "machine": dict(engine.machine), "notes": list(engine.notes), "version": engine.version,
                    "weights": self.held[-1], "silva": __version__,
                    "model": self.model, "memory_per_token": engine.memory(1, 1),
                }  # fmt: skip
            case "/score":
                found = await engine.score(body["tokens"], body["start"])
                return {
                    "logprobs": found.logprobs, "likeliest": found.likeliest,
                    "likeliest_logprobs": found.likeliest_logprobs, "version": found.version,
                    "weights": self.held[-1:],
                }  # fmt: skip
            case "/load":
                folder = body["folder"] and WeightFolder(body["folder"]["path"], body["folder"]["digest"])
                await engine.load(Snapshot(body["version"], folder))
                self.held.append(folder.digest if folder else "")
                return {"version": engine.version}
            case "/sleep":
                await engine.sleep()
                return {}
        return await self._completion(body)

    async def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["model"] == self.model and body["n"] == 1 and body["return_token_ids"]
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
        params = SamplingParams(
            **{name: body[name] for name in names},
            stop=tuple(body["stop"]), stop_token_ids=tuple(body["stop_token_ids"]),
        )  # fmt: skip
        began = len(self.held) - 1
        found = await self.engine.sample(body["prompt"], params)
        choice = {
            "index": 0, "text": "", "finish_reason": "length", **exact(found),
            "logprobs": {"token_logprobs": found.logprobs},
        }  # fmt: skip
        return {"choices": [choice], "weights": self.held[began:]}


async def _send(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


@contextmanager
def serving(engine: Engine, path: Path) -> Iterator[InferenceServer]:
    """In a thread of its own, for tests of more than one event loop."""
    server, ready = InferenceServer(engine, path), threading.Event()
    stop: list[Callable[[], None]] = []

    async def listen() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        await server.start()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        ready.set()
        await stopped.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(listen()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(20)

"""Servers in a test: an app in the test's own event loop, asked directly or over a connection."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from scripted_engine import ScriptedEngine
from starlette.types import ASGIApp

from silva.protocols import Engine
from silva.rendering.renderer import Renderer
from silva.server.engine import ServerLimits
from silva.server.inference import inference_app
from silva.types import SamplingParams
from silva.wire.guard import Guard
from silva.wire.listening import Bind, serve
from silva.wire.transport import Peer

T = TypeVar("T")
MODEL = "tiny"
CONTEXT = 256
JSON = {"content-type": "application/json"}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Never for ever: a test that hangs says so."""
    return asyncio.run(asyncio.wait_for(work, 600))


def says(renderer: Renderer, *texts: str, context: int = CONTEXT) -> ScriptedEngine:
    """An engine that gives these replies one after the other, and then the last one again."""
    replies = iter(texts)
    last = [texts[-1]]

    def reply(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        last[0] = next(replies, last[0])
        return renderer.encode_reply(last[0])

    return ScriptedEngine(reply, context=context)


def guarded(
    engine: Engine, renderer: Renderer, *, key: str = "", bind: Bind = Bind(), **options: Any
) -> Guard:
    """The inference server as it is served. `options`: of the limits, and `reload`."""
    reload = options.pop("reload", None)
    guard = {name: options.pop(name) for name in ("max_body", "body_seconds") if name in options}
    lines: list[str] = options.pop("lines", [])
    app = inference_app(
        engine, renderer, model=MODEL, limits=ServerLimits(**options), reload=reload, log=lines.append
    )
    return Guard(app, bind, key=key, log=lines.append, **guard)


@asynccontextmanager
async def asking(app: ASGIApp, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A client without a connection. What it sends is said to be what the app takes."""
    transport = httpx2.ASGITransport(app=app)
    headers = {"content-type": getattr(app, "_takes", [JSON["content-type"]])[0]} | headers
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers, timeout=30
    ) as client:
        yield client


@asynccontextmanager
async def listening(app: ASGIApp, bind: Bind = Bind()) -> AsyncIterator[str]:
    """The app behind a real socket; gives its address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(app, bind, ready=ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def connected(address: str, key: str = "") -> AsyncIterator[Peer]:
    """A client of the kind that Silva's own processes use."""
    peer = Peer(address, name="test", key=key)
    try:
        yield peer
    finally:
        await peer.close()


def certificate(folder: Path, name: str = "server") -> dict[str, str]:
    """Files of a new certificate of this machine, for `Bind`. Who trusts it trusts it alone."""
    files = {"certificate": str(folder / f"{name}.pem"), "private_key": str(folder / f"{name}.key")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-subj", "/CN=silva", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-addext", "basicConstraints=critical,CA:FALSE",  # rustls takes no authority's for a server's
         "-out", files["certificate"], "-keyout", files["private_key"]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another task of the loop brings about."""
    try:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within 300 s: {what}") from None

"""How a server listens and stops, and what its connections may do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import Receive, Scope, Send
from tests.server.running import connected, listening, run, until

from silva.errors import ConfigError
from silva.wire import listening as serving
from silva.wire.listening import Bind, check_bind, serve
from silva.wire.transport import Unreachable


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"true"})


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b".", "more_body": True})
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_it_listens_on_loopback_and_says_the_real_port(host: str) -> None:
    async def ask() -> None:
        async with listening(hello, Bind(host)) as address:
            assert not address.endswith(":0")
            async with connected(address) as peer:
                assert await peer.get("/") is True

    try:
        run(ask())
    except ConfigError as error:
        if host != "::1":
            raise
        pytest.skip(f"no IPv6 here: {error}")


async def test_it_listens_on_a_unix_socket_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # a server that is gone leaves this
    bind = Bind(unix=str(path))
    async with listening(hello, bind) as address, connected(address) as peer:
        assert address == f"unix:{path}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert await peer.get("/") is True
        with pytest.raises(ConfigError, match="another server listens there"):
            await serve(hello, bind, ready=print)
        assert await peer.get("/") is True
    assert not path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="expected a socket"):
        run(serve(hello, Bind(unix=str(path)), ready=print))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("bind", "key", "why"),
    [
        (Bind("0.0.0.0"), "", "SILVA_API_KEY"),
        (Bind("192.168.1.7", 80), "", "SILVA_API_KEY"),
        (Bind("example.org"), "", "SILVA_API_KEY"),
        (Bind(""), "secret", "host"),
        (Bind(port=70000), "", "port"),
        (Bind(), "two words", "the API key"),
        (Bind(), "schlüssel", "the API key"),
    ],
)
def test_an_address_that_others_reach_needs_a_key(bind: Bind, key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_bind(bind, key)


def test_loopback_and_unix_sockets_need_none() -> None:
    for bind in (Bind(), Bind("localhost"), Bind("127.8.9.1"), Bind("::1"), Bind(unix="a.sock")):
        check_bind(bind, "")
    check_bind(Bind("0.0.0.0"), "secret")
    assert Bind("::1", 80).address == "http://[::1]:80"


async def test_a_port_in_use_is_an_error_with_the_address() -> None:
    async with listening(hello) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen at http://127.0.0.1:{port}"):
            await serve(hello, Bind(port=port), ready=print)


async def test_it_stops_while_a_stream_is_open() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with listening(endless) as address:
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        port = int(address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def test_a_request_that_does_not_end_is_cut_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must not read of a mistake of its own; the work that was asked for goes on in a thread."""
    monkeypatch.setattr(serving, "GRACE", 0)
    asked = asyncio.Event()

    async def hanging(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with contextlib.AsyncExitStack() as client:
        async with listening(hanging) as address:
            peer = await client.enter_async_context(connected(address))
            call = asyncio.ensure_future(peer.get("/"))
            await asked.wait()
        with pytest.raises(Unreachable):
            await call


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: local", b"x"])
def test_a_connection_that_never_ends_the_head_of_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.2)

    async def wait(first: bytes) -> None:
        async with listening(hello) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            if first:
                writer.write(first)
                await reader.readuntil(b"true")
            for byte in sent:  # slowly
                writer.write(bytes([byte]))
                await asyncio.sleep(0.001)
            async with asyncio.timeout(300):
                assert await reader.read() == b""
            writer.close()

    run(wait(b""))
    if sent:  # a later request of a connection; between requests it may be idle for longer
        run(wait(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"))


def test_a_huge_head_is_refused() -> None:
    async def ask() -> bytes:
        async with listening(hello) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (8 << 20))
            try:
                return await reader.readexactly(12)
            except (ConnectionResetError, asyncio.IncompleteReadError):
                return b""  # it was cut before the answer could be read
            finally:
                writer.close()

    assert run(ask()) in (b"HTTP/1.1 400", b"")


def test_too_many_connections_are_closed_and_those_before_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_most_connections", lambda: 3)

    async def ask() -> None:
        async with listening(hello) as address, httpx2.AsyncClient() as client:
            assert (await client.get(address)).status_code == 200
            port = int(address.rpartition(":")[2])
            idle: list[Any] = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            refused = [asyncio.ensure_future(reader.read()) for reader, _ in idle[2:]]
            gone = await asyncio.gather(*refused, return_exceptions=True)
            assert all(each == b"" or isinstance(each, ConnectionError) for each in gone)
            assert (await client.get(address)).status_code == 200  # on the connection that it has
            for _, writer in idle:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in idle), return_exceptions=True)
            while True:  # until the server has noticed, too
                try:
                    async with httpx2.AsyncClient() as other:
                        assert (await other.get(address)).status_code == 200
                    return
                except httpx2.TransportError:
                    await asyncio.sleep(0.01)

    run(ask())


async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "UNREAD_SECONDS", 0.2)
    ended: list[bool] = []

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"." * (64 << 20)})
        ended.append((await receive())["type"] == "http.disconnect")

    async with listening(large) as address:
        _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]), limit=1)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: bool(ended), "the connection is cut")
        writer.close()
    assert ended == [True]

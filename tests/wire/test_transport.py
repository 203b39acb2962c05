"""Requests to a peer, against a server that answers with the bytes a test asks for."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests import virtual_clock

from silva.errors import ConfigError
from silva.ports import Clock, use_clock
from silva.wire.transport import SHOWN, Peer, Refused, Unreachable, part_address, silence

T = TypeVar("T")
SECRET = "k3y-of-mine"


def run(work: Coroutine[Any, Any, T]) -> T:
    return virtual_clock.run(asyncio.wait_for(work, 30))  # a slow machine changes nothing


def answer(body: bytes, status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Server:
    """Attributes:
    replies: bytes for the next requests, the last one for all after it; None: no answer at all.
    whole: whether the connection stays open after a reply.
    requests: heads and bodies that have arrived. `gone`: connections that the client has closed.
    """

    def __init__(self) -> None:
        self.replies: list[bytes | None] = [answer(b"{}")]
        self.whole = True
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.arrived = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                sizes = [
                    h.split(":")[1] for h in head.split("\r\n") if h.lower().startswith("content-length")
                ]
                body = await reader.readexactly(int(sizes[0])) if sizes else b""
                self.requests.append((head, body))
                self.arrived.set()
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if reply is None:
                    await reader.read()
                    return
                writer.write(reply)
                await writer.drain()
                if not self.whole:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()


@asynccontextmanager
async def listening(where: str = "tcp") -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    with tempfile.TemporaryDirectory(prefix="silva-") as folder:
        path = f"{folder}/peer.sock"
        if where == "unix":
            listener = await asyncio.start_unix_server(server.serve, path)
            address = f"unix:{path}"
        else:
            listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
            address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield server, address
        finally:
            listener.close()


@asynccontextmanager
async def answering(
    *replies: bytes | None, where: str = "tcp", whole: bool = True, key: str = ""
) -> AsyncIterator[tuple[Peer, list[tuple[str, bytes]]]]:
    """A peer whose server gives these replies, and the requests that came."""
    async with listening(where) as (server, address):
        server.replies, server.whole = [*replies], whole
        peer = Peer(address, name="trainer", key=key)
        try:
            yield peer, server.requests
        finally:
            await peer.close()


@pytest.mark.parametrize("where", ["tcp", "unix"])
async def test_json_and_bytes_go_there_and_come_back(where: str) -> None:
    replies = answer(b'{"a": [1]}'), answer(b"0.1"), answer(b"null"), answer(b"\xff\x00")
    async with answering(*replies, where=where) as (peer, requests):
        assert await peer.get("/alive") == {"a": [1]}
        assert await peer.post("/load", {"x": 0.1, "é": None}) == 0.1
        assert await peer.post("/sleep") is None
        assert await peer.send("/open", b"\x00\xff\n") == b"\xff\x00"
    lines = [head.split("\r\n")[0] for head, _ in requests]
    assert lines == [f"{each} HTTP/1.1" for each in ("GET /alive", "POST /load", "POST /sleep", "POST /open")]
    assert [json.loads(requests[i][1]) for i in (1, 2)] == [{"x": 0.1, "é": None}, {}]
    assert requests[3][1] == b"\x00\xff\n"


async def test_what_is_no_json_is_not_sent() -> None:
    async with answering(answer(b"{}")) as (peer, requests):
        with pytest.raises(ValueError, match="Out of range"):
            await peer.post("/load", {"x": float("nan")})
    assert requests == []


@pytest.mark.parametrize("key", ["", SECRET])
async def test_the_key_travels_in_a_header_and_in_no_message(key: str) -> None:
    reply = answer(b'{"error": {"message": "no", "type": "t"}}', 401)
    async with answering(reply, key=key) as (peer, requests):
        with pytest.raises(Refused) as refused:
            await peer.get("/alive")
    head = requests[0][0].lower()
    assert (f"authorization: bearer {key}\r\n" in head) == bool(key)
    assert ("authorization" in head) == bool(key)
    assert SECRET not in str(refused.value) + repr(refused.value) + str(vars(refused.value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "whole", "said"),
    [
        (b"", False, "RemoteProtocolError at /alive"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nabc", False, "RemoteProtocolError at /alive"),
        (b"no http at all\r\n\r\n", False, "RemoteProtocolError at /alive"),
        (answer(b"{half"), True, "got '{half' from /alive, expected JSON"),
        (answer(b""), True, "got '' from /alive, expected JSON"),
        (answer(b"\xff\xfe"), True, "expected JSON"),
        (answer(b"x" * 9 * SHOWN), True, "expected JSON"),
        (answer(b"{}", Content_Encoding="gzip"), True, "at /alive"),
        (None, True, "no answer to /alive within 0.2 s"),
    ],
)
async def test_a_peer_without_an_answer_is_unreachable(reply: bytes | None, whole: bool, said: str) -> None:
    async with answering(reply, whole=whole) as (peer, requests):
        with pytest.raises(Unreachable) as fault:
            await peer.get("/alive", timeout=0.2 if reply is None else 20)
    assert isinstance(fault.value, ConnectionError)
    assert len(requests) == 1  # asked once, whatever becomes of it
    text = str(fault.value)
    assert text.startswith("the trainer at http://127.0.0.1:") and said in text
    assert len(text) < 2 * SHOWN


async def test_what_was_compressed_is_read() -> None:
    async with answering(answer(gzip.compress(b'{"a": 1}'), Content_Encoding="gzip")) as (peer, _):
        assert await peer.get("/alive") == {"a": 1}


@pytest.fixture
def nowhere() -> Iterator[list[str]]:
    """Addresses where nobody listens: a closed port, no file, the socket of a dead server."""
    with tempfile.TemporaryDirectory(prefix="silva-") as folder, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else takes the port
        dead = Path(folder) / "dead.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(dead))
        yield [f"http://127.0.0.1:{closed.getsockname()[1]}", f"unix:{folder}/no.sock", f"unix:{dead}"]


async def test_nobody_listens(nowhere: list[str]) -> None:
    for address in nowhere:
        with pytest.raises(Unreachable) as fault:
            await Peer(address, name="inference").get("/alive")
        assert str(fault.value).startswith(f"the inference at {address}: ")
        assert str(fault.value).endswith("(ConnectError at /alive)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "message", "kind"),
    [
        (
            b'{"error": {"message": "too long", "type": "ContextOverflow"}}',
            400,
            "too long",
            "ContextOverflow",
        ),
        (b'{"error": {"message": "no type"}}', 404, "no type", ""),
        (b'{"error": {"message": "null", "type": null}}', 500, "null", ""),
        (b'{"error": "a word"}', 502, '{"error": "a word"}', ""),
        (b"[]", 503, "[]", ""),
        (b"<html>Bad Gateway</html>", 502, "<html>Bad Gateway</html>", ""),
        (b"", 500, "", ""),
        (b"", 302, "", ""),
    ],
)
async def test_an_error_of_the_peer_keeps_its_status_and_name(
    body: bytes, status: int, message: str, kind: str
) -> None:
    async with answering(answer(body, status)) as (peer, _):
        with pytest.raises(Refused) as fault:
            await peer.send("/open", b"")
    assert (fault.value.status, fault.value.kind) == (status, kind)
    assert str(fault.value).endswith(f": /open: HTTP {status}: {message}")


async def test_a_long_error_is_cut() -> None:
    for body in (b"x" * 9 * SHOWN, json.dumps({"error": {"message": "x" * 9 * SHOWN}}).encode()):
        async with answering(answer(body, 500)) as (peer, _):
            with pytest.raises(Refused) as fault:
                await peer.get("/alive")
        assert str(fault.value).count("x") == SHOWN


@pytest.mark.parametrize("where", ["tcp", "unix"])
async def test_a_call_that_is_cancelled_or_given_up_closes_its_request(where: str) -> None:
    for timeout, raised in ((None, asyncio.CancelledError), (0.1, Unreachable)):
        async with listening(where) as (server, address):
            server.replies = [None]
            call = asyncio.create_task(Peer(address, name="trainer").get("/alive", timeout=timeout))
            await server.arrived.wait()
            if timeout is None:
                call.cancel()
            with pytest.raises(raised):
                await call
            await server.gone.wait()


async def test_calls_at_once_do_not_wait_for_each_other() -> None:
    async with listening() as (server, address):
        server.replies = [None, answer(b"1")]
        peer = Peer(address, name="trainer")
        waiting = asyncio.create_task(peer.get("/slow"))
        await server.arrived.wait()
        assert await peer.get("/alive") == 1 and not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await peer.close()


def test_a_connection_is_kept_and_a_new_loop_makes_its_own() -> None:
    connections: list[int] = []
    peers: list[Peer] = []

    async def work(address: str = "") -> None:
        async with listening() as (server, address):
            peer = peers[0] if peers else Peer(address, name="trainer")
            peer.address = address  # a server of another loop ends with it
            peers.append(peer)
            for _ in range(3):
                await peer.get("/alive")
            connections.append(server.connections)

    run(work())
    run(work())
    assert connections == [1, 1]


async def test_a_peer_that_was_closed_connects_again() -> None:
    async with answering(answer(b"1")) as (peer, _):
        for _ in range(2):
            await peer.close()
            await peer.close()
            assert await peer.get("/alive") == 1


async def test_no_proxy_of_the_environment_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with answering(answer(b"1")) as (peer, _):
        assert await peer.get("/alive") == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000//", "http://127.0.0.1:8000"),
        ("https://gpu.example/base/", "https://gpu.example/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://host/a@b", "http://host/a@b"),
        ("unix:runs/t.sock", "unix:runs/t.sock"),
        ("unix:/tmp/a/", "unix:/tmp/a/"),
    ],
)
def test_addresses(given: str, expected: str) -> None:
    assert part_address(given) == expected


@pytest.mark.parametrize(
    "given",
    ["", "unix:", "127.0.0.1:8000", "http://", "http:/x", "ftp://h", "file:///etc/passwd", "HTTP://h"],
)
def test_another_form_of_an_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://HOST:PORT, https://HOST or unix:PATH"):
        part_address(given)
    with pytest.raises(ConfigError, match=r"trainer: got the address "):
        Peer(given, name="trainer")


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    for given in ("http://user:pass@host:1", "https://:pass@host/x"):
        with pytest.raises(ValueError, match="a key has an option of its own") as fault:
            part_address(given)
        assert "pass@" not in str(fault.value)
        with pytest.raises(ConfigError) as refused:
            Peer(given, name="trainer")
        assert "pass@" not in str(refused.value)


class Paused(asyncio.SelectorEventLoop):
    """Its process is stopped (Ctrl-Z) for as long as a test says."""

    paused = 0.0

    def time(self) -> float:
        return super().time() + self.paused


@pytest.mark.parametrize("paused", [0.0, 5.0, 3600.0])
def test_the_time_for_an_answer_does_not_run_while_this_process_is_stopped(paused: float) -> None:
    loop = Paused()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        loop.paused = paused
        await asyncio.sleep(0)  # a timer that is due ends the call now
        writer.write(answer(b"[]"))
        writer.close()

    async def ask() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            peer = Peer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", name="trainer")
            try:
                return await peer.get("/alive", timeout=4.0)
            finally:
                await peer.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(ask()) == []


class Moved(Clock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Answers(Peer):
    """Each answer takes some seconds, or never comes, or is a refusal; `asked` counts."""

    def __init__(self, clock: Moved, *answers: float | Refused | Unreachable | None) -> None:
        super().__init__("unix:/nowhere", name="trainer")
        self.clock, self.answers, self.asked = clock, answers, 0

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        found = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        assert timeout is not None
        if isinstance(found, Exception):
            raise found
        self.clock.now += timeout if found is None else found
        if found is None:
            raise Unreachable("no answer")
        return {}


@pytest.mark.parametrize(
    ("answers", "seconds", "asked"),
    [
        ([None], 5.0, 1),  # it hangs: the rest of 1 s, then 4 s for its answer
        ([0.0, 0.0, None], 7.0, 3),
        ([3.9] * 20 + [None], 20 * 4.9 + 5.0, 21),  # late, but in time
        ([Refused("HTTP 404", 404)] * 9 + [None], 14.0, 10),  # it lives
        ([Unreachable("refused")], 4.0, 4),  # nobody listens
    ],
)
async def test_silence(answers: list[Any], seconds: float, asked: int) -> None:
    clock = Moved()
    peer = Answers(clock, *answers)
    with use_clock(clock):
        await silence(peer, patience=4.0, every=1.0)
    assert clock.now == pytest.approx(seconds) and peer.asked == asked

"""What stands before every route: keys, hosts, sizes, times, and errors that tell no secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tests.server.running import JSON, asking, guarded, listening, run, says

from silva.errors import CapabilityError, ContextOverflow, EngineError, ModelError, OutOfMemory, RecordError
from silva.rendering.renderer import Renderer
from silva.server.engine import ServerLimits
from silva.server.inference import inference_app
from silva.wire import guard as module
from silva.wire.guard import Application, Guard, HttpError
from silva.wire.listening import Bind

KEY = "s3cret"


def raising(error: BaseException) -> Application:
    async def fail(request: Request) -> Response:
        raise error

    return Application([Route("/", fail, methods=["GET"])])


def length_of_body() -> Application:
    async def length(request: Request) -> Response:
        return Response(str(len(await request.body())))

    return Application([Route("/", length, methods=["POST"])])


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"bearer {KEY}",
        f"Basic {KEY}",
        "Bearer schlüssel",
    ],
)
async def test_every_route_is_closed_without_the_right_key(renderer: Renderer, sent: str | None) -> None:
    engine = says(renderer, "yes")
    routes = inference_app(engine, renderer, model="m", limits=ServerLimits()).routes
    assert len(routes) >= 13
    headers = {} if sent is None else {"authorization": sent.encode()}
    async with asking(guarded(engine, renderer, key=KEY)) as client:
        for route in [*routes, Route("/unknown", length_of_body)]:
            assert isinstance(route, Route)
            for method in {*(route.methods or ()), "GET", "POST", "PUT", "OPTIONS", "DELETE"}:
                answer = await client.request(method, route.path, content=b"{}", headers=headers)
                assert answer.status_code == 401, (method, route.path)
                assert KEY not in answer.text
    assert not engine.requests


async def test_with_the_key_they_are_open(renderer: Renderer) -> None:
    app = guarded(says(renderer, "yes"), renderer, key=KEY)
    async with asking(app, authorization=f"Bearer {KEY}") as client:
        found = [(await client.get(path)).status_code for path in ("/health", "/alive", "/unknown")]
    assert found == [200, 200, 404]


@pytest.mark.parametrize(
    ("bind", "host", "status"),
    [
        (Bind(), "localhost", 200),
        (Bind(), "LOCALHOST:8000", 200),
        (Bind(), "127.0.0.1:8000", 200),
        (Bind(), "[::1]:8000", 200),
        (Bind(), "evil.example", 403),
        (Bind(), "localhost.evil.example", 403),
        (Bind(), "127.0.0.1.evil.example", 403),
        (Bind(), "192.168.1.7", 403),
        (Bind(), "[::1", 403),
        (Bind(), "", 403),
        (Bind("192.168.1.7"), "192.168.1.7:80", 200),
        (Bind("box.example"), "box.example", 200),
        (Bind("0.0.0.0"), "192.168.1.7", 200),
        (Bind("0.0.0.0"), "evil.example", 403),
        (Bind(unix="a.sock"), "localhost", 200),
        (Bind(unix="a.sock"), "evil.example", 403),
    ],
)
async def test_the_host_must_be_this_server(bind: Bind, host: str, status: int) -> None:
    async with asking(Guard(length_of_body(), bind, key="", log=print)) as client:
        found = (await client.post("/", headers={"host": host})).status_code
    assert found == status


@pytest.mark.parametrize(
    ("name", "value", "status"), [("host", "localhost", 403), ("authorization", KEY, 401)]
)
async def test_what_is_said_twice_is_refused(name: str, value: str, status: int) -> None:
    """Whoever stands before the server might have read the other one."""
    async with asking(Guard(length_of_body(), Bind(), key=KEY * (name != "host"), log=print)) as client:
        said = (name, f"Bearer {value}" if name != "host" else value)
        found = [(await client.post("/", headers=[said] * times)).status_code for times in (1, 2)]
    assert found == [200, status]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://localhost:3000", 403),  # a page of another program on this machine
        ("http://127.0.0.1", 403),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
    ],
)
async def test_another_site_may_not_ask(origin: str, status: int) -> None:
    async with asking(Guard(length_of_body(), Bind(), key="", log=print)) as client:
        found = (await client.post("/", headers={"origin": origin})).status_code
    assert found == status


async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    app = Guard(length_of_body(), Bind(), key="", log=print, max_body=100_000)
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b"a" * 50_000

    found = []
    async with asking(app) as client:
        for content in (b"a" * 100_000, b"a" * 100_001, chunks()):
            found.append((await client.post("/", content=content)).status_code)
        claimed = {"content-length": "9" * 5000}
        found.append((await client.post("/", content=b"a", headers=claimed)).status_code)
    assert found == [200, 413, 413, 413]
    assert sent <= 4


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=application/json", 415),
        ("", 415),
        (None, 415),
    ],
)
async def test_a_body_of_another_type_is_refused(sent: str | None, status: int) -> None:
    """A page in a browser can send these three, and none, to a server that has not allowed it anything."""
    async with asking(Guard(length_of_body(), Bind(), key="", log=print)) as client:
        del client.headers["content-type"]
        headers = {} if sent is None else {"content-type": sent}
        answer = await client.post("/", content=b"[]", headers=headers)
    assert answer.status_code == status
    if status == 415:
        expected = f"Content-Type: got {sent or 'none'}, expected application/json"
        assert answer.json()["error"]["message"] == expected


async def test_no_body_needs_no_type() -> None:
    """As `curl -X POST` sends it."""
    async with asking(Guard(length_of_body(), Bind(), key="", log=print)) as client:
        del client.headers["content-type"]
        refused = await client.post("/", content=b"a")
        found = [(await client.post("/")).text, refused.status_code]
    assert found == ["0", 415]


def test_a_client_that_goes_away_before_its_body_asks_nothing() -> None:
    asked = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
    run(Guard(app, Bind(), key="", log=print)(scope, gone, lambda _: pytest.fail("nobody hears it")))
    assert asked == []


async def test_it_is_refused_over_a_connection_too() -> None:
    app = Guard(length_of_body(), Bind(), key="", log=print, max_body=1000)
    async with listening(app) as address, httpx2.AsyncClient(headers=JSON) as client:
        large = await client.post(address, content=b"a" * 5_000_000)
        after = await client.post(address, content=b"abc")
    status, error, after = large.status_code, large.json()["error"], after.text
    assert (status, after) == (413, "3")
    assert error == {
        "message": "the body is too large, expected at most 1000 bytes",
        "type": "invalid_request_error",
        "code": None,
    }


async def test_a_body_that_takes_too_long_is_given_up() -> None:
    app = Guard(length_of_body(), Bind(), key="", log=print, body_seconds=0.2)
    async with listening(app) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        writer.write(b"abc")
        answer = await reader.readuntil(b"}}")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408") and b"within 0.2 s" in answer


async def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    app = Guard(length_of_body(), Bind(), key="", log=print, max_body=1000)
    last = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"a" * 900
        await last.wait()

    async with asking(app) as client:
        waiting = [asyncio.ensure_future(client.post("/", content=slow())) for _ in range(2)]
        while app._held < 1800:
            await asyncio.sleep(0.001)
        refused = await client.post("/", content=b"a" * 900)
        last.set()
        answers = [*await asyncio.gather(*waiting), await client.post("/", content=b"a" * 900)]
        found = [refused.status_code, *(answer.status_code for answer in answers)]
    assert found == [429, 200, 200, 200]
    assert app._held == 0


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (ContextOverflow("too long"), 400, "ContextOverflow", "too long"),
        (RecordError("no record"), 400, "RecordError", "no record"),
        (CapabilityError("cannot"), 400, "CapabilityError", "cannot"),
        (ModelError("no weights"), 409, "ModelError", "no weights"),
        (EngineError("failed"), 500, "EngineError", "failed"),
        (OutOfMemory("memory ran out"), 500, "OutOfMemory", "memory ran out"),
        (HttpError(418, "tea", code="pot"), 418, "invalid_request_error", "tea"),
        (KeyError("a secret"), 500, "KeyError", "the server failed (KeyError); its log says more"),
        (MemoryError("a secret"), 500, "MemoryError", "the server failed (MemoryError); its log says more"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
async def test_exceptions_become_errors_in_json(
    error: Exception, status: int, kind: str, message: str
) -> None:
    lines: list[str] = []
    async with asking(Guard(raising(error), Bind(), key="", log=lines.append)) as client:
        answer = await client.get("/")
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    found = answer.json()["error"]
    assert (found["type"], found["message"]) == (kind, message)
    assert [line.startswith(f"GET /: 500 {kind}: ") for line in lines] == [True] * (status >= 500)


async def test_a_line_of_the_log_is_one_line_and_says_where() -> None:
    lines: list[str] = []

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("two\nlines \x1b[31m")

    app = Guard(fail, Bind(), key="", log=lines.append)
    async with asking(app) as client:
        await client.get("/a%0Ab")
    (line,) = lines
    assert line.isprintable() and line.startswith("GET /a b: 500 KeyError: ") and "test_guard.py:" in line


async def test_unknown_paths_and_methods_are_errors_in_json_too() -> None:
    async with asking(Guard(length_of_body(), Bind(), key="", log=print)) as client:
        unknown, wrong = [await client.get("/unknown"), await client.delete("/")]
    assert (unknown.status_code, wrong.status_code, wrong.headers["allow"]) == (404, 405, "POST")
    assert (b"allow", b"POST") in wrong.headers.raw  # in lower case, as a server wants it
    for answer in (unknown, wrong):
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_a_request_says_is_shown_as_valid_json() -> None:
    async def ask() -> httpx2.Response:
        async with asking(Guard(raising(RecordError("got \ud800")), Bind(), key="", log=print)) as client:
            return await client.get("/")

    assert json.loads(run(ask()).content)["error"]["message"] == "got \\ud800"


async def test_half_an_answer_does_not_look_like_a_whole_one() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"half"
        raise RecordError("no more")

    async def stream(request: Request) -> Response:
        return StreamingResponse(parts())

    app = Guard(Application([Route("/", stream)]), Bind(), key="", log=print)
    async with listening(app) as address, httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get(address)
    async with asking(app) as client:
        with pytest.raises(RecordError, match="no more"):  # for the log of the server
            await client.get("/")

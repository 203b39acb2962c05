"""Requests to a service on the web: what is sent again, what never is, and what no message shows."""

from __future__ import annotations

import asyncio

import pytest
from tests.tools.web_server import CUT, ENDLESS, HANG, Reply, serving
from tests.virtual_clock import NoWait

from silva.errors import CostLimit
from silva.ports import use_clock
from silva.tools.cache import Cache
from silva.tools.search import RetrievalServerBackend
from silva.tools.web import Call, ServiceFault, WebService

pytest.importorskip("httpx2", reason="needs httpx2: pip install 'silva[search]'")

KEY = "sk-very-secret-0123456789"


def ask(script, *, calls: int = 1, read=lambda answer: answer["x"], cache=None, body=None, **settings):
    """(answers or faults of the calls at once, bodies received, pauses)."""
    with serving(script) as server, use_clock(NoWait()) as clock:
        backend = RetrievalServerBackend(url=server.url + "/retrieve", **settings)
        service = WebService("retrieval_server", backend, cache or Cache(), KEY)
        call = Call("POST", backend.url, {"X-API-KEY": KEY}, {}, body or {"q": "nile"})

        async def run():
            service.enter()
            try:
                many = [service.ask(call, read) for _ in range(calls)]
                return await asyncio.gather(*many, return_exceptions=True)
            finally:
                await service.leave()

        found = asyncio.run(run())
        return found, server.requests, clock.slept


def test_an_answer() -> None:
    [found], [request], pauses = ask(lambda n, request: {"x": 1})
    assert (found, pauses) == (1, [])
    assert (request.method, request.path, request.body) == ("POST", "/retrieve", {"q": "nile"})
    assert request.headers["x-api-key"] == KEY


@pytest.mark.parametrize("first", [Reply(b"", 429), Reply(b"", 503), CUT,
                                   b"{", b"\xff", [], {"y": 1}, b"", b"[" * 100_000])  # fmt: skip
def test_what_may_pass_is_sent_again(first) -> None:
    [found], requests, pauses = ask(lambda n, request: first if n == 0 else {"x": 2})
    assert (found, len(requests)) == (2, 2)
    assert len(pauses) == 1 and 0.5 <= pauses[0] <= 1.0


def test_pauses_are_a_function_of_the_request() -> None:
    [fault, same], requests, pauses = ask(lambda n, r: Reply(b"down", 500), calls=2, retries=4)
    assert isinstance(fault, ServiceFault) and isinstance(fault, OSError)
    assert str(fault) == "retrieval_server: HTTP 500: down (after 5 tries)"
    assert str(same) == str(fault) and len(requests) == 10
    each = list(dict.fromkeys(pauses))
    assert len(each) == 4 and sorted(pauses) == sorted(each * 2)
    [_], _, others = ask(lambda n, r: Reply(b"down", 500), retries=4, body={"q": "rhine"})
    assert len(others) == 4 and not {*others} & {*pauses}


def test_the_limits_are_those_of_the_settings() -> None:
    [found], _, pauses = ask(lambda n, r: Reply(b"", 429, {"Retry-After": "7"}) if n == 0 else {"x": 3})
    assert (found, pauses) == (3, [7.0])
    [fault], requests, pauses = ask(lambda n, r: Reply(b"", 429, {"Retry-After": "61"}), max_wait=60.0)
    assert isinstance(fault, ServiceFault) and (len(requests), pauses) == (1, [])
    _, requests, pauses = ask(lambda n, r: {"x": 1}, calls=4, requests_per_minute=30, max_concurrent=1)
    assert len(requests) == 4 and pauses == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("status", "hint"),
    [(400, ""), (401, "Is the key right"), (402, "Is the key right"), (404, ""), (302, "")],
)
def test_what_will_not_pass_is_not_sent_again(status, hint) -> None:
    elsewhere = {"Location": "http://127.0.0.1:1/"}
    [fault], requests, _ = ask(lambda n, request: Reply(b"no", status, elsewhere))
    assert isinstance(fault, ServiceFault) and f"HTTP {status}: no" in str(fault) and hint in str(fault)
    assert len(requests) == 1


def test_no_message_shows_the_key() -> None:
    for reply in (
        Reply(f"bad key {KEY}".encode(), 401),
        f"not JSON {KEY}".encode(),
        Reply(KEY.encode(), 500),
    ):
        [fault], _, _ = ask(lambda n, request, reply=reply: reply, retries=0)
        assert KEY not in repr(fault) and "***" in str(fault)
        assert KEY not in str(fault.__cause__)


def test_an_answer_that_is_late_and_one_without_end() -> None:
    [fault], _, _ = ask(lambda n, request: HANG, retries=1, timeout=0.05)
    assert "no answer within timeout = 0.05 s (after 2 tries)" in str(fault)
    [fault], requests, _ = ask(lambda n, request: ENDLESS)
    assert "an answer of more than 8388608 bytes" in str(fault) and len(requests) == 1


def test_nobody_listens() -> None:
    with serving(lambda n, request: {}) as server:
        port = server.port

    async def run():
        service = WebService("s", RetrievalServerBackend(retries=0), Cache())
        service.enter()
        try:
            await service.ask(Call("GET", f"http://127.0.0.1:{port}/", {}, {}), lambda answer: answer)
        finally:
            await service.leave()

    with pytest.raises(ServiceFault, match=r"s: ConnectError: .* \(after 1 try\)"):
        asyncio.run(run())


def test_paid_requests_end_at_their_limit_also_for_the_next_run(tmp_path) -> None:
    found, requests, _ = ask(lambda n, r: {"x": 1}, calls=5, max_requests=3, cache=Cache(tmp_path / "c"))
    assert len(requests) == 3 and found.count(1) == 3
    limits = [fault for fault in found if fault != 1]
    assert all(isinstance(fault, CostLimit) for fault in limits)
    assert "max_requests = 3 requests have been sent. Raise it" in str(limits[0])
    found, requests, _ = ask(lambda n, r: {"x": 1}, max_requests=3, cache=Cache(tmp_path / "c"))
    assert isinstance(found[0], CostLimit) and requests == []
    [fault], requests, _ = ask(lambda n, request: Reply(b"", 500), max_requests=2)  # tries count
    assert isinstance(fault, CostLimit) and len(requests) == 2


def test_it_can_be_used_in_one_loop_after_another() -> None:
    with serving(lambda n, request: {"x": n}) as server:
        service = WebService("s", RetrievalServerBackend(url=server.url), Cache())

        async def run():
            service.enter()
            try:
                return await service.ask(Call("GET", server.url, {}, {}), lambda answer: answer["x"])
            finally:
                await service.leave()

        assert [asyncio.run(run()), asyncio.run(run())] == [0, 1]

"""Who gets a request and when a server counts as lost, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.virtual_clock import LoopClock, now

from silva import __version__
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.servers import CORE, UNEVEN, Router, Server
from silva.engines.remote.settings import LONGEST_PAUSE, ClientSettings, HttpEngineSettings
from silva.engines.remote.vllm import VllmDialect
from silva.engines.remote.wire import ServedResult, SilvaDialect
from silva.errors import ConfigError, EngineError, NoReply
from silva.ports import use_clock
from silva.storage.layout import Layout
from silva.types import Completion, SamplingParams, Snapshot, WeightFolder
from silva.wire.transport import Refused, Unreachable

CONTEXT: Any = SimpleNamespace(
    run_layout=Layout(Path("/run")),
    renderer=SimpleNamespace(vocabulary=256),
    say=print,
    config=SimpleNamespace(model=SimpleNamespace(lora=None), trainer=SimpleNamespace(transfer="auto")),
)
FACTS = {
    "context": 100, "entropies": True, "routes": False, "loads": ["folder"], "machine": {},
    "notes": [], "version": 0, "model": "m", "memory_per_token": 0, "weights": "start", "silva": __version__,
}  # fmt: skip
COMPLETION = {
    "choices": [{
        "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]},
        "silva": {"raw_logprobs": [-0.5], "entropies": [1.0], "versions": [0], "stop_reason": "length",
                  "cached_tokens": 0},
    }],
}  # fmt: skip


class FakePeer:
    """A server in this process. `script` gives an answer, an exception, or None for silence."""

    name = "inference"

    def __init__(self, address: str) -> None:
        self.address = address
        self.version, self.weights, self.times = 0, "start", list[tuple[str, float]]()
        self.counts: dict[str, float] = {}
        self.script: Callable[[str], Any] = self.good

    def good(self, path: str) -> Any:
        scores = {"logprobs": [-1.0], "likeliest": [3], "likeliest_logprobs": [-0.5], "version": self.version}
        weights = {"weights": [self.weights]}
        return {
            "/alive": {"version": self.version, "weights": self.weights, "pid": 1, "counts": self.counts},
            "/capabilities": FACTS, "/score": scores | weights,
            "/v1/completions": COMPLETION | weights, "/load": {"version": self.version},
        }[path]  # fmt: skip

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        return await self.post(path, None, timeout=timeout)

    async def post(self, path: str, body: Any, *, timeout: float | None = None) -> Any:
        path = path.partition("?")[0]
        self.times.append((path, now()))
        if path == "/load":
            self.version, self.weights = body["version"], body["folder"]["digest"]
        answer = self.script(path)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(1e9 if timeout is None else timeout)
            raise Unreachable(f"the inference at {self.address}: no answer to {path} within {timeout:g} s")
        return answer

    async def close(self) -> None:
        pass


@asynccontextmanager
async def client_of(
    count: int = 1, **settings: Any
) -> AsyncIterator[tuple[list[FakePeer], HttpEngine, list[str]]]:
    """Servers, an engine that is connected to them, and what it says."""
    said: list[str] = []
    peers: Any = [FakePeer(f"s{i}") for i in range(count)]
    engine = HttpEngine(
        peers,
        ClientSettings(**settings),
        SilvaDialect(),
        say=lambda words: said.append(f"{now():.3f}: {words}"),
    )
    await engine.connect()
    yield peers, engine, said
    await engine.close()


async def test_silence_is_noticed_within_a_check_and_its_time() -> None:
    async with client_of(2) as (peers, engine, said):
        peers[0].script = lambda path: None  # silent from time 0.0 on, right after its first check
        asked = asyncio.ensure_future(engine.sample([5], SamplingParams(1)))
        await asyncio.sleep(4.0 + 1e-6)
        assert said == ["4.000: inference at s0 does not answer (4.0 s): its requests go to others"]
        assert (await asked).tokens == (1,)
        assert [path for path, _ in peers[1].times].count("/v1/completions") == 1
        await asyncio.sleep(9.5)
        peers[0].script = peers[0].good
        await asyncio.sleep(5.0)
        assert said[1:] == ["16.000: inference at s0 is back after 12.0 s, with version 0"]


async def test_an_answer_that_this_process_slept_through_does_not_count_as_silence() -> None:
    """As after SIGSTOP and SIGCONT: every timer has run out, whatever the server has answered."""
    async with client_of() as (peers, _, said):

        def asleep(path: str) -> Any:
            clock.ahead += 100.0
            peers[0].script = peers[0].good
            return Unreachable("no answer to /alive within 3 s")

        with use_clock(LoopClock()) as clock:
            peers[0].script = asleep
            await asyncio.sleep(2.0)
            assert clock.ahead == 100.0 and said == []


async def test_what_differs_between_servers_is_told_of_all_and_memory_of_the_largest() -> None:
    async with client_of(2) as (peers, engine, _):
        second = peers[1]
        second.script = lambda path: Unreachable("gone")
        await asyncio.sleep(2.0)
        other = FACTS | {"memory_per_token": 5, "machine": {"device": "B"}, "notes": ["it is narrow"]}
        second.script = lambda path: other if path == "/capabilities" else second.good(path)
        await asyncio.sleep(2.0)
        assert engine.memory(2, 3) == 30 and engine.notes == ["it is narrow"]
        assert engine.machine == {"servers": [{}, {"device": "B"}]}


async def test_a_server_that_loads_weights_is_not_asked_whether_its_core_lives() -> None:
    async with client_of() as (peers, engine, _):
        cores: list[float] = []
        alive = engine._dialect.alive

        async def noted(peer: Any, patience: float, core: float) -> Any:
            cores.append(core)
            return await alive(peer, patience, core)

        engine._dialect.alive = noted  # type: ignore[method-assign]
        await asyncio.sleep(4.0)
        before = len(cores)
        peers[0].script = lambda path: None if path == "/load" else peers[0].good(path)  # it takes long
        loading = asyncio.ensure_future(engine.load(Snapshot(0, WeightFolder("/weights", "start"))))
        await asyncio.sleep(10.0)
        assert before and set(cores[:before]) == {CORE * ClientSettings().dead_after}
        assert len(cores) > before + 1 and set(cores[before + 1 :]) == {0.0}
        loading.cancel()


async def test_patience_ends_in_an_error() -> None:
    async with client_of() as (peers, engine, said):
        peers[0].script = lambda path: Unreachable("the inference at s0: refused")
        with pytest.raises(EngineError, match=r"no inference server for 300 s.*the inference at s0: refused"):
            await engine.sample([5], SamplingParams(1))
        assert now() == pytest.approx(300.0, abs=1.0)
        assert said[0].endswith("does not answer (0.0 s): requests wait until it is back")


async def test_a_server_that_cannot_join_is_tried_less_and_less_often() -> None:
    async with client_of(2) as (peers, engine, _):
        second = peers[1]
        second.script = lambda path: Unreachable("gone")
        await asyncio.sleep(2.0)
        second.script = lambda path: Unreachable("no") if path == "/load" else second.good(path)
        await engine.load(Snapshot(1, WeightFolder("/w", "d")))
        await asyncio.sleep(20.0)
        loads = [at for path, at in second.times if path == "/load"]
        assert [b - a for a, b in pairwise(loads)] == pytest.approx([1.0, 2.0, 4.0, 8.0])


async def test_a_server_that_has_enough_to_do_is_asked_again_until_it_has_less() -> None:
    async with client_of(retries=2) as (peers, engine, said):
        peer = peers[0]
        full = lambda path: Refused("HTTP 429", 429) if path == "/v1/completions" else peer.good(path)  # noqa: E731
        peer.script = full
        asked = asyncio.ensure_future(engine.sample([5], SamplingParams(1)))
        await asyncio.sleep(600.0)
        times = [at for path, at in peer.times if path == "/v1/completions"]
        assert len(times) > 60 and max(b - a for a, b in pairwise(times)) <= LONGEST_PAUSE
        assert not asked.done() and said == []
        peer.script = peer.good
        assert (await asked).tokens == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("computes", [True, False])
async def test_a_request_may_take_long_as_long_as_its_server_computes(computes) -> None:
    async with client_of(retries=1) as (peers, engine, _):
        peer, began = peers[0], now()

        def busy(path: str) -> Any:
            if path == "/v1/completions":
                return None
            peer.counts = {"steps": now()} if computes else {}
            return peer.good(path)

        peer.script = busy
        asked = asyncio.ensure_future(engine.sample([5], SamplingParams(1)))
        if computes:
            await asyncio.sleep(2_000.0)
            assert not asked.done()
            asked.cancel()
        else:
            with pytest.raises(NoReply, match=r"nothing computed there for 600 s \(engine\.timeout\)"):
                await asked
            assert now() - began == pytest.approx(1200.0, abs=2.0)  # it was tried twice


async def test_no_more_requests_are_under_way_than_there_may_be_connections(monkeypatch) -> None:
    monkeypatch.setattr("silva.engines.remote.servers.open_files", lambda: 64)
    async with client_of(2) as (_, engine, _):
        under_way = most = 0

        async def slow(*args: Any) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1.0)
            under_way -= 1
            return ServedResult(Completion((1,), (0.0,), (0.0,), (0.0,), (0,), "length"), ("start",))

        engine._dialect.sample = slow  # type: ignore[method-assign]
        found = await asyncio.gather(*(engine.sample([5], SamplingParams(1)) for _ in range(1000)))
        assert (len(found), most) == (1000, 32)


async def test_a_check_that_fails_for_whatever_reason_is_told_and_made_again() -> None:
    async with client_of() as (peers, _, said):
        peers[0].script = lambda path: OverflowError("port must be 0-65535")
        await asyncio.sleep(5.0)
        assert "is out (port must be 0-65535)" in said[0]
        peers[0].script = peers[0].good
        await asyncio.sleep(5.0)
        assert "is back" in said[1]


def servers(*running: int) -> list[Server]:
    found = [Server(number, FakePeer(f"s{number}")) for number in range(len(running))]  # type: ignore[arg-type]
    for server, count in zip(found, running, strict=True):
        server.running = count
    return found


def test_the_least_loaded_server_gets_what_is_new() -> None:
    some = servers(3, 1, 2)
    assert Router().choose(some, [1], "").number == 1


def test_a_session_stays_and_a_prefix_stays_while_its_server_is_not_much_busier() -> None:
    router, some = Router(), servers(0, 0)
    long = list(range(300))
    assert router.choose(some, long, "a").number == 0
    some[0].running = UNEVEN
    assert router.choose(some, [*long, 1], "").number == 0
    some[0].running = UNEVEN + 1
    assert router.choose(some, [*long, 1], "").number == 1  # which has the prefix from now on
    some[0].running = 0
    some[1].running = 5
    assert router.choose(some, [*long, 1], "").number == 1
    assert router.choose(some, [1], "a").number == 0
    some[0].running = 1000
    assert router.choose(some, [1], "a").number == 0


def test_what_a_lost_server_had_is_forgotten() -> None:
    router, some = Router(), servers(0, 9)
    router.choose(some, list(range(64)), "a")
    assert router.choose(some[1:], [1], "a").number == 1  # the first one is out
    router.forget(some[1])
    some[0].running = 99
    assert router.choose(some, list(range(64)), "").number == 1  # the least loaded
    assert router.choose(some, [1], "a").number == 1


def test_settings_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    good = HttpEngineSettings(urls=("http://127.0.0.1:8000/", "unix:a/b.sock"))
    assert good.urls == ("http://127.0.0.1:8000", "unix:a/b.sock")
    for urls, words in [
        ((), "at least 1 item"),
        (("ftp://x",), "urls.0\n.*expected http://HOST:PORT, https://HOST or unix:PATH"),
        (("http://x", "http://x/"), "'http://x' is listed twice"),
        (("http://x:many",), "expected a port from 0 to 65535"),
    ]:
        with pytest.raises(ValidationError, match=words):
            HttpEngineSettings(urls=urls)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.key_variable: NO_SUCH_KEY is not set"):
        HttpEngineSettings(urls=("http://x",), key_variable="NO_SUCH_KEY").build(CONTEXT)
    for dialect, kind in (("silva", SilvaDialect), ("vllm", VllmDialect)):
        engine: Any = HttpEngineSettings(urls=("http://x",), dialect=dialect).build(CONTEXT)
        assert type(engine._dialect) is kind


async def test_a_server_of_another_version_of_silva_is_refused() -> None:
    async with client_of(2) as (peers, _, said):
        second = peers[1]
        second.script = lambda path: Unreachable("gone")
        await asyncio.sleep(2.0)
        newer = FACTS | {"silva": "9.9.9"}
        second.script = lambda path: newer if path == "/capabilities" else second.good(path)
        await asyncio.sleep(2.0)
        assert f"is of Silva 9.9.9, this is {__version__}: install the same version" in said[-1]
        assert "cannot be used" in said[-1]

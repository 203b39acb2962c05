"""The client of inference servers, against scripted servers on Unix sockets."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from tests.engines.http_park import Park, Slow, counting, until
from tests.engines.inference_server import CUT, HANG
from tests.moe import folder
from tests.virtual_clock import InLine

from silva.config.sections import PretrainedModel
from silva.engines.local.engine import LocalEngine
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import SilvaDialect
from silva.engines.settings import LocalEngineSettings
from silva.errors import ContextOverflow, EngineError, NoReply, OutOfMemory
from silva.models.loading import LoadedModel, load_model
from silva.protocols import EngineCapabilities
from silva.server.completions import exact
from silva.types import SamplingParams
from silva.wire.transport import Peer

PROMPT = list(range(40, 60))


@pytest.fixture
def local(tiny_model: LoadedModel) -> LocalEngine:
    return LocalEngine(tiny_model, LocalEngineSettings(context=64), InLine())


async def test_it_is_what_the_engine_behind_it_is(local, tmp_path) -> None:
    async with Park(tmp_path, [local]) as park:
        assert park.engine.memory(3, 7) == pytest.approx(local.memory(1, 1) * 21)
        assert park.engine.machine == local.machine and park.engine.notes == list(local.notes)
        assert park.engine.capabilities == EngineCapabilities(
            context=local.capabilities.context, loads=local.capabilities.loads - {"shared"}
        )


async def test_the_context_is_the_smaller_one_and_limits_the_answer(tmp_path) -> None:
    async with Park(tmp_path, [counting()], context=24) as park:
        found = await park.engine.sample(PROMPT, SamplingParams(9))
        assert (len(found.tokens), found.stop_reason) == (4, "context_overflow")
        assert (await park.engine.sample(PROMPT, SamplingParams(4))).stop_reason == "length"


def test_before_it_is_connected_nobody_knows_what_the_servers_can_do(tmp_path) -> None:
    peers = [Peer(f"unix:{tmp_path}/s", name="inference")]
    engine = HttpEngine(peers, ClientSettings(), SilvaDialect())
    for name in ("capabilities", "machine", "notes"):
        with pytest.raises(EngineError, match=f"{name}: got a question before `connect`"):
            getattr(engine, name)


async def test_turns_of_a_session_and_shared_prompts_go_where_the_prefix_is(tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting(), counting()]) as park:
        await asyncio.gather(*(park.ask([i], session=f"s{i}") for i in range(6)))
        assert park.sent() == [2, 2, 2]
        for turn in range(3):
            await park.ask([1, turn], session="s1")
        assert park.sent() == [2, 5, 2]
        long = list(range(200))
        await park.ask(*[long] * 4)  # no session: samples of one prompt stay together
        assert sorted(park.sent()) == [2, 5, 6]
        await park.ask([*long, *range(40)])  # 128 of 240 tokens are known there
        assert sorted(park.sent()) == [2, 5, 7]
        await park.ask([*long[:64], *range(500, 700)])  # 64 of 264 are not worth it
        assert sorted(park.sent()) == [3, 5, 7]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [CUT, (500, "EngineError"), (503, ""), (429, "")], ids=str)
async def test_what_may_pass_is_sent_again_to_another_server_first(fault, tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting()]) as park:
        first = park.servers[0]
        first.fault = lambda path, body: fault if path == "/v1/completions" else None
        assert await park.ask([7], session="s") == [(8, 9, 10)]  # whose server is the first one
        assert park.sent() == [1, 1]
        bodies = [server.called("/v1/completions")[0] for server in park.servers]
        assert bodies[0] == bodies[1]


async def test_with_one_server_the_same_request_is_tried_there_again(tmp_path) -> None:
    async with Park(tmp_path, [counting()]) as park:
        server = park.servers[0]
        server.fault = lambda path, body: CUT if path != "/alive" and park.sent() == [1] else None
        assert await park.ask([7]) == [(8, 9, 10)]
        assert park.sent() == [2] and park.said == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "sent"),
    [
        ((400, "ContextOverflow"), ContextOverflow, 1),
        ((401, ""), EngineError, 1),
        ((422, "invalid_request_error"), EngineError, 1),
        ((500, "EngineError"), NoReply, 2),
        ((500, "OutOfMemory"), OutOfMemory, 2),
    ],
    ids=str,
)
async def test_what_is_raised_says_what_the_server_said(fault, kind, sent, tmp_path) -> None:
    async with Park(tmp_path, [counting()], retries=1) as park:
        park.servers[0].fault = lambda path, body: fault if path == "/v1/completions" else None
        tries = r" \(after 2 tries\)" if sent == 2 else ""
        with pytest.raises(kind, match=f"HTTP {fault[0]}: as planned{tries}") as caught:
            await park.ask([7])
        assert type(caught.value) is kind
        assert park.sent() == [sent]


async def test_cancelling_a_request_ends_it_on_the_server(tmp_path) -> None:
    slow = Slow()
    async with Park(tmp_path, [slow]) as park:
        asked = asyncio.ensure_future(park.ask([1]))
        await until(lambda: park.sent() == [1])
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled()
        await until(lambda: park.servers[0].cancelled == 1)
        assert slow.requests == []
        slow.go.set()
        assert await park.ask([2]) == [(1,)]  # the engine is as it was


async def test_a_server_that_hangs_is_taken_out_and_its_requests_go_to_another(tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting()]) as park:
        first = park.servers[0]
        first.fault = lambda path, body: HANG
        asked = asyncio.ensure_future(park.ask([7], [17]))
        assert await asked == [(8, 9, 10), (18, 19, 20)]
        assert park.sent() == [1, 2]
        assert len(park.said) == 1
        assert park.said[0].startswith(f"inference at {first.address} does not answer (0.")
        assert park.said[0].endswith("s): its requests go to others")
        first.fault = lambda path, body: None
        await until(lambda: len(park.said) == 2)
        assert f"{first.address} is back after" in park.said[1]
        await park.ask([1], [2])
        assert park.sent() == [2, 3]


async def test_without_any_server_it_says_what_each_of_them_said_last(tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting()], patience=0.3) as park:
        await park.servers[0].stop()
        park.servers[1].fault = lambda path, body: HANG
        await until(lambda: len(park.said) == 2)
        with pytest.raises(EngineError, match=r"no inference server for 0\.3 s") as caught:
            await park.ask([1])
        for server, words in zip(park.servers, ("ConnectError", "no answer to /alive"), strict=True):
            assert server.address in str(caught.value) and words in str(caught.value)


async def test_a_wrong_key_ends_it_at_once(tmp_path) -> None:
    park = Park(tmp_path, [counting()], patience=1000.0)
    park.servers[0].fault = lambda path, body: (401, "")
    await park.servers[0].start()
    with pytest.raises(EngineError, match=r"no inference server can be used.*HTTP 401: as planned"):
        await park.engine.connect()
    await park.__aexit__()


async def test_servers_that_start_later_are_waited_for(tmp_path) -> None:
    park = Park(tmp_path, [counting(), counting()])
    connecting = asyncio.ensure_future(park.engine.connect())
    await until(lambda: "ConnectError" in park.engine._servers.all[1].words)
    await park.servers[0].start()
    await connecting
    assert await park.ask([7]) == [(8, 9, 10)]
    await park.servers[1].start()
    await until(lambda: len(park.engine._servers.live) == 2)
    await park.ask([1], [2])
    assert park.sent() == [2, 1]
    assert park.said == ["waiting for an inference server, 10 s at most"]
    await park.__aexit__()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 16}, "context of 16, expected at least"),
        ({"routes": False}, "does not record which experts tokens go to, as the others do"),
    ],
)
async def test_one_that_joins_later_must_keep_what_was_promised(tmp_path, changes, words) -> None:
    first, other = counting(), counting()
    first.capabilities = dataclasses.replace(first.capabilities, routes=True)
    other.capabilities = dataclasses.replace(first.capabilities, **changes)
    park = Park(tmp_path, [first, other])
    await park.servers[0].start()
    await park.engine.connect()
    await park.servers[1].start()
    await until(lambda: words in park.engine._servers.all[1].words)
    assert len(park.engine._servers.live) == 1
    await park.__aexit__()


async def test_sleep_goes_to_every_server(tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting()]) as park:
        await park.engine.sleep()
        assert [len(server.called("/sleep")) for server in park.servers] == [1, 1]


async def test_nothing_is_left_running_after_close(tmp_path) -> None:
    async with Park(tmp_path, [counting()]) as park:
        await park.ask([1])
    await until(lambda: len(asyncio.all_tasks()) <= 2)
    assert len(asyncio.all_tasks()) <= 2  # this one, and the one that limits its time


async def test_experts_cross_as_the_engine_recorded_them(tmp_path) -> None:
    model = load_model(PretrainedModel(name=str(folder(tmp_path / "m"))), seed=0)
    local = LocalEngine(model, LocalEngineSettings(), InLine(), routes=True)
    expected = await local.sample(PROMPT, SamplingParams(6))
    async with Park(tmp_path, [local]) as park:
        assert park.engine.capabilities.routes
        found = await park.engine.sample(PROMPT, SamplingParams(6))
        assert found.tokens == expected.tokens and found.routes.shape == (6, 2, 2)
        for name in ("routes", "prompt_routes"):
            got, was = getattr(found, name), getattr(expected, name)
            assert got.dtype == was.dtype and np.array_equal(got, was)
        plain = LocalEngine(model, LocalEngineSettings(), InLine())
        assert "routes" not in exact(await plain.sample(PROMPT, SamplingParams(1)))["silva"]

"""The client of inference servers, against scripted servers on Unix sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.engines.inference_server import CUT, HANG, InferenceServer

from silva.engines.http import PROBE, HttpEngine, http_engine
from silva.engines.http_settings import ClientSettings, HttpEngineSettings
from silva.engines.http_wire import SilvaDialect
from silva.engines.local.engine import LocalEngine
from silva.engines.scripted import ScriptedEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import CapabilityError, ContextOverflow, EngineError, ModelError, NoReply, OutOfMemory
from silva.models.loading import LoadedModel
from silva.protocols import EngineCapabilities
from silva.transport import Peer
from silva.types import SamplingParams, Snapshot, TokenScores, WeightFolder

T = TypeVar("T")
PROMPT = list(range(40, 60))
FAST = {"check_every": 0.02, "dead_after": 0.3, "patience": 10.0, "timeout": 10.0, "retries": 3}
SOON = 30.0  # seconds within which a test ends, or fails


def counting() -> ScriptedEngine:
    """Counts on from the last token."""
    return ScriptedEngine(lambda tokens, params: [tokens[-1] + 1 + i for i in range(params.max_tokens)])


class Slow(ScriptedEngine):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, params: [1])
        self.go = asyncio.Event()

    async def sample(self, tokens: Any, params: Any, *, session: str = "") -> Any:
        await self.go.wait()
        return await super().sample(tokens, params, session=session)


class Park:
    """Servers and a client of them in one event loop."""

    def __init__(self, folder: Path, engines: list[Any], **settings: Any) -> None:
        self.servers = [InferenceServer(engine, folder / f"{i}.sock") for i, engine in enumerate(engines)]
        peers = [Peer(server.address, name="inference", key="k") for server in self.servers]
        self.said: list[str] = []
        self.engine = HttpEngine(
            peers, ClientSettings(**FAST | settings), SilvaDialect(), say=self.said.append
        )

    async def __aenter__(self) -> Park:
        for server in self.servers:
            await server.start()
        await self.engine.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        for server in self.servers:
            await server.stop()

    async def ask(self, *prompts: list[int], session: str = "", **params: Any) -> list[tuple[int, ...]]:
        asked = (
            self.engine.sample(prompt, SamplingParams(**{"max_tokens": 3} | params), session=session)
            for prompt in prompts
        )
        return [found.tokens for found in await asyncio.gather(*asked)]

    def sent(self) -> list[int]:
        return [len(server.called("/v1/completions")) for server in self.servers]


def weights(version: int) -> Snapshot:
    return Snapshot(version, WeightFolder("/weights", "digest"))


def run(work: Awaitable[T]) -> T:
    async def timed() -> T:
        return await asyncio.wait_for(work, SOON)

    return asyncio.run(timed())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
def local(tiny_model: LoadedModel) -> Iterator[LocalEngine]:
    with ThreadPoolExecutor(1) as compute:
        yield LocalEngine(tiny_model, LocalEngineSettings(context=64), compute)


def test_answers_are_those_of_the_engine_behind_it_to_the_last_bit(local, tmp_path) -> None:
    params = SamplingParams(8, temperature=0.7, top_p=0.9, seed=(1 << 63) - 5, stop_token_ids=(3, 4))

    async def work() -> None:
        async with Park(tmp_path, [local]) as park:
            expected = await local.sample(PROMPT, params)
            found = await park.engine.sample(PROMPT, params)
            assert found == expected.__class__(
                *(getattr(expected, name) for name in expected.__slots__[:-1]), found.cached_tokens
            )
            assert found.cached_tokens > 0  # the same prompt again
            assert await park.engine.score(PROMPT, 5) == await local.score(PROMPT, 5)
            assert park.engine.memory(3, 7) == pytest.approx(local.memory(1, 1) * 21)
            assert park.engine.machine == local.machine and park.engine.notes == list(local.notes)
            assert park.engine.capabilities == EngineCapabilities(
                context=local.capabilities.context, loads=local.capabilities.loads - {"shared"}
            )

    run(work())


def test_the_context_is_the_smaller_one_and_limits_the_answer(local, tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [local], context=24) as park:
            found = await park.engine.sample(PROMPT, SamplingParams(9))
            assert (len(found.tokens), found.stop_reason) == (4, "context_overflow")
            assert (await park.engine.sample(PROMPT, SamplingParams(4))).stop_reason == "length"
            with pytest.raises(
                ContextOverflow, match="prompt of 24 tokens leaves no room in a context of 24"
            ):
                await park.engine.sample(list(range(24)), SamplingParams(1))
            assert park.sent() == [2]

    run(work())


def test_before_it_is_connected_nobody_knows_what_the_servers_can_do(tmp_path) -> None:
    engine = http_engine(HttpEngineSettings(urls=(f"unix:{tmp_path}/s",)))
    for name in ("capabilities", "machine", "notes"):
        with pytest.raises(EngineError, match=f"{name}: got a question before `connect`"):
            getattr(engine, name)


def test_turns_of_a_session_and_shared_prompts_go_where_the_prefix_is(tmp_path) -> None:
    async def work() -> None:
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

    run(work())


@pytest.mark.parametrize("fault", [CUT, (500, "EngineError"), (503, ""), (429, "")], ids=str)
def test_what_may_pass_is_sent_again_to_another_server_first(fault, tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            first = park.servers[0]
            first.fault = lambda path, body: fault if path == "/v1/completions" else None
            assert await park.ask([7]) == [(8, 9, 10)]
            assert park.sent() == [1, 1]
            bodies = [server.called("/v1/completions")[0] for server in park.servers]
            assert bodies[0] == bodies[1]

    run(work())


def test_with_one_server_the_same_request_is_tried_there_again(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting()]) as park:
            server = park.servers[0]
            server.fault = lambda path, body: CUT if path != "/alive" and park.sent() == [1] else None
            assert await park.ask([7]) == [(8, 9, 10)]
            assert park.sent() == [2] and park.said == []

    run(work())


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
def test_what_is_raised_says_what_the_server_said(fault, kind, sent, tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting()], retries=1) as park:
            park.servers[0].fault = lambda path, body: fault if path == "/v1/completions" else None
            tries = r" \(after 2 tries\)" if sent == 2 else ""
            with pytest.raises(kind, match=f"HTTP {fault[0]}: as planned{tries}") as caught:
                await park.ask([7])
            assert type(caught.value) is kind
            assert park.sent() == [sent]

    run(work())


def test_cancelling_a_request_ends_it_on_the_server(tmp_path) -> None:
    async def work() -> None:
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

    run(work())


def test_a_server_that_hangs_is_taken_out_and_its_requests_go_to_another(tmp_path) -> None:
    async def work() -> None:
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

    run(work())


def test_requests_wait_for_the_only_server_until_it_is_back_with_the_weights(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [Slow()]) as park:
            server = park.servers[0]
            await park.engine.load(weights(4))
            asked = asyncio.ensure_future(park.engine.sample([7], SamplingParams(3)))
            await until(lambda: park.sent() == [1])
            await server.stop()
            await until(lambda: park.said)
            assert "requests wait until it is back" in park.said[0]
            server.calls.clear()
            await server.restart(counting())
            found = await asked
            assert (found.tokens, found.versions) == ((8, 9, 10), (4, 4, 4))
            assert [path for path, _ in server.calls] == [
                "/capabilities",
                "/load",
                "/score",
                "/v1/completions",
            ]
            assert "is back after" in park.said[1] and park.said[1].endswith("with version 4")

    run(work())


def test_a_restart_that_no_check_saw_is_noticed_by_its_process(tmp_path) -> None:
    """The version alone does not tell: another process may hold version 0 too, with other weights."""

    async def work() -> None:
        async with Park(tmp_path, [counting()]) as park:
            server = park.servers[0]
            await park.engine.load(Snapshot(0, WeightFolder(str(tmp_path), "d")))
            server.calls.clear()
            server.process += 1
            await until(lambda: len(park.said) == 2)
            assert "was started again" in park.said[0] and "is back" in park.said[1]
            assert server.called("/load") == [
                {"version": 0, "folder": {"path": str(tmp_path), "digest": "d"}}
            ]

    run(work())


def test_an_answer_from_older_weights_is_asked_for_again(tmp_path) -> None:
    """The server was started again since the last check, which comes once a minute here."""

    async def work() -> None:
        async with Park(tmp_path, [counting()], check_every=60.0) as park:
            server = park.servers[0]
            await park.engine.load(weights(3))
            await server.stop()
            await server.restart(counting())
            assert (await park.engine.sample([1], SamplingParams(1))).versions == (3,)
            assert (await park.engine.score([1, 2], 1)).version == 3
            assert park.sent() == [2]

    run(work())


def test_another_version_than_was_loaded_is_put_right_before_the_next_request(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting()]) as park:
            await park.engine.load(weights(3))
            park.servers[0].engine.version = 9  # somebody else has loaded
            await until(lambda: len(park.said) == 2)
            assert "holds version 9, expected 3" in park.said[0]
            assert (await park.engine.sample([1], SamplingParams(1))).versions == (3,)

    run(work())


def test_a_load_reaches_every_server_also_the_one_that_was_out(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            await park.servers[1].stop()
            await until(lambda: park.said)
            await park.engine.load(weights(5))
            assert park.engine.version == 5
            assert [server.engine.version for server in park.servers] == [5, 0]
            await park.servers[1].restart(counting())
            await until(lambda: len(park.said) == 2)
            assert park.servers[1].engine.version == 5

    run(work())


def test_a_server_that_dies_while_it_loads_is_left_behind(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            hung = park.servers[1]
            hung.fault = lambda path, body: HANG if path == "/load" else None
            loading = asyncio.ensure_future(park.engine.load(weights(2)))
            await until(lambda: hung.called("/load"))
            assert not loading.done() and park.engine.version == 0
            hung.fault = lambda path, body: HANG
            await loading
            assert park.engine.version == 2 and len(park.said) == 1
            assert (await park.engine.sample([1], SamplingParams(1))).versions == (2,)

    run(work())


def test_a_slow_load_keeps_nobody_waiting_and_loses_nobody(tmp_path) -> None:
    class SlowLoad(ScriptedEngine):
        async def load(self, snapshot: Snapshot) -> None:
            await release.wait()
            await super().load(snapshot)

    async def work() -> None:
        nonlocal release
        release = asyncio.Event()
        async with Park(tmp_path, [SlowLoad(lambda tokens, params: [1])]) as park:
            loading = asyncio.ensure_future(park.engine.load(weights(1)))
            await until(lambda: park.servers[0].called("/load"))
            assert await park.ask([7]) == [(1,)]
            for _ in range(5):  # checks that fall into the load
                checked = park.engine._servers.all[0].heard
                await until(lambda: park.engine._servers.all[0].heard > checked)  # noqa: B023
            release.set()
            await loading
            assert park.said == [] and park.engine.version == 1

    release = asyncio.Event()
    run(work())


class Stuck(ScriptedEngine):
    """Says that it has loaded, and computes as before."""

    def __init__(self, version: int | None = None, shift: float = 0.0) -> None:
        super().__init__(lambda tokens, params: [1])
        self._computes_with, self._shift = version, shift

    async def score(self, tokens: Any, start: int) -> TokenScores:
        found = await super().score(tokens, start)
        version = found.version if self._computes_with is None else self._computes_with
        shifted = (found.logprobs[0] - self._shift, *found.logprobs[1:])
        return TokenScores(shifted, found.likeliest, found.likeliest_logprobs, version)


def test_a_stale_engine_is_an_error(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), Stuck(version=0)]) as park:
            with pytest.raises(EngineError, match="computes with version 0 after version 1 was loaded"):
                await park.engine.load(weights(1))

    run(work())


@pytest.mark.parametrize(("shift", "fits"), [(0.0009, True), (0.0011, False), (math.nan, False)])
def test_servers_must_agree_on_the_probe(shift, fits, tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), Stuck(shift=shift)]) as park:
            if fits:
                await park.engine.load(weights(1))
                assert (await park.engine.probe()).logprobs[1:] == (0.0,) * 30
                assert park.servers[0].called("/score")[0] == {"tokens": list(PROBE), "start": 1}
            else:
                with pytest.raises(EngineError, match="holds other weights than the other servers"):
                    await park.engine.load(weights(1))

    run(work())


def test_a_server_with_other_numbers_does_not_come_back(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            await park.engine.load(weights(1))
            second = park.servers[1]
            await second.stop()
            await until(lambda: park.said)
            second.calls.clear()
            await second.restart(Stuck(shift=0.5))
            await until(lambda: second.called("/score"))
            await until(lambda: len(park.said) == 2)
            assert "cannot be used" in park.said[1] and "other weights" in park.said[1]
            await park.ask([1], [2])
            assert second.called("/v1/completions") == []

    run(work())


def test_after_weights_that_are_refused_servers_have_those_before(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            await park.engine.load(weights(1))
            second = park.servers[1]
            second.fault = lambda path, body: (409, "ModelError") if body.get("version") == 2 else None
            with pytest.raises(ModelError, match="as planned"):
                await park.engine.load(weights(2))
            assert park.engine.version == 1
            await until(lambda: len(park.said) == 2)  # the first one was out for a moment
            assert [server.engine.version for server in park.servers] == [1, 1]
            assert await park.ask([1], [2]) == [(2, 3, 4), (3, 4, 5)]
            assert park.sent() == [1, 1]

    run(work())


def test_what_other_processes_cannot_read_is_refused(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting()]) as park:
            with pytest.raises(CapabilityError, match="a snapshot without a folder"):
                await park.engine.load(Snapshot(1))
            assert park.servers[0].called("/load") == []

    run(work())


def test_without_any_server_it_says_what_each_of_them_said_last(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()], patience=0.3) as park:
            await park.servers[0].stop()
            park.servers[1].fault = lambda path, body: HANG
            await until(lambda: len(park.said) == 2)
            with pytest.raises(EngineError, match=r"no inference server for 0\.3 s") as caught:
                await park.ask([1])
            for server, words in zip(park.servers, ("ConnectError", "no answer to /alive"), strict=True):
                assert server.address in str(caught.value) and words in str(caught.value)

    run(work())


def test_a_wrong_key_ends_it_at_once(tmp_path) -> None:
    async def work() -> None:
        park = Park(tmp_path, [counting()], patience=1000.0)
        park.servers[0].fault = lambda path, body: (401, "")
        await park.servers[0].start()
        with pytest.raises(EngineError, match=r"no inference server can be used.*HTTP 401: as planned"):
            await park.engine.connect()
        await park.__aexit__()

    run(work())


def test_servers_that_start_later_are_waited_for(tmp_path) -> None:
    async def work() -> None:
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

    run(work())


def test_one_that_joins_later_must_keep_what_was_promised(tmp_path) -> None:
    async def work() -> None:
        small = counting()
        small.capabilities = EngineCapabilities(context=16)
        park = Park(tmp_path, [counting(), small])
        await park.servers[0].start()
        await park.engine.connect()
        await park.servers[1].start()
        await until(lambda: "context of 16, expected at least" in park.engine._servers.all[1].words)
        assert len(park.engine._servers.live) == 1
        await park.__aexit__()

    run(work())


def test_sleep_goes_to_every_server(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting(), counting()]) as park:
            await park.engine.sleep()
            assert [len(server.called("/sleep")) for server in park.servers] == [1, 1]

    run(work())


def test_nothing_is_left_running_after_close(tmp_path) -> None:
    async def work() -> None:
        async with Park(tmp_path, [counting()]) as park:
            await park.ask([1])
        await until(lambda: len(asyncio.all_tasks()) <= 2)
        assert len(asyncio.all_tasks()) <= 2  # this one, and the one that limits its time

    run(work())

"""The weights of inference servers, as their client sees to them: loads, restarts, versions, the probe."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tests.engines.http_park import Park, Slow, counting, run, until
from tests.engines.inference_server import HANG, InferenceServer

from silva.engines.remote.weights import PROBE
from silva.errors import CapabilityError, EngineError, ModelError
from silva.types import SamplingParams, Snapshot, TokenScores, WeightFolder


def weights(version: int) -> Snapshot:
    return Snapshot(version, WeightFolder("/weights", "digest"))


async def test_requests_wait_for_the_only_server_until_it_is_back_with_the_weights(tmp_path) -> None:
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


async def test_a_restart_that_no_check_saw_is_noticed_by_its_process(tmp_path) -> None:
    """The version alone does not tell: another process may hold version 0 too, with other weights."""
    async with Park(tmp_path, [counting()]) as park:
        server = park.servers[0]
        await park.engine.load(Snapshot(0, WeightFolder(str(tmp_path), "d")))
        server.calls.clear()
        server.process += 1
        await until(lambda: len(park.said) == 2)
        assert "was started again" in park.said[0] and "is back" in park.said[1]
        (load,) = server.called("/load")
        assert load["version"] == 0 and load["folder"] == {"path": str(tmp_path), "digest": "d"}


async def test_an_answer_from_older_weights_is_asked_for_again(tmp_path) -> None:
    """The server was started again since the last check, which comes once a minute here."""
    async with Park(tmp_path, [counting()], check_every=60.0) as park:
        server = park.servers[0]
        await park.engine.load(weights(3))
        await server.stop()
        await server.restart(counting())
        assert (await park.engine.sample([1], SamplingParams(1))).versions == (3,)
        assert (await park.engine.score([1, 2], 1)).version == 3
        assert park.sent() == [2]


def other_version(server: InferenceServer) -> None:
    server.engine.version = 9


def other_weights(server: InferenceServer) -> None:
    server.held.append("somebody else's")


@pytest.mark.parametrize(
    ("changed", "said"),
    [(other_version, "holds version 9, expected 3"), (other_weights, "holds other weights as version 3")],
)
async def test_a_check_notices_what_somebody_else_has_loaded(tmp_path, changed, said) -> None:
    """It is put right before the next request."""
    async with Park(tmp_path, [counting()]) as park:
        await park.engine.load(weights(3))
        changed(park.servers[0])
        await until(lambda: len(park.said) == 2)
        assert said in park.said[0]
        assert park.servers[0].held[-1] == "digest"
        assert (await park.engine.sample([1], SamplingParams(1))).versions == (3,)


async def test_a_load_reaches_every_server_also_the_one_that_was_out(tmp_path) -> None:
    async with Park(tmp_path, [counting(), counting()]) as park:
        await park.servers[1].stop()
        await until(lambda: park.said)
        await park.engine.load(weights(5))
        assert park.engine.version == 5
        assert [server.engine.version for server in park.servers] == [5, 0]
        await park.servers[1].restart(counting())
        await until(lambda: len(park.said) == 2)
        assert park.servers[1].engine.version == 5


async def test_a_server_that_dies_while_it_loads_is_left_behind(tmp_path) -> None:
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


async def test_a_stale_engine_is_an_error(tmp_path) -> None:
    async with Park(tmp_path, [counting(), Stuck(version=0)]) as park:
        with pytest.raises(EngineError, match="computes with version 0 after version 1 was loaded"):
            await park.engine.load(weights(1))


@pytest.mark.parametrize(("shift", "fits"), [(0.0009, True), (0.0011, False), (math.nan, False)])
async def test_servers_must_agree_on_the_probe(shift, fits, tmp_path) -> None:
    async with Park(tmp_path, [counting(), Stuck(shift=shift)]) as park:
        if fits:
            await park.engine.load(weights(1))
            assert (await park.engine.score(PROBE, 1)).logprobs[1:] == (0.0,) * 30
            assert park.servers[0].called("/score")[0] == {"tokens": list(PROBE), "start": 1}
        else:
            with pytest.raises(EngineError, match="holds other weights than the other servers"):
                await park.engine.load(weights(1))


async def test_a_server_with_other_numbers_does_not_come_back(tmp_path) -> None:
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


async def test_after_weights_that_are_refused_servers_have_those_before(tmp_path) -> None:
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


async def test_what_other_processes_cannot_read_is_refused(tmp_path) -> None:
    async with Park(tmp_path, [counting()]) as park:
        with pytest.raises(CapabilityError, match="a snapshot without a folder"):
            await park.engine.load(Snapshot(1))
        assert park.servers[0].called("/load") == []


async def test_weights_that_somebody_else_loads_as_the_same_version_are_noticed(tmp_path) -> None:
    """The check comes once a minute here, so the answer itself must tell."""
    async with Park(tmp_path, [counting()], check_every=60.0) as park:
        server = park.servers[0]
        await park.engine.load(weights(3))
        other_weights(server)
        assert (await park.engine.sample([1], SamplingParams(1))).versions == (3,)
        assert "were not loaded from here" in park.said[0] and "is back" in park.said[1]
        assert [body["version"] for body in server.called("/load")] == [3, 3]
        assert park.sent() == [2]


async def test_an_answer_that_lives_through_a_load_has_both(tmp_path) -> None:
    slow = Slow()
    async with Park(tmp_path, [slow]) as park:
        await park.engine.load(weights(1))
        asked = asyncio.ensure_future(park.engine.sample([1], SamplingParams(1)))
        await until(lambda: park.sent() == [1])
        await park.engine.load(Snapshot(2, WeightFolder("/weights", "next")))
        slow.go.set()
        await asked
        assert park.sent() == [1] and park.said == []


@pytest.mark.parametrize(("versions", "shift", "model", "words"), [
    ((3, 7), 0.0, "tiny", "tiny, version 3, and .* holds tiny, version 7: expected the same"),
    ((3, 3), 0.5, "tiny", "holds other weights than the other servers"),
    ((3, 3), 0.0, "other", "holds other, version 3: expected the same"),
])  # fmt: skip
async def test_without_a_load_servers_must_hold_the_same_before_the_first_answer(
    versions, shift, model, words, tmp_path
) -> None:
    engines = [counting(), Stuck(shift=shift)]
    for engine, version in zip(engines, versions, strict=True):
        engine.version = version
    park = Park(tmp_path, engines)
    park.servers[1].model = model
    async with park:
        with pytest.raises(EngineError, match=words):
            await park.ask([1])
        assert park.sent() == [0, 0]

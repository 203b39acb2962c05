"""vLLM's dialect, on answers as vLLM 0.32 gives them, and entropies from the likeliest tokens."""

from __future__ import annotations

import asyncio
import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.virtual_clock import now

from silva.engines.remote import vllm_adapters
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.vllm import VllmDialect, estimated_entropies
from silva.engines.remote.weights import PROBE
from silva.engines.remote.wire import SilvaDialect
from silva.errors import CapabilityError, EngineError
from silva.routes import to_text
from silva.types import SamplingParams, Snapshot, TokenScores, WeightFolder
from silva.wire.transport import Refused, Unreachable


class VllmPeer:
    """Attributes: `calls`, paths and bodies so far."""

    name, address = "inference", "http://v"

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "max_model_len": 512}]},
            "/version": {"version": "0.32.0"},
            "/is_paused": {"is_paused": False},
            "/v1/completions": completion([5], [0.0], [{"token_id:5": 0.0}]),
        } | {"/" + name.replace("__", "/"): answer for name, answer in answers.items()}

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        return await self.post(path, None, timeout=timeout)

    async def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        self.calls.append((path, body))
        answer = self.answers.get(path.partition("?")[0], {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def send(self, path: str, body: bytes, *, timeout: float) -> bytes:
        await self.post(path, body, timeout=timeout)
        return b""


def completion(
    tokens: list[int], logprobs: list[float], tops: list[dict[str, float]], *, finish: str = "length",
    stop: int | str | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    numbers = {"tokens": [], "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": []}
    choice = {
        "index": 0, "text": "", "logprobs": numbers, "finish_reason": finish, "stop_reason": stop,
        "token_ids": tokens, "prompt_logprobs": None,
    }  # fmt: skip
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens), "prompt_tokens_details": None}
    return {"choices": [choice | more], "usage": usage}


async def met(peer: Any, **made: Any) -> VllmDialect:
    """A dialect that has asked this server what it is."""
    dialect = VllmDialect(**{"vocabulary": 4, "top_logprobs": 2} | made)
    await dialect.facts(peer, 1.0)
    peer.calls.clear()
    return dialect


async def sampled(answer: Any, params: SamplingParams | None = None, version: int = 3) -> Any:
    peer: Any = VllmPeer()
    dialect = await met(peer)
    peer.answers["/v1/completions"] = answer
    return (await dialect.sample(peer, [1, 2, 3], params or SamplingParams(2), version)).found, peer


HALF = math.log(0.5)


async def test_a_request_names_every_parameter() -> None:
    params = SamplingParams(2, 0.5, 0.9, 7, 0.1, ("x",), (4,), (1 << 63) - 1)
    _, peer = await sampled(completion([1], [HALF], [{"token_id:1": HALF, "token_id:2": HALF}]), params)
    assert peer.calls == [
        ("/v1/completions", {
            "model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
            "min_p": 0.1, "stop": ["x"], "stop_token_ids": [4], "seed": (1 << 63) - 1, "n": 1, "logprobs": 2,
            "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True,
            "skip_special_tokens": False,
        })
    ]  # fmt: skip


async def test_a_completion_has_its_numbers_and_the_older_version() -> None:
    quarter = math.log(0.25)
    tops = [
        {"token_id:1": HALF, "token_id:2": HALF},
        {"token_id:3": quarter, "token_id:0": HALF, "token_id:1": quarter},  # sampled: not of the likeliest
    ]
    found, _ = await sampled(completion([1, 3], [HALF, quarter], tops))
    assert (found.tokens, found.logprobs, found.versions) == ((1, 3), (HALF, quarter), (3, 3))
    assert found.raw_logprobs == found.logprobs and found.stop_reason == "length"
    # 1/2, 1/4 are known of the second row; the rest, 1/4, is one of two tokens or shared by both.
    low, high = 1.5 * math.log(2), 1.75 * math.log(2)
    assert found.entropies == pytest.approx((math.log(2), (low + high) / 2))


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [("length", None, "length"), ("stop", 7, "stop_token"), ("stop", "x", "stop_string")],
)
async def test_why_it_stopped(finish, stop, expected) -> None:
    found, _ = await sampled(completion([1], [0.0], [{"token_id:1": 0.0}], finish=finish, stop=stop))
    assert found.stop_reason == expected


async def test_an_aborted_completion_is_no_answer() -> None:
    with pytest.raises(Unreachable, match="finish_reason 'abort'"):
        await sampled(completion([1], [0.0], [{"token_id:1": 0.0}], finish="abort"))


async def test_a_greedy_choice_is_certain_and_a_tempered_one_has_no_raw_numbers() -> None:
    answer = completion([1], [-0.7], [{"token_id:1": -0.7, "token_id:2": -0.8}])
    greedy, _ = await sampled(answer, SamplingParams(1, temperature=0.0))
    assert (greedy.logprobs, greedy.raw_logprobs, greedy.entropies) == ((0.0,), (-0.7,), (0.0,))
    for other in (SamplingParams(1, temperature=0.9), SamplingParams(1, top_p=0.9)):
        found, _ = await sampled(answer, other)
        assert found.logprobs == (-0.7,) and math.isnan(found.raw_logprobs[0])


async def test_experts_are_read_if_the_server_tells_them() -> None:
    """One row fewer than tokens, as the last has not been through the model; all layers of the model."""
    tops = [{"token_id:1": HALF, "token_id:2": HALF}] * 2
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    buffer = io.BytesIO()
    np.save(buffer, experts)
    told = base64.b64encode(buffer.getvalue()).decode()
    found, _ = await sampled(completion([1, 1], [HALF, HALF], tops, routed_experts=told))
    assert np.array_equal(found.routes, experts[2:]) and found.prompt_routes.shape == (3, 3, 2)
    assert (found.prompt_routes[0] == 255).all() and np.array_equal(found.prompt_routes[1:], experts[:2])
    without, _ = await sampled(completion([1, 1], [HALF, HALF], tops))
    assert without.routes is None and without.prompt_routes is None
    for wrong in (told[:-8], base64.b64encode(b"no array").decode()):
        with pytest.raises(Unreachable, match="makes no sense"):
            await sampled(completion([1, 1], [HALF, HALF], tops, routed_experts=wrong))
    with pytest.raises(Unreachable, match="routed_experts of 4 tokens, expected 3"):
        await sampled(completion([1], [HALF], tops[:1], routed_experts=told))


async def test_a_server_that_tells_experts_says_so() -> None:
    told = to_text(np.zeros((3, 1, 2), np.uint8))
    answer = completion([5], [0.0], [{"token_id:5": 0.0}], routed_experts=told)
    assert (await facts(VllmPeer(v1__completions=answer))).routes
    assert not (await facts(VllmPeer())).routes


async def test_scores_are_read_from_the_prompt() -> None:
    rows = [
        None,
        {"2": {"logprob": -3.0, "rank": 9}, "8": {"logprob": -1.0, "rank": 1}},
        {"3": {"logprob": -0.5, "rank": 1}},
    ]
    peer: Any = VllmPeer()
    dialect = await met(peer)
    peer.answers["/v1/completions"] = completion([1], [0.0], [{}], prompt_logprobs=rows)
    found = (await dialect.score(peer, [1, 2, 3], 1, 6)).found
    assert found == TokenScores((-3.0, -0.5), (8, 3), (-1.0, -0.5), 6)


async def loading(peer: Any, folder: WeightFolder | None = WeightFolder("/w", "d")) -> list[str]:
    await (await met(peer)).load(peer, Snapshot(1, folder), 1.0)
    return [path for path, _ in peer.calls]


async def test_a_load_pauses_reloads_forgets_and_resumes() -> None:
    peer = VllmPeer(reset_prefix_cache={"success": True})
    assert await loading(peer) == [
        "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true", "/resume",
    ]  # fmt: skip
    assert peer.calls[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ({"collective_rpc": Refused("HTTP 500", 500)}, Refused),
        ({"collective_rpc": Unreachable("cut")}, Unreachable),
        ({"reset_prefix_cache": {"success": False}}, EngineError),
    ],
)
async def test_it_is_resumed_whatever_went_wrong(answers, kind) -> None:
    peer = VllmPeer(**answers)
    with pytest.raises(kind):
        await loading(peer)
    assert peer.calls[-1][0] == "/resume"


class Adapters(VllmPeer):
    """With the routes of adapters, and those that it has loaded."""

    def __init__(self, *loaded: str) -> None:
        super().__init__()
        self.loaded = list(loaded)

    async def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        own = [{"id": name, "max_model_len": None, "parent": "m"} for name in self.loaded]
        self.answers["/v1/models"] = {"data": [{"id": "m", "max_model_len": 512}, *own]}
        return await super().post(path, body, timeout=timeout)

    async def tell(self, path: str, body: Any, *, timeout: float | None = None) -> bytes:
        self.calls.append((path, body))
        name = body["lora_name"]
        if not name:
            raise Refused("HTTP 400: Both 'lora_name' and 'lora_path' must be provided.", 400)
        (self.loaded.append if path == "/v1/load_lora_adapter" else self.loaded.remove)(name)
        return b"Success"


async def test_requests_name_the_adapter_of_the_version_and_nobody_waits() -> None:
    peer: Any = Adapters("the user's own")
    dialect = await met(peer, lora=True)
    for version in (1, 2, 3):
        snapshot = Snapshot(version, WeightFolder(f"/w/{version}", f"d{version}", adapter=True))
        await dialect.load(peer, snapshot, 1.0)
        await dialect.sample(peer, [1, 2, 3], SamplingParams(1), version)
        assert peer.calls[-1][1]["model"] == f"version-{version}-d{version}"
    assert peer.loaded == ["the user's own", "version-2-d2", "version-3-d3"]  # requests may be on their way
    told = [(path, body) for path, body in peer.calls if "lora" in path]
    assert told == [
        *[
            ("/v1/load_lora_adapter", {"lora_name": f"version-{n}-d{n}", "lora_path": f"/w/{n}"})
            for n in (1, 2, 3)
        ],
        ("/v1/unload_lora_adapter", {"lora_name": "version-1-d1"}),
    ]
    assert not [path for path, _ in peer.calls if "pause" in path]
    await dialect.facts(peer, 1.0)  # of a server that was started again, whose model is the base
    await dialect.sample(peer, [1], SamplingParams(1), 0)
    assert peer.calls[-1][1]["model"] == "m"


async def test_a_request_may_name_the_folder_of_an_adapter(tmp_path: Path, monkeypatch) -> None:
    """Which is loaded once, on each server, and again on one that was started again."""
    monkeypatch.setattr(vllm_adapters, "KNOWN", 2)
    peer: Any = Adapters("b")
    dialect = await met(peer)
    folders = {name: tmp_path / name for name in "abc"}

    async def ask(name: str) -> Any:
        await dialect.sample(peer, [1, 2, 3], SamplingParams(1), 0, folders[name])
        return peer.calls[-1][1]["model"]

    assert await asyncio.gather(*(ask(name) for name in "aabba")) == ["a", "a", "b", "b", "a"]
    told = [(path, body) for path, body in peer.calls if "lora" in path]
    assert told == [("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path / "a")})]
    await ask("a")
    await ask("c")
    assert peer.loaded == ["a", "c"]  # the name that was used longest ago is forgotten there too
    peer.loaded.clear()
    peer.answers["/v1/completions"] = Refused("HTTP 404: The model `a` does not exist.", 404)
    with pytest.raises(Unreachable, match="has lost the adapter a"):
        await ask("a")
    peer.answers["/v1/completions"] = completion([5], [0.0], [{"token_id:5": 0.0}])
    assert await ask("a") == "a" and peer.loaded == ["a"]

    async def tell(path: str, body: Any, *, timeout: float | None = None) -> bytes:
        raise Refused("HTTP 404: Not Found", 404)

    peer.tell = tell
    with pytest.raises(CapabilityError, match=r"has not loaded the adapter .*/b .*expected vLLM with"):
        await ask("b")
    with pytest.raises(CapabilityError, match="silva inference has one model"):
        await SilvaDialect().sample(peer, [1], SamplingParams(1), 0, folders["a"])


async def test_the_likeliest_tokens_of_a_text_are_told() -> None:
    rows = [None, {"2": {"logprob": -3.0}, "8": {"logprob": -1.0}, "9": {"logprob": -2.0}}]
    peer: Any = VllmPeer()
    dialect = await met(peer)
    peer.answers["/v1/completions"] = completion([1], [0.0], [{}], prompt_logprobs=rows)
    found = (await dialect.score(peer, [1, 2], 1, 6, top=2)).found
    assert found == TokenScores((-3.0,), (8,), (-1.0,), 6, (((8, -1.0), (9, -2.0)),))
    assert peer.calls[-1][1]["prompt_logprobs"] == 2


async def test_adapters_are_loaded_where_the_server_has_the_route_and_the_model_has_any() -> None:
    assert (await facts(Adapters(), lora=True)).loads == {"folder", "adapter"}
    assert (await facts(Adapters())).loads == {"folder"}
    without: Any = Adapters()

    async def tell(path: str, body: Any, *, timeout: float) -> bytes:
        raise Refused("HTTP 404", 404)

    without.tell = tell
    assert (await facts(without, lora=True)).loads == {"folder"}


async def test_weights_that_were_sent_are_asked_for_by_their_name() -> None:
    peer: Any = VllmPeer(weight_info={"weight_version": "silva-1"})
    assert (await facts(peer, sent=True)).loads == {"folder", "sent"}
    dialect = await met(peer, sent=True)
    await dialect.load(peer, Snapshot(1, sent="silva-1"), 1.0)
    assert peer.calls == [("/weight_info", None)]
    with pytest.raises(Unreachable, match="holds the weights 'silva-1', expected 'silva-2'"):
        await dialect.load(peer, Snapshot(2, sent="silva-2"), 1.0)
    assert not (await dialect.alive(peer, 1.0, 6.0)).computes and peer.calls[-1][0] == "/ping"


async def test_a_server_that_gets_weights_stays_paused_and_one_that_a_lost_trainer_left_goes_on() -> None:
    peer: Any = VllmPeer(is_paused={"is_paused": True}, finish_weight_update=Refused("HTTP 500", 500))
    dialect = await met(peer, sent=True)
    with pytest.raises(Unreachable, match="is paused: weights are sent to it"):
        await dialect.facts(peer, 1.0)
    assert "/resume" not in [path for path, _ in peer.calls]
    await VllmDialect(sent=True).facts(peer, 1.0)
    paths = [path for path, _ in peer.calls]
    assert paths.index("/finish_weight_update") < paths.index("/resume") < paths.index("/v1/completions")


async def test_only_a_folder_is_loaded() -> None:
    with pytest.raises(CapabilityError, match="from a folder"):
        await loading(VllmPeer(), None)


async def facts(peer: Any, **made: Any) -> Any:
    return await VllmDialect(**made).facts(peer, 1.0)


async def test_what_a_server_says_of_itself() -> None:
    found = await facts(VllmPeer())
    assert (found.context, found.version, found.entropies, found.loads) == (512, 0, True, {"folder"})
    assert found.machine == {"server": "vLLM 0.32.0"}
    closed = await facts(VllmPeer(is_paused=Refused("HTTP 404", 404)))
    assert closed.loads == frozenset() and "VLLM_SERVER_DEV_MODE=1" in closed.notes[-1]


async def test_a_server_that_was_left_paused_is_resumed_before_it_is_asked_anything() -> None:
    peer = VllmPeer(is_paused={"is_paused": True})
    await facts(peer)
    paths = [path for path, _ in peer.calls]
    assert paths.index("/resume") < paths.index("/v1/completions")


async def test_the_models_own_numbers_and_other_models_are_refused() -> None:
    raw = VllmPeer(v1__completions=completion([5], [-2.1], [{"token_id:5": -2.1}]))
    with pytest.raises(CapabilityError, match="--logprobs-mode processed_logprobs"):
        await facts(raw)
    with pytest.raises(CapabilityError, match="has no model 'other'; it has m"):
        await facts(VllmPeer(), model="other")


def test_entropies_of_limited_distributions_are_exact() -> None:
    """-9999 is how vLLM writes minus infinity."""
    rows = [[math.log(0.75), math.log(0.25), -9999.0, -9999.0], [0.0, -9999.0, -9999.0, -9999.0]]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert estimated_entropies(rows, 4, 50_000) == pytest.approx((entropy, 0.0), abs=1e-12)


def test_rounding_is_put_right_and_nonsense_is_not() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 5000)) * rng.uniform(0.1, 12, size=(200, 1))
    exact = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    entropies = -(np.exp(exact) * exact).sum(1)
    rounded = np.sort(exact, 1)[:, :-21:-1] + rng.normal(size=(200, 20)) * 1e-6
    found = estimated_entropies(rounded.tolist(), 20, 5000)
    assert all(math.isfinite(x) and x >= 0 for x in found)
    sure = 1 - np.exp(rounded).sum(1) < 1e-3
    assert sure.sum() > 20
    assert np.array(found)[sure] == pytest.approx(entropies[sure], abs=5e-3)
    with pytest.raises(ValueError, match="do not belong to a distribution"):
        estimated_entropies([[0.0, -0.1]], 2, 100)
    with pytest.raises(ValueError, match="do not belong to a distribution"):
        estimated_entropies([[-1.0, -9.0]], 2, 10)


class HungVllm(VllmPeer):
    """Its front answers, and what computes behind it does not, from `hangs` on."""

    hangs = False

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        if path == "/is_paused" and self.hangs:
            await asyncio.sleep(timeout or 1e9)
            raise Unreachable(f"no answer to {path} within {timeout} s")
        return await super().get(path, timeout=timeout)

    async def close(self) -> None:
        pass


async def test_a_core_that_hangs_behind_a_front_that_answers_is_noticed_within_ten_seconds() -> None:
    peer, said = HungVllm(), list[tuple[float, str]]()
    rows = [None] + [{str(token): {"logprob": 0.0, "rank": 1}} for token in PROBE[1:]]
    peer.answers["/v1/completions"]["choices"][0]["prompt_logprobs"] = rows
    engine = HttpEngine(
        [peer],  # type: ignore[list-item]
        ClientSettings(),
        VllmDialect(vocabulary=300),
        say=lambda text: said.append((now(), text)),
    )
    await engine.connect()
    await asyncio.sleep(100.0)
    assert said == []
    peer.hangs = True
    await asyncio.sleep(10.0)
    assert said and "requests wait until it is back" in said[0][1]
    peer.hangs = False
    await asyncio.sleep(40.0)
    assert "is back" in said[-1][1]
    await engine.close()

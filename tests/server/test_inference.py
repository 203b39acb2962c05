"""The inference server as a whole: clients that go away or ask too much, weights, health, counts."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from scripted_engine import ScriptedEngine
from tests.server.running import CONTEXT, MODEL, asking, connected, guarded, listening, run, says, until

from silva import __version__
from silva.engines.local.engine import LocalEngine
from silva.engines.remote.settings import HttpEngineSettings
from silva.errors import ContextOverflow, EngineError
from silva.models.loading import LoadedModel
from silva.models.snapshots import weight_folder
from silva.protocols import Engine
from silva.rendering.renderer import Renderer
from silva.storage.layout import Layout
from silva.types import Completion, SamplingParams, Snapshot
from silva.wire.listening import Bind
from silva.wire.transport import Refused

PROMPT = list(range(40, 60))


class Endless(ScriptedEngine):
    """Answers when it is told to. `cancelled`: requests that were given up."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, params: [65], context=CONTEXT)
        self.go = asyncio.Event()
        self.cancelled = self.waiting = 0

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        self.waiting += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await super().sample(tokens, params, session=session)


@pytest.fixture
def weights(tiny_model: LoadedModel, tmp_path: Path) -> Path:
    """Those of the model, in a folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    tensors = {name: p.detach().clone() for name, p in tiny_model.model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


async def hung_up(address: str, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """A request whose answer nobody has read yet."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return writer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [PROMPT] * 2, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 4}),
        ("/v1/completions", {"prompt": [PROMPT] * 4, "stream": True}),
    ],
    ids=["completions", "chat", "stream"],
)
async def test_a_client_that_goes_away_cancels_its_sampling(
    renderer: Renderer, path: str, body: dict[str, Any]
) -> None:
    engine = Endless()
    async with listening(guarded(engine, renderer)) as address:
        writer = await hung_up(address, path, body)
        await until(lambda: engine.waiting == 4, "the requests reach the engine")
        writer.close()
        await until(lambda: engine.cancelled == 4, "the requests are cancelled")
        engine.go.set()
        async with connected(address) as peer:
            answer = await peer.post("/v1/completions", {"prompt": PROMPT})
        assert answer["choices"][0]["text"] == "b"


async def test_it_frees_the_place_in_the_local_engine(engine: LocalEngine, renderer: Renderer) -> None:
    body = {"prompt": [PROMPT] * 4, "max_tokens": 200, "stop_token_ids": []}
    async with listening(guarded(engine, renderer)) as address:
        writer = await hung_up(address, "/v1/completions", body)
        await until(lambda: engine.running == 4, "every place is taken")
        writer.close()
        async with connected(address) as peer:
            answer = await peer.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, timeout=20)
        assert answer["usage"]["completion_tokens"] == 1
        assert engine.running == 0 and engine.stats.decode_tokens < 4 * 199


async def test_too_much_at_once_is_refused_with_a_time_to_try_again(renderer: Renderer) -> None:
    engine = Endless()
    async with asking(guarded(engine, renderer, waiting=4, tokens=100)) as client:

        async def complete(**body: Any) -> Any:
            return await client.post("/v1/completions", json={"prompt": PROMPT} | body)

        first = asyncio.ensure_future(complete(n=3))
        await until(lambda: engine.waiting == 3, "the engine has them")
        refused = await complete(n=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await complete(prompt=[1] * 41)).status_code == 429  # tokens: 60 + 41
        assert (await complete(n=5)).status_code == 400  # never possible
        engine.go.set()
        assert (await first).status_code == 200
        assert (await complete(n=4)).status_code == 200


async def test_one_failure_of_the_engine_fails_the_request_and_cancels_its_other_samples(
    renderer: Renderer,
) -> None:
    class Broken(Endless):
        async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Any:
            if params.seed == 9:
                raise EngineError("the forward pass failed")
            return await super().sample(tokens, params, session=session)

    engine = Broken()
    async with asking(guarded(engine, renderer)) as client:
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "n": 3, "seed": 9})
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the forward pass failed", "type": "EngineError", "code": None,
        }  # fmt: skip
        assert engine.waiting == 0


async def test_a_snapshot_is_loaded_and_its_version_is_on_every_token(
    engine: LocalEngine, renderer: Renderer, weights: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    digest = weight_folder(weights).digest
    app = guarded(engine, renderer, folders=(tmp_path,), lines=lines)
    bind = Bind(unix=str(tmp_path / "s"))
    async with listening(app, bind) as address, connected(address) as peer:
        folder = {"path": str(weights), "digest": digest}
        assert await peer.post("/load", {"version": 7, "folder": folder}) == {"version": 7}
        body = {"prompt": PROMPT, "return_token_ids": True, "max_tokens": 2, "stop_token_ids": []}
        found = await peer.post("/v1/completions", body)
        assert found["choices"][0]["silva"]["versions"] == [7, 7]
        answer = await peer.post("/update_weights", {"weight_dir": str(weights)})
        assert answer == {"status": "ok", "version": 8}
        assert (await peer.post("/load", {"version": 3, "folder": folder}))["version"] == 3
        assert await peer.post("/sleep") == {}
        alive = await peer.get("/alive")
        assert alive.pop("counts")["decode_tokens"] == engine.stats.decode_tokens > 0
        assert alive.pop("weights") == weight_folder(weights).digest
        assert alive == {
            "role": "inference", "version": 3, "pid": os.getpid(), "silva": __version__,
        }  # fmt: skip
        for body, status, words in (
            ({"version": 9, "folder": folder | {"digest": "0"}}, 409, "digest"),
            ({"version": 9, "folder": {"path": "/etc", "digest": "0"}}, 400, "outside the folders"),
            ({"version": 9, "folder": {"path": "weights", "digest": "0"}}, 400, "absolute"),
            ({"version": 9, "folder": {"path": f"{weights}/../..", "digest": "0"}}, 400, "outside"),
            ({"version": 9, "folder": {"path": f"{weights}/no", "digest": "0"}}, 400, "no folder"),
            ({"version": 9, "folder": {"path": f"{weights}/\0", "digest": "0"}}, 400, "absolute"),
            (
                {"version": 9, "folder": {"path": f"{weights}/{'a' * 300}", "digest": "0"}},
                400,
                "no folder|cannot be read",
            ),
            ({"version": 9, "folder": None}, 400, "folder"),  # it would give old weights a new name
            ({"version": -1, "folder": folder}, 400, "version"),
            ({"version": True, "folder": folder}, 400, "version"),
            ({}, 400, "version"),
        ):
            with pytest.raises(Refused, match=words) as refused:
                await peer.post("/load", body)
            assert refused.value.status == status
        empty = tmp_path / "empty"
        empty.mkdir()
        (tmp_path / "link").symlink_to("/etc")
        for path, status in ((empty, 409), (tmp_path / "link", 400), ("/etc", 400)):
            with pytest.raises(Refused) as refused:
                await peer.post("/update_weights", {"weight_dir": str(path)})
            assert refused.value.status == status
        assert (await peer.get("/alive"))["version"] == 3
    assert lines == [f"weights: version {version}" for version in (7, 8, 3)]


def test_the_first_weights_come_back_where_the_server_knows_them(renderer: Renderer) -> None:
    engine = says(renderer, "yes")

    async def again() -> None:
        await engine.load(Snapshot(0))

    async def ask(reload: Any) -> Any:
        engine.version = 5
        async with asking(guarded(engine, renderer, reload=reload)) as client:
            return await client.post("/reload_weights")

    assert run(ask(again)).json() == {"status": "ok", "version": 0}
    refused = run(ask(None))
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "ConfigError")


def test_health_samples_a_token(engine: LocalEngine, renderer: Renderer) -> None:
    async def ask() -> Any:
        async with asking(guarded(engine, renderer)) as client:
            return (await client.get("/health")).json()

    before = engine.stats.steps
    answer = run(ask())
    assert (answer["status"], answer["version"]) == ("ok", 0) and math.isfinite(answer["seconds"])
    assert engine.stats.steps > before


def test_health_says_why_an_engine_is_not_well(renderer: Renderer) -> None:
    class Sick(ScriptedEngine):
        async def sample(self, *args: Any, **options: Any) -> Completion:
            raise EngineError("its weights hold NaN")

    async def ask(engine: Any) -> tuple[int, dict[str, Any]]:
        async with asking(guarded(engine, renderer, health_seconds=0.05)) as client:
            answers = await asyncio.gather(*(client.get("/health") for _ in range(3)))
            alive = await client.get("/alive")
        assert alive.status_code == 200 and len({answer.text for answer in answers}) == 1
        return answers[0].status_code, answers[0].json()["error"]

    status, error = run(ask(Sick(lambda tokens, params: [])))
    assert (status, error["message"]) == (503, "EngineError: its weights hold NaN")

    async def stuck() -> None:
        engine = Endless()
        status, error = await ask(engine)
        assert (status, error["code"]) == (503, "unhealthy") and "no token within 0.05 s" in error["message"]
        assert engine.cancelled == 1  # all who asked at the same time shared one token

    run(stuck())


async def test_an_engine_that_serves_others_is_healthy_though_it_has_no_place_for_the_probe(
    renderer: Renderer,
) -> None:
    class Full(Endless):
        """The probe never gets its turn; others do."""

        async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Any:
            if len(tokens) == 1:
                return await super().sample(tokens, params, session=session)
            return await ScriptedEngine.sample(self, tokens, params, session=session)

    engine = Full()
    async with asking(guarded(engine, renderer, health_seconds=0.5)) as client:
        health = asyncio.ensure_future(client.get("/health"))
        await until(lambda: engine.waiting == 1, "the probe waits")
        assert (await client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 200
        found = (await health).status_code
    assert found == 200


async def test_metrics_count_requests_tokens_and_seconds(renderer: Renderer) -> None:
    engine = says(renderer, "yes")
    engine.version = 4
    async with asking(guarded(engine, renderer)) as client:
        for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "n": 2}, {"prompt": []}, {"prompt": [999]}):
            await client.post("/v1/completions", json=body)
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert values['silva_requests_total{route="/v1/completions",status="200"}'] == "2"
    assert values['silva_requests_total{route="/v1/completions",status="400"}'] == "2"
    assert (values["silva_prompt_tokens_total"], values["silva_completion_tokens_total"]) == ("60", "12")
    assert (values["silva_requests_running"], values["silva_requests_waiting"]) == ("0", "0")
    assert values["silva_policy_version"] == "4"
    assert float(values['silva_request_seconds_total{route="/v1/completions"}']) > 0


async def test_capabilities_and_models_say_what_there_is(engine: LocalEngine, renderer: Renderer) -> None:
    async with asking(guarded(engine, renderer)) as client:
        able, models = [(await client.get(path)).json() for path in ("/capabilities", "/v1/models")]
    assert able["memory_per_token"] == pytest.approx(engine.memory(1, CONTEXT) / CONTEXT)
    del able["memory_per_token"], able["weights"]
    assert able == {
        "context": CONTEXT, "entropies": True, "routes": False, "loads": ["folder", "parameters"],
        "machine": engine.machine, "notes": engine.notes, "version": 0, "model": MODEL,
        "silva": __version__,
    }  # fmt: skip
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [(MODEL, CONTEXT)]


async def test_the_openapi_document_has_every_route_and_the_limits_of_the_model(renderer: Renderer) -> None:
    app = guarded(says(renderer, "yes"), renderer)
    async with asking(app) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    routes = {(method, path) for path, found in document["paths"].items() for method in found}
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app._app.routes
        for method in route.methods - {"HEAD"}
    }
    assert routes == served
    schemas = document["components"]["schemas"]
    token = {"type": "integer", "minimum": 0, "format": "token", "maximum": renderer.vocabulary - 1}
    assert schemas["CompletionBody"]["properties"]["prompt"]["anyOf"][1]["items"] == token
    assert schemas["CompletionBody"]["additionalProperties"] is False
    references = {text.split('"')[0] for text in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= schemas.keys()


async def test_a_load_waits_for_the_one_before_it(renderer: Renderer, tmp_path: Path) -> None:
    order: list[str] = []
    folder = {"path": str(tmp_path), "digest": "0"}

    class Loading(ScriptedEngine):
        async def load(self, snapshot: Snapshot) -> None:
            order.append(f"begin {snapshot.version}")
            for _ in range(3):
                await asyncio.sleep(0)
            await super().load(snapshot)
            order.append(f"end {snapshot.version}")

    async with asking(guarded(Loading(lambda tokens, params: [1]), renderer)) as client:
        bodies = [{"version": version, "folder": folder} for version in (1, 2)]
        await asyncio.gather(*(client.post("/load", json=body) for body in bodies))
    assert order in (["begin 1", "end 1", "begin 2", "end 2"], ["begin 2", "end 2", "begin 1", "end 1"])


@pytest.mark.slow
def test_silva_s_own_client_gets_the_engine_s_own_results(
    engine: LocalEngine,
    renderer: Renderer,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SILVA_API_KEY", "s3cret")
    params = [
        SamplingParams(20, temperature=0.8, top_p=0.9, top_k=9, min_p=0.01, seed=2**62 + 1, stop=("q", "zz")),
        SamplingParams(500, seed=3, stop_token_ids=(7,)),
        SamplingParams(5, temperature=0.0),
    ]
    snapshot = Snapshot(4, weight_folder(weights))

    async def results(asked: Engine) -> tuple[Any, ...]:
        await asked.load(snapshot)
        found = [await asked.sample(PROMPT, each) for each in params]
        scores = await asked.score(PROMPT, 3)
        with pytest.raises(ContextOverflow):
            await asked.sample([65] * CONTEXT, params[0])
        return asked.version, found, scores

    async def served() -> tuple[Any, ...]:
        bind = Bind(unix=str(tmp_path / "s"))
        async with listening(guarded(engine, renderer, key="s3cret"), bind) as address:
            context: Any = SimpleNamespace(run_layout=Layout(tmp_path), say=print)
            client: Any = HttpEngineSettings(urls=(address,), key_variable="SILVA_API_KEY").build(context)
            try:
                await client.connect()
                assert client.capabilities.context == CONTEXT
                return await results(client)
            finally:
                await client.close()

    expected = run(results(engine))
    assert run(served()) == expected

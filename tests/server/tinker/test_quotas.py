"""What is removed by itself, and what one key may have at most."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from tests.server.running import until
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.commands.serve_tinker import _number
from silva.errors import ConfigError
from silva.server.tinker import futures
from silva.server.tinker.quotas import Quotas


@pytest.mark.slow
async def test_what_was_done_an_hour_ago_is_forgotten_and_the_file_stops_growing(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(futures, "BATCH", 7)
    client, model, first, seq, weight, sizes = None, "", None, 0, 0.0, []
    for n in range(4):
        async with service.asked() as http:
            client = client or await Client(http).begin()
            client.http = http
            model = model or await client.model()
            sent = []
            for _ in range(12):
                sent.append(await client.passed(model, seq + 1, 2.0, targets=[n] * 2))
                sent.append(await client.passed(model, seq + 2, forward=True))
                sent.append(await client.step(model, seq + 3, 0.5))
                seq, weight = seq + 3, 0.9 * weight + 0.5 * 2.0
            for each in sent:
                await client.result(each)
            first = first or sent[0]
        with monkeypatch.context() as later:
            later.setattr(futures, "KEPT", -1.0)  # a server tidies when it begins
            async with service.asked() as http:
                client.http = http
                for each in (first, sent[0], sent[-1]):
                    asked = {"request_id": each.json()["request_id"]}
                    while (await client.post("/retrieve_future", **asked)).status_code != 410:
                        pass
        sizes.append((service.state / "tinker.sqlite").stat().st_size)
    assert sizes[1] == sizes[2] == sizes[3]
    async with service.asked() as http:
        client.http = http
        again = await client.passed(model, 1, 2.0, targets=[0, 0])
        assert again.status_code == 410 and "was done" in again.text
        await client.result(await client.passed(model, seq + 1, 2.0))
        await client.result(await client.step(model, seq + 2, 0.5))
        assert service.runs.weights[model] == 0.9 * weight + 0.5 * 2.0


async def test_what_was_cancelled_is_forgotten_too(service: Service, monkeypatch: pytest.MonkeyPatch):
    async with service.asked() as http:
        client = await Client(http).begin()
        await client.post("/create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
                          base_model="base")  # fmt: skip

        async def never(*given: object) -> None:
            await asyncio.Event().wait()

        service.sampler.sample = never  # type: ignore[assignment, method-assign]
        sent = await client.post(
            "/asample", sampling_session_id=f"{client.session}:sample:0", seq_id=1, num_samples=1,
            prompt={"chunks": [{"tokens": [3]}]}, sampling_params={"max_tokens": 1},
        )  # fmt: skip
        await client.post("/cancel_future", request_id=sent.json()["request_id"])
        assert "cancelled" in (await client.result(sent))["error"]
    monkeypatch.setattr(futures, "KEPT", -1.0)  # a server tidies when it begins
    async with service.asked() as http:
        client.http = http
        asked = {"request_id": sent.json()["request_id"]}
        while (await client.post("/retrieve_future", **asked)).status_code != 410:
            pass
    with sqlite3.connect(service.state / "tinker.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)


async def test_what_waits_for_a_request_that_never_came_ends_with_its_session(service: Service):
    """Or it would count against the key for ever, and the folder of the model stay."""
    service.quotas = Quotas(waiting=1)
    async with service.asked() as http:
        client = await Client(http).begin()
        model, whole = await client.model(0), await client.model(1)
        saved = await client.result(await client.post("/save_weights", model_id=whole, seq_id=1, path="a"))
        loaded = await client.result(
            await client.post("/load_weights", model_id=model, seq_id=1, path=saved["path"], optimizer=True)
        )
        assert loaded["type"] == "load_weights"
        waits = await client.passed(model, 3)
        await client.result(await client.passed(whole, 2))
        assert len(list((service.state / "weights").iterdir())) == 2
        await client.post(f"/sessions/{client.session}/finish")
    async with service.asked() as http:  # a server tidies when it begins
        client.http = http
        assert "the session has ended before" in (await client.result(waits))["error"]
        await until(lambda: len(list((service.state / "weights").iterdir())) == 1, "its folder is gone")
        other = await Client(http).begin()
        theirs = await other.model()
        await other.result(await other.passed(theirs, 1))
        assert (await other.passed(theirs, 3)).status_code == 200


async def test_a_key_has_so_many_models(service: Service):
    service.quotas = Quotas(models=2)
    async with service.asked() as http:
        client = await Client(http).begin()
        await client.model(0)
        await client.model(1)
        body = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 4, "seed": 1}}
        refused = await client.post("/create_model", model_seq_id=2, **body)
        assert refused.status_code == 400 and "this key has 2 models, the most" in refused.text
        await client.model(1)  # again: it is there
        other = await Client(http, **{"x-api-key": "tml-other"}).begin()
        await other.model(0)
        await client.post(f"/sessions/{client.session}/finish")
        await client.begin()
        await client.model(0)


async def test_a_key_has_so_many_requests_that_wait(service: Service):
    service.quotas = Quotas(waiting=2)
    async with service.asked() as http:
        client = await Client(http).begin()
        other = await Client(http, **{"x-api-key": "tml-other"}).begin()
        model, gaps, theirs = await client.model(0), await client.model(1), await other.model()
        service.runs.hold.clear()
        sent = [await client.passed(model, 1), await client.passed(model, 2)]
        refused = await client.step(model, 3)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "2 requests of this key wait" in refused.text
        # What waits for a request that has not come is let in, for that one may come last.
        parts = [await client.passed(gaps, seq) for seq in (2, 3, 1)]
        assert (await client.step(gaps, 4)).status_code == 429
        assert (await other.passed(theirs, 2)).status_code == 200
        service.runs.hold.set()
        for each in (*sent, *parts):
            await client.result(each)
        await client.result(await client.step(model, 3))
        await client.result(await client.step(gaps, 4))


async def test_a_key_has_so_many_bytes_of_weights(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        await client.result(await client.post("/save_weights", model_id=model, seq_id=1, path="a"))
        size = (await http.get("/checkpoints")).json()["checkpoints"][0]["size_bytes"]
    most = 2 * size + 1
    service.quotas = Quotas(bytes=most)
    async with service.asked() as http:
        client.http = http
        again = {"path": "a", "overwrite": True}
        assert "path" in await client.result(
            await client.post("/save_weights", model_id=model, seq_id=2, **again)
        )
        unnamed = {"model_id": model, "sampling_session_seq_id": 0}
        made = await client.post("/save_weights_for_sampler", seq_id=3, **unnamed)
        assert "sampling_session_id" in await client.result(made)
        for seq, path, kind in ((4, "b", "save_weights"), (5, "c", "save_weights_for_sampler")):
            found = await client.result(await client.post(f"/{kind}", model_id=model, seq_id=seq, path=path))
            assert found["category"] == "user" and f"may have {most}," in found["error"]
        assert (await http.get("/checkpoints")).json()["cursor"]["total_count"] == 1
        await http.delete(f"/training_runs/{model}/checkpoints/weights/a")
        found = await client.result(await client.post("/save_weights", model_id=model, seq_id=6, path="b"))
        assert "path" in found
    async with service.asked():
        await until(lambda: len(list((service.state / "weights").iterdir())) == 2, "the others are gone")


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "1e3"])
def test_a_quota_is_a_whole_number(text: str):
    with pytest.raises(ConfigError, match=f"--max-models: got '{text}'"):
        _number({"--max-models": text}, "--max-models")
    with pytest.raises(ConfigError, match="got 0, expected 1 or more"):
        Quotas(models=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_sdk_lives_with_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = Service(tmp_path)
    service.quotas = Quotas(models=1, waiting=1, bytes=1)
    with service.running():
        client = tinker.ServiceClient(base_url=service.address, api_key="tml-a")
        trained = client.create_lora_training_client(base_model="base", rank=8).result()
        with pytest.raises(tinker.BadRequestError, match="this key has 1 models"):
            client.create_lora_training_client(base_model="base").result()
        datum = tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints([3, 4]),
            loss_fn_inputs={
                "target_tokens": np.array([1, 2], np.int64), "weights": np.array([1, 0], np.float32)
            },
        )  # fmt: skip
        passed = trained.forward_backward([datum] * 2500, "cross_entropy")  # three parts, the first one last
        step = trained.optim_step(tinker.types.AdamParams(learning_rate=1.0))
        assert len(passed.result(120).loss_fn_outputs) == 2500
        assert step.result(120).metrics == {"gradient:mean": 2500.0}
        with pytest.raises(tinker.TinkerError, match="may have 1, so"):
            trained.save_state("a").result()
        assert trained.forward([datum], "cross_entropy").result().metrics["loss:sum"] != 0

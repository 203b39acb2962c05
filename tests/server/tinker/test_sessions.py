"""Sessions and checkpoints: asked for again, finished, expired, and what is removed with them."""

from __future__ import annotations

import pytest
from tests.server.running import until
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.server.tinker import checkpoints


@pytest.fixture
def service(of_each_database: Service) -> Service:
    """Every test of this file is one of both databases."""
    return of_each_database


async def test_a_session_that_is_asked_for_again_is_the_same_one(service: Service):
    async with service.asked() as http:
        made = []
        for key, sent in (("tml-a", "1"), ("tml-a", "1"), ("tml-a", "2"), ("tml-b", "1"), ("tml-a", None)):
            headers = {"x-api-key": key} | ({"x-idempotency-key": sent} if sent else {})
            answer = await http.post("/create_session", json={}, headers=headers)
            made.append(answer.json()["session_id"])
        assert made[0] == made[1] and len(set(made)) == 4
        listed = (await http.get("/sessions", headers={"x-api-key": "tml-a"})).json()["sessions"]
        assert sorted(listed) == sorted({made[0], made[2], made[4]})


async def test_what_only_an_ended_session_used_is_removed(service: Service, monkeypatch):
    async with service.asked() as http:
        client = await Client(http).begin()
        other = await Client(http).begin()
        model, theirs = await client.model(), await other.model()
        for each, asked in ((model, client), (theirs, other)):
            await asked.result(await asked.passed(each, 1))
            saved = await asked.post("/save_weights", model_id=each, seq_id=2, path="a")
            path = (await asked.result(saved))["path"]
            await asked.result(await asked.post("/load_weights", model_id=each, seq_id=3, path=path,
                                                optimizer=True))  # fmt: skip
            unnamed = {"model_id": each, "seq_id": 4, "sampling_session_seq_id": 0}
            await asked.result(await asked.post("/save_weights_for_sampler", **unnamed))
        assert len(list((service.state / "weights").iterdir())) == 6
        await client.post(f"/sessions/{client.session}/finish")
        refused = await client.passed(model, 5)
        assert refused.status_code == 410 and "has finished" in refused.text
    async with service.asked() as http:
        folders = service.state / "weights"
        await until(
            lambda: len(list(folders.iterdir())) == 4, "its checkpoint is left, and all of the other one"
        )
        assert (await http.get("/checkpoints")).json()["cursor"]["total_count"] == 2
        assert (await http.get(f"/sessions/{client.session}")).json()["sampler_ids"] == []
        other.http = http
        assert await other.result(await other.passed(theirs, 5)) == {"loss:sum": 2.0}
    monkeypatch.setattr(checkpoints, "SILENT", -1.0)  # nobody was heard of in time
    async with service.asked() as http:
        await until(lambda: len(list(folders.iterdir())) == 2, "the checkpoints are left")


async def test_sessions_that_have_finished_end_their_heartbeat(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        assert (await client.post("/session_heartbeat", session_id=client.session)).json() == {}
        assert (
            await client.post(f"/sessions/{client.session}/finish", reason={"type": "success"})
        ).json() == {}
        assert (await client.post("/session_heartbeat", session_id=client.session)).status_code == 410
        body = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 4}}
        assert (await client.post("/create_model", model_seq_id=0, **body)).status_code == 410


async def test_checkpoints_expire_and_are_removed(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        for seq, name in ((1, "a"), (2, "b"), (3, "a")):
            how = {"path": name, "overwrite": seq == 3, "user_metadata": {"n": str(seq)}}
            answer = await client.post("/save_weights", model_id=model, seq_id=seq, **how)
            assert "path" in await client.result(answer)
        again = await client.post("/save_weights", model_id=model, seq_id=4, path="a")
        assert "there is one of this name" in (await client.result(again))["error"]
        listed = (await http.get(f"/training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [(each["checkpoint_id"], each["user_metadata"]) for each in listed] == [
            ("weights/b", {"n": "2"}), ("weights/a", {"n": "3"})
        ]  # fmt: skip
        base = f"/training_runs/{model}/checkpoints/weights"
        assert (await http.put(f"{base}/b/ttl", json={"ttl_seconds": 3600})).status_code == 200
        expires = (await http.get("/checkpoints")).json()["checkpoints"][1]["expires_at"]
        assert expires is not None
        assert (await http.delete(f"{base}/a")).status_code == 200
        assert (await http.delete(f"{base}/a")).status_code == 404
        gone = await client.post("/load_weights", model_id=model, seq_id=5, path=f"tinker://{model}/weights/a",
                                 optimizer=True)  # fmt: skip
        assert "not found" in (await client.result(gone))["error"]
    async with service.asked() as http:  # a server tidies when it begins
        await until(
            lambda: len(list((service.state / "weights").iterdir())) == 1, "folders without a row are gone"
        )
        assert (await http.get("/checkpoints")).json()["cursor"]["total_count"] == 1

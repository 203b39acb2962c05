"""Who may see what: keys, names that lead elsewhere, and requests that have stopped other servers."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext

import pytest
from tests.server.running import asking
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.server.tinker import messages
from silva.server.tinker.keys import ApiKeys
from silva.wire.guard import HttpError


async def test_nobody_finds_what_belongs_to_another_key(service: Service):
    async with service.asked() as http:
        mine = await Client(http).begin()
        model = await mine.model()
        saved = await mine.post("/save_weights", model_id=model, seq_id=1, path="a")
        path = (await mine.result(saved))["path"]
        named = await mine.post("/save_weights_for_sampler", model_id=model, seq_id=2, path="s")
        sampler = (await mine.result(named))["path"]
        made = await mine.post("/create_sampling_session", session_id=mine.session, sampling_session_seq_id=0,
                               model_path=sampler)  # fmt: skip
        session = made.json()["sampling_session_id"]
        other = await Client(http, **{"x-api-key": "tml-other"}).begin()
        adam, prompt = {"adam_params": {}}, {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        answers = [
            await other.passed(model, 3),
            await other.post("/optim_step", model_id=model, seq_id=3, **adam),
            await other.post("/save_weights", model_id=model, seq_id=3, path="x"),
            await other.post("/save_weights_for_sampler", model_id=model, seq_id=3, path="x"),
            await other.post("/save_weights_external", model_id=model, seq_id=3, path="x"),
            await other.post("/load_weights", model_id=model, seq_id=3, path=path, optimizer=True),
            await other.post("/get_info", model_id=model),
            await other.post("/weights_info", tinker_path=path),
            await other.post("/retrieve_future", request_id=saved.json()["request_id"]),
            await other.post("/cancel_future", request_id=saved.json()["request_id"]),
            await other.post("/session_heartbeat", session_id=mine.session),
            await other.post(f"/sessions/{mine.session}/finish"),
            await other.post("/create_sampling_session", session_id=other.session, sampling_session_seq_id=0,
                             model_path=sampler),
            await other.post("/create_sampling_session", session_id=mine.session, sampling_session_seq_id=1,
                             base_model="base"),
            await other.post("/asample", sampling_session_id=session, seq_id=0, prompt=prompt,
                             sampling_params={"max_tokens": 1}),
            await other.post("/create_model", session_id=mine.session, model_seq_id=7, base_model="base",
                             lora_config={"rank": 4}),
            await other.post("/load_weights", session_id=other.session, model_seq_id=0, path=path,
                             optimizer=False),
        ]  # fmt: skip
        for method, place in (
            ("GET", f"training_runs/{model}"), ("GET", f"training_runs/{model}/checkpoints"),
            ("DELETE", f"training_runs/{model}/checkpoints/weights/a"),
            ("POST", f"training_runs/{model}/checkpoints/weights/a/publish"),
            ("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl"), ("GET", f"samplers/{session}"),
            ("GET", f"sessions/{mine.session}"),
        ):  # fmt: skip
            answers.append(await http.request(method, f"/{place}", headers=other.headers))
        codes = [each.status_code for each in answers]
        assert codes == [410 if number in (8, 9) else 404 for number in range(len(answers))]
        unknown = await other.post("/retrieve_future", request_id="0" * 32)  # as if it were not there
        theirs = answers[8].text.replace(saved.json()["request_id"], "0" * 32)
        assert (unknown.status_code, unknown.text) == (410, theirs)
        for place in ("training_runs", "checkpoints"):
            listed = (await http.get(f"/{place}", headers=other.headers)).json()
            assert listed["cursor"]["total_count"] == 0
        # Published, it can be read, and still not be changed.
        base = f"/training_runs/{model}/checkpoints/weights/a"
        assert (await http.post(f"{base}/publish")).status_code == 200
        loaded = await other.post("/load_weights", session_id=other.session, model_seq_id=0, path=path,
                                  optimizer=False)  # fmt: skip
        assert (await other.result(loaded))["model_id"] == f"{other.session}:train:0"
        assert (await http.delete(base, headers=other.headers)).status_code == 404
        assert (await http.delete(f"{base}/publish")).status_code == 200
        assert (await other.post("/weights_info", tinker_path=path)).status_code == 404


PATHS = ("tinker://x/weights/../../etc", "tinker://../weights/a", "/etc/passwd", "file:///etc",
         "tinker://a/b/c", "tinker://x/weights/", "tinker://x/weights/a/b", "tinker:///weights/a", "",
         "tinker://x/weights/%2e")  # fmt: skip
NAMES = ("..", "../a", "a/b", "/etc", ".hidden", "a\0b", "", "a b", "-x" * 99, "é")


async def test_paths_and_names_that_lead_elsewhere_are_refused(service: Service):
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        for path in PATHS:
            made = {"session_id": client.session, "model_seq_id": 1, "optimizer": True}
            for answer in (
                await client.post("/load_weights", **made, path=path),
                await client.post("/weights_info", tinker_path=path),
                await client.post("/create_sampling_session", session_id=client.session,
                                  sampling_session_seq_id=0, model_path=path),
            ):  # fmt: skip
                assert answer.status_code in (400, 404), path
        for seq, name in enumerate(NAMES, 1):
            answer = await client.post("/save_weights", model_id=model, seq_id=seq, path=name)
            assert (await client.result(answer))["category"] == "user", name
    assert {path.name for path in service.state.iterdir()} == {"weights", "tinker.sqlite"}
    assert list((service.state / "weights").iterdir()) == []


KEYS = (
    {},
    {"x-api-key": ""},
    {"x-api-key": "sk-1"},
    {"x-api-key": "tml-"},
    {"authorization": "Bearer tml-a"},
)


async def test_no_route_answers_without_a_key(service: Service):
    async with service.working() as app:
        for headers in KEYS:
            async with asking(app, **headers) as http:
                for route in app._app.routes:
                    path = route.path.replace("{id}", "x").replace("{name:path}", "weights/a")
                    for method in route.methods - {"HEAD"}:
                        answer = await http.request(method, path, content=b"")
                        signed = "{token}" in path  # the address is the key
                        assert answer.status_code == (403 if signed else 401), (method, path)


@pytest.mark.parametrize(
    ("key", "taken"), [("tml-alice", True), ("tml-bob", True), ("tml-carol", False), ("tml-alic", False)]
)
def test_beyond_this_machine_keys_are_known(key: str, taken: bool):
    admits = ApiKeys(["tml-alice", "tml-bob"])
    scope = {"headers": [(b"x-api-key", key.encode())]}
    with nullcontext() if taken else pytest.raises(HttpError):
        admits(scope)
    with pytest.raises(HttpError):
        admits({"headers": scope["headers"] * 2})


BODIES = (
    b"", b"{", b"[]", b"null", b"\xff", b'{"session_id": 1}', b'{"seq_id": 1e400}', b'{"model_id": null}',
    b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    json.dumps({"model_id": "x" * 999, "seq_id": -1}).encode(),
    json.dumps({"request_id": "\0", "tinker_path": "\0", "session_id": "\0"}).encode(),
)  # fmt: skip


@pytest.mark.slow
async def test_no_body_and_no_path_breaks_a_route(service: Service):
    async with service.asked() as http:
        app_routes = http._transport.app._app.routes
        for route in app_routes:
            for method in route.methods - {"HEAD"}:
                for name in ("x", "%00", "..%2f..", "é" * 300, "a" * 5000):
                    path = (
                        route.path.replace("{id}", name).replace("{name:path}", name).removeprefix("/api/v1")
                    )
                    for body in BODIES if name == "x" else BODIES[:1]:
                        for kind in ("application/json", messages.TAKES):
                            answer = await http.request(
                                method, path, content=body, headers={"content-type": kind}
                            )
                            assert answer.status_code < 500, (method, path, body[:40], answer.text)
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        for query in ("limit=-1", "limit=x", "offset=9" * 40, "limit=10000", "project_id=a"):
            assert (await http.get(f"/training_runs?{query}")).status_code == 400
    assert not service.lines


@pytest.mark.slow
async def test_no_message_of_a_pass_breaks_the_service(service: Service):
    """Spoilt at random: an error of that call alone, or a pass, and never one of the server."""
    rng = random.Random(0)
    headers = {"content-type": messages.TAKES}
    async with service.asked() as http:
        client = await Client(http).begin()
        model, other = await client.model(0), await client.model(1)
        whole, taken = client.message(model, 1).SerializeToString(), 0
        for seq in range(1, 301):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                place = rng.randrange(len(data))
                match rng.randrange(4):
                    case 0:
                        data[place] ^= 1 << rng.randrange(8)
                    case 1:
                        del data[place : place + rng.randint(1, 9)]
                    case 2:
                        data[place:place] = rng.randbytes(rng.randint(1, 9))
                    case _:
                        data[place:place] = data[: rng.randrange(len(data))]
            answer = await http.post("/forward_backward", content=bytes(data), headers=headers)
            assert answer.status_code < 500, (seq, answer.text)
            taken += answer.status_code == 200
        assert taken  # some are only other numbers
        for number, wrong in ((0, 1), (1025, 1), (1, 0), (1, -1)):
            message = client.message(model, wrong)
            message.data.extend([message.data[0]] * (number - 1))
            if not number:
                del message.data[:]
            refused = await http.post(
                "/forward_backward", content=message.SerializeToString(), headers=headers
            )
            assert refused.status_code == 400 and "expected 1" in refused.text
        assert await client.result(await client.passed(other, 1)) == {"loss:sum": 2.0}
    assert not service.lines

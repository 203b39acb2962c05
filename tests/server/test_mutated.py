"""Right requests with something changed, by a seed: no server fails at one, and each is well afterwards.

What is sent to servers by schemathesis, from descriptions of their routes, is in benchmarks/hostile.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import numpy as np
import pytest
from tests.server.running import asking, guarded, says
from tests.server.scripted_trainer import LOSS, Park, opened
from tests.server.tinker.client import Client
from tests.server.tinker.conftest import Service

from silva.rendering.renderer import Renderer
from silva.server.tinker.messages import MESSAGES, TAKES
from silva.trainer.remote import ServedTrainer
from silva.types import OptimParams, Sample
from silva.wire import rpc

pytestmark = pytest.mark.slow
CHANGES = 60  # of each request
KINDS = {"content-type": "application/json"}
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -0.5, "", "\0", "\ud800", "../..", "a" * 5000, [], [[]],
    [None] * 300, {}, {"": {}}, "NaN", [1, "a", None], 
)  # fmt: skip
PIECES = (b"", b"\0", b"\xff\xfe", b"}", b"[" * 2000, b"NaN", b"1e999", b"-", b'"', b"\n", b"\\ud800")


def changed(body: bytes, rng: Random) -> bytes:
    """Another value in its JSON, or other bytes, perhaps more than once."""
    while True:
        body = _other_value(body, rng) if rng.random() < 0.6 else _other_bytes(body, rng)
        if rng.random() < 0.7:
            return body


def _other_value(body: bytes, rng: Random) -> bytes:
    """In the first of its lines that is an object of JSON."""
    lines = body.split(b"\n")
    for number, line in enumerate(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if places := [*_places(found)]:
            place, key = rng.choice(places)
            if rng.random() < 0.15:
                del place[key]
            else:
                place[key] = copy.deepcopy(rng.choice((*HOSTILE, *(p[k] for p, k in places))))
            lines[number] = json.dumps(found).encode()
            return b"\n".join(lines)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ():
        yield value, key
        yield from _places(value[key])


def _other_bytes(body: bytes, rng: Random) -> bytes:
    one, other = sorted(rng.randint(0, len(body)) for _ in range(2))
    match rng.randrange(4):
        case 0:
            return body[:one]
        case 1:
            return body[:other] + body[one:]
        case 2:
            return body[:one] + rng.choice(PIECES) + body[one + rng.randint(0, 3) :]
        case _:
            return body[:one] + bytes([rng.randrange(256)]) + body[one + 1 :]


async def no_failure(
    client: httpx2.AsyncClient, asked: list[tuple[str, str, bytes, str]], wanted: int = CHANGES
) -> None:
    """`asked`: method, path, body and its type of right requests."""
    for number, (method, path, body, kind) in enumerate(asked):
        rng = Random(number)
        for change in range(wanted):
            sent = changed(body, rng) if body else b""
            value = rng.choice(("", "-1", "a" * 999, "%00", "%ff"))
            where = path if body or change % 2 else f"{path}?{rng.choice(('owner', 'limit', 'x'))}={value}"
            answer = await client.request(method, where, content=sent, headers={"content-type": kind})
            assert answer.status_code < 500, (method, where, change, sent[:500], answer.text[:500])


async def test_inference(renderer: Renderer) -> None:
    hi = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2}
    takes = {"type": "object", "properties": {}}
    called = {"type": "function", "function": {"name": "f", "parameters": takes}}
    told = [*hi["messages"], {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "no"}]  # fmt: skip
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [65, 66], "max_tokens": 2, "logprobs": 1, "n": 2, "seed": 3,
                             "stop": ["a"], "stop_token_ids": [7], "temperature": 0.5, "top_p": 0.9,
                             "top_k": 3, "min_p": 0.1}),
        ("/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 1, "stream": True, "echo": True,
                             "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", hi | {"logprobs": True, "top_logprobs": 1, "n": 2}),
        ("/v1/chat/completions", hi | {"messages": told, "tools": [called], "stream": True}),
        ("/score", {"tokens": [65, 66, 67], "start": 1}),
        ("/load", {"version": 1, "path": "/nowhere", "digest": "d"}),
        ("/update_weights", {"weight_dir": "/nowhere", "version": 1}),
    ]  # fmt: skip
    app = guarded(says(renderer, "yes"), renderer)
    posts = [("POST", path, json.dumps(body).encode(), KINDS["content-type"]) for path, body in bodies]
    routes = [(m, r.path, b"", "") for r in app._app.routes for m in sorted({*r.methods} - {"HEAD"})]  # type: ignore[attr-defined]
    async with asking(app) as client:
        await no_failure(client, posts + routes)
        answer = await client.post("/v1/completions", content=posts[0][2])
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2


async def test_trainer(tmp_path: Path, rows: tuple[Sample, ...]) -> None:
    park = Park(tmp_path / "run")
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("score", (rows, frozenset({"logprobs"}))), ("forward_backward", (rows, LOSS)),
        ("optim_step", (OptimParams(1e-2), None)), ("publish", ()), ("save", (park.folder / "checkpoint",)),
    ]  # fmt: skip
    async with opened(park) as asked:
        kind = asked.client.headers["content-type"]
        where = f"/sessions/{asked.session}"
        sent = [("POST", where, rpc.encode(ServedTrainer, *call), kind) for call in calls]
        await no_failure(asked.client, [*sent, ("GET", "/alive", b"", "")])
        await no_failure(asked.client, [("POST", "/open", park.open(), kind)])
        await asked.open()
        answer: Any = await asked("forward_backward", rows, LOSS)
        assert answer.result["loss"] == 0.1 + 0.2


async def test_tinker(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with service.asked() as http:
        client = await Client(http).begin()
        model = await client.model()
        await client.result(await client.passed(model, 1))
        begun = {"session_id": client.session, "base_model": "base"}
        named = {"model_id": model, "seq_id": 2}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/create_session", {"tags": ["a"], "sdk_version": "0", "user_metadata": {"a": "b"}}),
            ("/create_model", begun | {"model_seq_id": 1, "lora_config": {"rank": 4, "seed": 1}}),
            ("/optim_step", named | {"adam_params": {"learning_rate": 1.0}}),
            ("/save_weights", named | {"path": "a"}),
            ("/save_weights_for_sampler", named | {"path": "b"}),
            ("/load_weights", named | {"path": f"tinker://{model}/weights/a", "optimizer": True}),
            ("/create_sampling_session", begun | {"sampling_session_seq_id": 1}),
            ("/asample", {"sampling_session_id": "x", "seq_id": 1, "num_samples": 1, "prompt": {"chunks": [
                {"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}),
            ("/retrieve_future", {"request_id": "x"}),
            ("/cancel_future", {"request_id": "x"}),
            ("/session_heartbeat", {"session_id": client.session}),
        ]  # fmt: skip
        sent = [("POST", path, json.dumps(body).encode(), KINDS["content-type"]) for path, body in bodies]
        message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=2, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([3, 4], np.int32).tobytes()
        for name, dtype, code in (("target_tokens", np.int64, 2), ("weights", np.float32, 1)):
            datum.loss_fn_inputs[name].dense = np.array([1, 2], dtype).tobytes()
            datum.loss_fn_inputs[name].dtype = code
        await no_failure(http, [*sent, ("POST", "/forward_backward", message.SerializeToString(), TAKES)])
        other = await Client(http).begin()
        mine = await other.model()
        found = await other.result(await other.passed(mine, 1))
        assert found["loss:sum"] == 2.0

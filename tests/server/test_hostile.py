"""Requests that have stopped other servers: each is refused, and the server is well after it."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from tests.server.running import asking, guarded

from silva.engines.local.engine import LocalEngine
from silva.rendering.renderer import Renderer
from silva.server import parsing

COMPLETE, CHAT, SCORE = "/v1/completions", "/v1/chat/completions", "/score"
OK = '"prompt": [65, 66], "max_tokens": 1'
HI = '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1'
SCORED = {"echo": True, "logprobs": 1, "max_tokens": 0}
LETTERS = {
    "not JSON": (COMPLETE, "{"),
    "no object": (COMPLETE, "[]"),
    "no body": (COMPLETE, ""),
    "not UTF-8": (COMPLETE, b'{"prompt": "\xff\xfe"}'),
    "UTF-16": (COMPLETE, f"{{{OK}}}".encode("utf-16")),
    "deep arrays": (COMPLETE, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "deep objects": (CHAT, '{"a":' * 100_000 + "1" + "}" * 100_000),
    "deep enough to be read": (COMPLETE, '{"prompt": ' + "[" * 500 + "]" * 500 + "}"),
    "many empty arrays": (COMPLETE, '{"prompt": [' + "[]," * 1_000_000 + "[]]}"),
    "NaN": (COMPLETE, f'{{{OK}, "temperature": NaN}}'),
    "infinity": (COMPLETE, f'{{{OK}, "temperature": Infinity}}'),
    "1e400": (COMPLETE, f'{{{OK}, "temperature": 1e400}}'),
    "-1e400": (COMPLETE, f'{{{OK}, "top_p": -1e400}}'),
    "a number of 5000 digits": (COMPLETE, f'{{{OK}, "seed": {"9" * 5000}}}'),
    "a number of 4000 digits": (COMPLETE, f'{{{OK}, "temperature": {"9" * 4000}}}'),
    "seed of 64 bits": (COMPLETE, f'{{{OK}, "seed": {2**63}}}'),
    "negative seed": (COMPLETE, f'{{{OK}, "seed": -1}}'),
    "negative temperature": (COMPLETE, f'{{{OK}, "temperature": -0.1}}'),
    "temperature that overflows": (COMPLETE, f'{{{OK}, "temperature": 1e-40}}'),
    "hot": (COMPLETE, f'{{{OK}, "temperature": 1e300}}'),
    "top_p 0": (COMPLETE, f'{{{OK}, "top_p": 0}}'),
    "top_p 2": (COMPLETE, f'{{{OK}, "top_p": 2}}'),
    "min_p 1": (COMPLETE, f'{{{OK}, "min_p": 1}}'),
    "top_k": (COMPLETE, f'{{{OK}, "top_k": {2**80}}}'),
    "negative top_k": (COMPLETE, f'{{{OK}, "top_k": -2}}'),
    "bool for int": (COMPLETE, '{"prompt": [65], "max_tokens": true}'),
    "bool for float": (COMPLETE, f'{{{OK}, "temperature": true}}'),
    "int for bool": (COMPLETE, f'{{{OK}, "echo": 1}}'),
    "float for int": (COMPLETE, '{"prompt": [65], "max_tokens": 1.0}'),
    "text for int": (COMPLETE, '{"prompt": [65], "max_tokens": "1"}'),
    "bool as token": (COMPLETE, '{"prompt": [65, true]}'),
    "float as token": (COMPLETE, '{"prompt": [65.0]}'),
    "null as token": (COMPLETE, '{"prompt": [null]}'),
    "max_tokens": (COMPLETE, '{"prompt": [65], "max_tokens": 1000000000000}'),
    "max_tokens 0": (COMPLETE, '{"prompt": [65], "max_tokens": 0}'),
    "negative max_tokens": (COMPLETE, '{"prompt": [65], "max_tokens": -1}'),
    "n": (COMPLETE, f'{{{OK}, "n": 1000000}}'),
    "n 0": (COMPLETE, f'{{{OK}, "n": 0}}'),
    "n in chat": (CHAT, f'{{{HI}, "n": 1000000}}'),
    "logprobs": (COMPLETE, f'{{{OK}, "logprobs": 1000000}}'),
    "logprobs of the prompt": (COMPLETE, f'{{{OK}, "prompt_logprobs": 20}}'),
    "10k stop strings": (COMPLETE, json.dumps({"prompt": [65], "stop": ["a"] * 10_000})),
    "a long stop string": (COMPLETE, json.dumps({"prompt": [65], "stop": "a" * 100_000})),
    "an empty stop string": (COMPLETE, f'{{{OK}, "stop": ""}}'),
    "10k stop tokens": (COMPLETE, json.dumps({"prompt": [65], "stop_token_ids": [1] * 10_000})),
    "empty prompt": (COMPLETE, '{"prompt": []}'),
    "empty text": (COMPLETE, '{"prompt": ""}'),
    "one prompt of two is empty": (COMPLETE, '{"prompt": [[65], []]}'),
    "mixed prompts": (COMPLETE, '{"prompt": [[65], "a"]}'),
    "prompts in prompts": (COMPLETE, '{"prompt": [[[65]]]}'),
    "no prompt": (COMPLETE, '{"max_tokens": 1}'),
    "object as prompt": (COMPLETE, '{"prompt": {"a": 1}}'),
    "2000 prompts": (COMPLETE, json.dumps({"prompt": [[65]] * 2000})),
    "1000 prompts of 100 completions": (COMPLETE, json.dumps({"prompt": [[65]] * 1000, "n": 100})),
    "2000 scored copies": (COMPLETE, json.dumps({"prompt": [[65] * 200] * 20, "n": 100, **SCORED})),
    "unknown token": (COMPLETE, '{"prompt": [65, 100000]}'),
    "huge token": (COMPLETE, f'{{"prompt": [{2**70}]}}'),
    "negative token": (COMPLETE, '{"prompt": [-1]}'),
    "a prompt of a million tokens": (COMPLETE, json.dumps({"prompt": [65] * 1_000_000})),
    "a prompt of a million objects": (COMPLETE, json.dumps({"prompt": [0.5] * 1_000_000})),
    "a long text": (COMPLETE, json.dumps({"prompt": "a" * 8_000_000})),
    "a surrogate": (COMPLETE, '{"prompt": "a\\ud800b"}'),
    "a surrogate in capitals": (COMPLETE, '{"prompt": "a\\uDFFFb"}'),
    "a surrogate as a field": (COMPLETE, f'{{{OK}, "\\udc00": 1}}'),
    "a surrogate in a message": (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "a schema to follow": (COMPLETE, f'{{{OK}, "structured_outputs": {{"regex": "(a+)+"}}}}'),
    "prompt embeddings": (COMPLETE, '{"prompt_embeds": "AAAA"}'),
    "a name of a megabyte": (COMPLETE, json.dumps({"prompt": [65], "a" * 1_000_000: 1})),
    "100k fields": (COMPLETE, json.dumps({f"f{i}": 1 for i in range(100_000)})),
    "stream options": (COMPLETE, f'{{{OK}, "stream_options": {{"include_usage": 1}}}}'),
    "score from 0": (SCORE, '{"tokens": [65, 66], "start": 0}'),
    "score beyond the end": (SCORE, '{"tokens": [65, 66], "start": 3}'),
    "score nothing": (SCORE, '{"tokens": [], "start": 1}'),
    "score unknown tokens": (SCORE, '{"tokens": [65, 999], "start": 1}'),
    "score negative tokens": (SCORE, '{"tokens": [65, -1], "start": 1}'),
    "a huge version": ("/load", f'{{"version": {10**30}}}'),
    "a pickle as weights": ("/update_weights", '{"weight_dir": "/etc/passwd"}'),
    "weights over the network": ("/update_weights", '{"weight_dir": null}'),
    "sleep with fields": ("/sleep", '{"level": 1}'),
}  # fmt: skip


async def well(client: Any) -> None:
    health = await client.get("/health")
    assert health.status_code == 200, health.text


@pytest.mark.slow
async def test_each_is_refused_and_the_server_is_well(engine: LocalEngine, renderer: Renderer) -> None:
    async with asking(guarded(engine, renderer)) as client:
        for name, (path, body) in LETTERS.items():
            answer = await client.post(path, content=body)
            await well(client)
            assert 400 <= answer.status_code < 500, (name, answer.text[:500])
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "code"} and len(error["message"]) <= 1000, name
            assert not engine.batch.waiting and engine.running == 0, name


AT_THE_LIMIT = (
    f'{{{OK}, "temperature": 1e-4}}',
    f'{{{OK}, "temperature": 1000}}',
    f'{{{OK}, "top_p": 1e-300, "min_p": 0.999999, "top_k": {2**31 - 1}}}',
    f'{{{OK}, "seed": {2**63 - 1}, "stop": ["{"a" * 1024}"], "stop_token_ids": [{2**31 - 1}]}}',
    f'{{{OK}, "n": 128, "max_tokens": 1}}',
    '{"prompt": [0], "max_tokens": 1048576}',
    '{"prompt": "\\ud83d\\ude00 \\u0000", "max_tokens": 1, "echo": true, "logprobs": 20}',
    json.dumps({"prompt": [[65]] * 100, "max_tokens": 0, "echo": True, "logprobs": 1}),
)


@pytest.mark.slow
async def test_the_limits_themselves_are_served(engine: LocalEngine, renderer: Renderer) -> None:
    async with asking(guarded(engine, renderer)) as client:
        for body in AT_THE_LIMIT:
            answer = await client.post(COMPLETE, content=body)
            await well(client)
            assert answer.status_code == 200, answer.text[:500]
            assert answer.json()["choices"]


def test_a_hostile_body_takes_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = b'{"prompt": [' + b"[]," * 2_700_000 + b"[]]}"  # 8 MiB that would become 150
    with pytest.raises(parsing.HttpError, match="too many arrays"):
        parsing.parse(body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB

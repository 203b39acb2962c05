"""A Tinker service whose samples come from servers of vLLM, which transformers and PEFT stand in for."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.json_server import serving_json
from tests.server.running import asking
from tests.server.tinker.client import Client

from silva.assembly import Assembly
from silva.commands import COMMANDS, serve_tinker
from silva.config.load import load
from silva.config.sections import TinyModel
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import load_model
from silva.registries import REGISTRIES
from silva.server.tinker import messages
from silva.server.tinker.keys import ApiKeys
from silva.server.tinker.quotas import Quotas
from silva.wire.guard import Guard
from silva.wire.listening import Bind

SHAPE = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "context": 64}


class StandIn:
    """vLLM's routes, and one model with the adapters that it was told of."""

    def __init__(self, shape: Mapping[str, Any] = SHAPE) -> None:
        self._shape = shape
        self.folders, self.asked = dict[str, str](), list[str]()
        self.seed = 0
        self.one = threading.Lock()  # torch has one seed

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "/v1/models":
                own = [{"id": name, "max_model_len": None} for name in self.folders]
                return {"data": [{"id": "base", "max_model_len": self._shape["context"]}, *own]}
            case "/version":
                return {"version": "0.32.0"}
            case "/ping":
                return {}
            case "/v1/load_lora_adapter":
                self.folders[body["lora_name"]] = body["lora_path"]
                return {}
            case "/v1/completions" if body["model"] in ("base", *self.folders):
                with self.one:
                    return self.completion(body)
        return None

    @torch.no_grad()
    def completion(self, body: Any) -> Any:
        """Greedy, whatever was asked for."""
        self.asked.append(body["model"])
        model: Any = load_model(TinyModel(**self._shape), seed=self.seed).model
        if body["model"] in self.folders:
            model = PeftModel.from_pretrained(model, self.folders[body["model"]])
        tokens = list(body["prompt"])
        for _ in range(body["max_tokens"]):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        rows = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        prompt: list[Any] = [None]
        for place, token in enumerate(body["prompt"][1:]):
            likeliest = rows[place].topk(body.get("prompt_logprobs", 1)).indices.tolist()
            prompt.append({str(each): {"logprob": float(rows[place, each])} for each in (token, *likeliest)})
        sampled = tokens[len(body["prompt"]) :]
        numbers = [0.0] * len(sampled)
        tops = [{f"token_id:{token}": 0.0} for token in sampled]
        return {"choices": [{"token_ids": sampled, "finish_reason": "length", "prompt_logprobs": prompt,
                             "logprobs": {"token_logprobs": numbers, "top_logprobs": tops}}],
                "usage": {}}  # fmt: skip


def serving(stand_in: StandIn) -> AbstractContextManager[str]:
    def answer(path: str, body: Any, _: Message) -> tuple[int, Any]:
        found = stand_in.answer(path.partition("?")[0], body)
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    return serving_json(answer)


def made(folder: Path, url: str, stack: ExitStack, *options: str) -> Any:
    """The server of a command line."""
    model = [f"--model.{name}={value}" for name, value in SHAPE.items()]
    engine = ["--engine.type=http", f'--engine.urls=["{url}"]', "--engine.dialect=vllm"]
    given = COMMANDS["serve"].read("serve", ["--state", str(folder), *options])
    keys = ["--model.type=tiny", "--environments.0.type=bandit"]
    config = load([*keys, *model, *engine], REGISTRIES).config
    parts = Assembly(config, say=print)
    stack.callback(parts.close)
    return serve_tinker._server(parts, "tiny", given, Quotas())


def told(content: bytes) -> Any:
    message: Any = messages.MESSAGES["SampleResponse"]()
    message.ParseFromString(content)
    return message


@pytest.mark.slow
def test_samples_come_from_vllm_with_the_adapters_of_the_service(tmp_path: Path) -> None:
    """Log-probabilities of a prompt are those of a pass, though transformers and PEFT compute them."""

    async def work(server: Any) -> None:
        app = Guard(server.app, Bind(), key="", log=print, max_body=1 << 24,
                    takes=("application/json", messages.TAKES), admits=ApiKeys([]))  # fmt: skip
        async with server.working(), asking(app, **{"x-api-key": "tml-a"}) as http:
            http.base_url = "http://localhost/api/v1"
            client = await Client(http).begin()
            body = {"session_id": client.session, "base_model": "tiny"}
            refused = await client.post(
                "/create_model", **body, model_seq_id=1, lora_config={"rank": 4, "train_unembed": True}
            )
            assert "train_unembed" in (await client.result(refused))["error"]
            lora = {"rank": 4, "seed": 1, "train_unembed": False}
            model = (
                await client.result(
                    await client.post("/create_model", **body, model_seq_id=0, lora_config=lora)
                )
            )["model_id"]
            for seq in (1, 3):
                await client.result(await client.passed(model, seq))
                await client.result(await client.step(model, seq + 1, lr=0.05))
            name = (
                await client.result(
                    await client.post("/save_weights_for_sampler", model_id=model, seq_id=5,
                                      sampling_session_seq_id=0)
                )
            )["sampling_session_id"]  # fmt: skip
            passed = await client.passed(model, 6, forward=True, targets=(4, 9))
            await client.result(passed)
            answer = await client.post("/retrieve_future", request_id=passed.json()["request_id"])
            output: Any = messages.MESSAGES["ForwardBackwardOutput"]()
            output.ParseFromString(answer.content)
            expected = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)

            asked = {"sampling_session_id": name, "num_samples": 1, "sampling_params": {"max_tokens": 3},
                     "prompt": {"chunks": [{"tokens": [3, 4, 9]}]}, "prompt_logprobs": True,
                     "topk_prompt_logprobs": 3}  # fmt: skip
            found = await client.post("/asample", seq_id=1, **asked)
            answer = await client.post("/retrieve_future", request_id=found.json()["request_id"])
            of_adapter = told(answer.content)
            scores = np.frombuffer(of_adapter.prompt_logprobs, np.float32)
            np.testing.assert_allclose(scores[1:], expected, atol=1e-5)
            top = np.frombuffer(of_adapter.topk_prompt_logprobs.logprobs, np.float32).reshape(3, 3)
            assert (np.diff(top[1:], axis=1) <= 0).all() and (top[1:, 0] >= scores[1:]).all()
            assert len(of_adapter.sequences[0].tokens) == 3 * 4

            base = await client.post(
                "/create_sampling_session", session_id=client.session, sampling_session_seq_id=1,
                base_model="tiny",
            )  # fmt: skip
            asked["sampling_session_id"] = base.json()["sampling_session_id"]
            found = await client.post("/asample", seq_id=1, **asked)
            answer = await client.post("/retrieve_future", request_id=found.json()["request_id"])
            plain = np.frombuffer(told(answer.content).prompt_logprobs, np.float32)
            assert np.abs(plain[1:] - expected).max() > 0.01

    stand_in = StandIn()
    with serving(stand_in) as url, ExitStack() as stack:
        server = made(tmp_path, url, stack)
        asyncio.run(work(server))
    assert {*stand_in.folders} < {*stand_in.asked} and len(stand_in.folders) == 1
    with serving(stand_in) as url, ExitStack() as stack, pytest.raises(CapabilityError, match="--full 1"):
        made(tmp_path / "other", url, stack, "--full", "1")
    stand_in.seed = 1
    with serving(stand_in) as url, ExitStack() as stack, pytest.raises(ConfigError, match="the same model"):
        made(tmp_path / "third", url, stack)


LAUNCHED = """#!{python}
import http.server, json, os, sys
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
print(json.dumps(sys.argv), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"null")
        known = self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        content = {{"data": [{{"id": "m", "max_model_len": 64}}], "version": "0.32.0", "is_paused": False}}
        if "completions" in self.path:
            prompt = [None] + [{{str(token): {{"logprob": -1.0}}}} for token in body["prompt"][1:]]
            numbers = {{"token_logprobs": [0.0], "top_logprobs": [{{"token_id:7": 0.0}}]}}
            content = {{"choices": [{{"token_ids": [7], "finish_reason": "length", "prompt_logprobs": prompt,
                                      "logprobs": numbers}}], "usage": {{}}}}
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    do_GET = do_POST
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def test_the_server_starts_a_vllm_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the adapters of its runs and a key, and asks that."""
    python, model, said = tmp_path / "python", tmp_path / "model", list[str]()
    python.write_text(LAUNCHED.format(python=sys.executable))
    python.chmod(0o755)
    loaded = load_model(TinyModel(**SHAPE), seed=0)  # type: ignore[arg-type]
    loaded.model.save_pretrained(model)
    loaded.tokenizer.save_pretrained(model)
    monkeypatch.setattr(serve_tinker, "say", said.append)
    given = COMMANDS["serve"].read("serve", ["--state", str(tmp_path / "state")])
    engine = ["--engine.type=vllm", f"--engine.python={python}", "--engine.probe_tolerance=100"]
    keys = [f"--model.name={model}", *engine, "--engine.patience=20", "--environments.0.type=bandit"]
    with ExitStack() as stack:
        parts = Assembly(load(keys, REGISTRIES).config, say=print)
        stack.callback(parts.close)
        parts.engine = serve_tinker._launched_engine(parts, stack)
        serve_tinker._server(parts, "m", given, Quotas())
    (started,) = [json.loads(line) for line in said if line.startswith("[")]
    for words in (["--max-lora-rank", "64", "--max-loras", "8"], ["--model", str(model)]):
        at = started.index(words[0])
        assert started[at : at + len(words)] == words

"""`silva serve tinker` as a process, with a real model: killed and started again, shared and alone."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.server.tinker.client import free_port

tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
STEPS = 24
TINY = 'model = {type = "tiny", layers = 1, width = 64, context = 128}\n'


class Serving:
    """A server that can be killed and started again at the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        (folder / "tiny.toml").write_text(TINY)

    def start(self) -> None:
        self.log = self.folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "silva", "serve", "tinker", "@", "tiny.toml", "--state", "state",
                 "--port", str(self.port), *self.options],
                cwd=self.folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        request = urllib.request.Request(f"{self.address}/api/v1/healthz", headers={"X-API-Key": "tml-a"})
        for _ in range(1200):
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError("the server does not listen")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def weights(self, path: str) -> dict[str, np.ndarray]:
        """Of a checkpoint, by its file."""
        model, _, name = path.removeprefix("tinker://").partition("/")
        with sqlite3.connect(f"file:{self.folder}/state/tinker.sqlite?mode=ro", uri=True) as db:
            query = "SELECT folder FROM checkpoints WHERE model = ? AND name = ?"
            (folder,) = db.execute(query, (model, name)).fetchone()
        (file,) = (self.folder / "state" / "weights" / folder).glob("*model.safetensors")
        return load_file(file)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Serving]:
    folder.mkdir()
    serving = Serving(folder, *options)
    serving.start()
    try:
        yield serving
    finally:
        serving.kill()


FULL = 3  # the seed of the run that trains all weights


def train(serving: Serving, key: str, seed: int, at_step=lambda n: None) -> str:
    """A run of its own data; the path of what it has learned."""
    service = tinker.ServiceClient(base_url=serving.address, api_key=key)
    rank = 0 if seed == FULL else 4
    with closing(service.holder):  # asks nothing of a server that may be gone
        run = service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed).result()
        rng, futures = np.random.default_rng(seed), []
        for n in range(STEPS):
            tokens = rng.integers(0, 60, (3, 9))
            data = [
                types.Datum(
                    model_input=types.ModelInput.from_ints(row[:-1].tolist()),
                    loss_fn_inputs={"target_tokens": row[1:].copy(), "weights": np.ones(8, np.float32)},
                )
                for row in tokens
            ]
            futures.append(run.forward_backward(data, "cross_entropy"))
            futures.append(run.optim_step(types.AdamParams(learning_rate=1e-2)))
            if n % 4 == 3:
                futures[-1].result()
            at_step(n)
        for future in futures:
            future.result()
        assert sum(future.result().metrics.get("loss:sum", 0) for future in futures[-2:]) > 0
        return run.save_state("end").result().path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, np.ndarray]]:
    """The weights of runs that had a server for themselves."""
    with served(tmp_path_factory.mktemp("alone") / "server") as serving:
        found = {seed: train(serving, "tml-a", seed) for seed in (1, 2, FULL)}
        serving.kill()
        return {seed: serving.weights(path) for seed, path in found.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].tobytes() == expected[name].tobytes() for name in expected
    )


def test_runs_of_several_clients_have_the_weights_that_they_would_have_alone(alone, tmp_path: Path):
    """Byte for byte, with a server that is killed twice while both train, and started again."""
    assert any(array.any() for name, array in alone[1].items() if "lora_B" in name)
    assert not same(alone[1], alone[2])
    with served(tmp_path / "server") as serving:

        def kill_at(n: int) -> None:
            if n in (5, 14):
                serving.kill()
                serving.start()

        clients = ThreadPoolExecutor(3)
        first = clients.submit(train, serving, "tml-a", 1, kill_at)
        second = clients.submit(train, serving, "tml-b", 2)
        third = clients.submit(train, serving, "tml-c", FULL)
        paths = {1: first.result(300), 2: second.result(300), FULL: third.result(300)}
        serving.kill()
        assert {seed: same(serving.weights(path), alone[seed]) for seed, path in paths.items()} == {
            1: True, 2: True, FULL: True
        }  # fmt: skip
        assert "tinker: " in serving.log.read_text() and "Error" not in serving.log.read_text()


def test_what_is_trained_is_what_is_sampled(tmp_path: Path):
    """A sampler has the log-probabilities of the pass that saved it, and prefers what was learned."""
    with served(tmp_path / "server") as serving:
        service = tinker.ServiceClient(base_url=serving.address, api_key="tml-a")
        adapters, all_weights = (_sampled(service, rank) for rank in (16, 0))
        one, other = adapters(), all_weights()
        assert one != other and [adapters(), all_weights(), adapters()] == [one, other, one]


def _sampled(service, rank: int):
    """What gives the prompt's log-probabilities once more."""
    run = service.create_lora_training_client(base_model="tiny", rank=rank, seed=1).result()
    assert run.get_info().is_lora is (rank > 0)
    tokens = run.get_tokenizer().encode("abcdef")
    assert len(set(tokens)) == 6
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)
        },
    )  # fmt: skip
    for _ in range(120):
        run.forward_backward([datum], "cross_entropy")
        step = run.optim_step(types.AdamParams(learning_rate=1e-2))
    step.result()
    passed = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens)
    scored = sampler.compute_logprobs(prompt).result()
    assert scored[0] is None and np.abs(np.array(scored[1:]) - passed).max() < 1e-5
    base = service.create_sampling_client(base_model="tiny").result()
    assert sum(scored[1:]) > sum(base.compute_logprobs(prompt).result()[1:]) + 5
    greedy = types.SamplingParams(max_tokens=len(tokens) - 2, temperature=0.0)
    found = sampler.sample(types.ModelInput.from_ints(tokens[:2]), 1, greedy).result().sequences[0]
    assert found.tokens == tokens[2:]
    top = sampler.sample(prompt, 1, greedy, topk_prompt_logprobs=3).result().topk_prompt_logprobs
    assert [each[0][0] for each in top[1:]] == tokens[1:]
    assert np.abs([each[0][1] - value for each, value in zip(top[1:], scored[1:], strict=True)]).max() < 1e-6
    for each in (base, sampler):
        _check_places(each, prompt)
    spoken = types.SamplingParams(max_tokens=20, temperature=0.0, stop=["d"])
    stopped = sampler.sample(types.ModelInput.from_ints(tokens[:1]), 1, spoken).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (tokens[1:4], "stop")

    return lambda: sampler.compute_logprobs(prompt).result()


def _check_places(sampler, prompt) -> None:
    """What is drawn in a place has the log-probability that it has if it is named."""
    params = types.SamplingParams(max_tokens=3, seed=1)
    found = sampler.sample(prompt, 1, params, prompt_alt_tokens_k=8, topk_sample_logprobs=3).result()
    drawn = found.prompt_alt_tokens
    again = sampler.sample(prompt, 1, params, target_prompt_logprobs=drawn.tokens).result()
    assert again.target_prompt_logprobs.data == drawn.logprobs.data and len(drawn.logprobs.data) == 40
    (sequence,) = found.sequences
    likeliest = [dict(each) for each in sequence.topk_logprobs]
    assert [len(each) for each in likeliest] == [3] * len(sequence.tokens)
    for token, logprob, each in zip(sequence.tokens, sequence.logprobs, likeliest, strict=True):
        assert logprob == pytest.approx(each.get(token, logprob), abs=1e-5)
        assert logprob <= max(each.values()) + 1e-5


def test_the_state_is_plain_rows(tmp_path: Path):
    """No key, and nothing that has to be executed to be read. The model has the name that it was given."""
    with served(tmp_path / "server", "--as", "Org/Model") as serving:
        service = tinker.ServiceClient(base_url=serving.address, api_key="tml-secret")
        run = service.create_lora_training_client(base_model="Org/Model", rank=4, seed=1).result()
        assert run.get_info().model_data.model_name == "Org/Model" and run.get_tokenizer().encode("a")
        serving.kill()
        files = [path for path in (tmp_path / "server" / "state").rglob("*") if path.is_file()]
        assert not any(b"tml-secret" in path.read_bytes() for path in files)
        assert {path.suffix for path in files} <= {".sqlite", ".sqlite-wal", ".sqlite-shm", ".json", ".jinja"}
        assert json.loads((tmp_path / "server/state/tokenizer/tokenizer_config.json").read_text())

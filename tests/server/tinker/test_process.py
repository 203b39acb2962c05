"""`silva serve tinker` as a process, with a real model: killed and started again, shared and alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import chaos_tinker
import numpy as np
import pytest
from chaos_tinker import Fault, Serving
from tests.server.tinker.test_vllm import StandIn
from tests.server.tinker.test_vllm import serving as vllm

tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    return chaos_tinker.alone(tmp_path_factory.mktemp("alone") / "server")


def test_runs_of_several_clients_have_the_weights_that_they_would_have_alone(alone, tmp_path: Path):
    """Byte for byte, though the server, one of them, and then both are killed while they train."""
    first, second, full = alone.values()
    assert full.keys() == {"model.safetensors", "optimizer.safetensors"}
    assert first.keys() == {"adapter_model.safetensors", "optimizer.safetensors"}
    assert all(first[name] != second[name] for name in first)
    faults = [Fault("server", 1, 3), Fault("client", 3, 10), Fault("both", 1, 17)]
    found = chaos_tinker.together(tmp_path / "server", faults)
    assert {seed: files == alone[seed] for seed, files in found.items()} == dict.fromkeys(alone, True)
    log = (tmp_path / "server" / "log").read_text()
    assert log.count("listening at") == 3 and "Error" not in log


@pytest.mark.parametrize("way", ["dp_replicate", "dp_shard"])
def test_two_ranks_have_the_same_bits_again(tmp_path: Path, way: str):
    """A pass of three rows is shared, and one of one row leaves a rank idle. With parts of the model (vLLM
    samples then) the second run goes on after a kill."""
    ranks = ["--trainer.ranks", "2", f"--trainer.parallel.{way}", "2"]
    with ExitStack() as stack:
        if way == "dp_shard":
            url = stack.enter_context(vllm(StandIn({"layers": 1, "width": 64, "context": 128})))
            ranks += ["--engine.type=http", "--engine.dialect=vllm", f'--engine.urls=["{url}"]']
        serving = stack.enter_context(Serving(tmp_path / "server", *ranks))

        def trained(killed: bool) -> str:
            service = tinker.ServiceClient(base_url=serving.address, api_key="tml-a")
            run = service.create_lora_training_client("tiny", 4, seed=1, train_unembed=False).result()
            rng = np.random.default_rng(0)
            for step in range(6):
                data = [
                    types.Datum(
                        model_input=types.ModelInput.from_ints(row[:-1].tolist()),
                        loss_fn_inputs={"target_tokens": row[1:].copy(), "weights": np.ones(8, np.float32)},
                    )
                    for row in rng.integers(0, 60, (1 if step == 2 else 3, 9))
                ]
                run.forward_backward(data, "cross_entropy")
                stepped = run.optim_step(types.AdamParams(learning_rate=1e-2))
                if killed and step == 3:
                    stepped.result()
                    serving.kill()
                    serving.start()
            stepped.result()
            return run.save_state("end").result().path

        paths = [trained(killed) for killed in (False, way == "dp_shard")]
        serving.kill()
        one, other = (serving.files(path) for path in paths)
        assert one == other and one.keys() == {"adapter_model.safetensors", "optimizer.safetensors"}


def test_what_is_trained_is_what_is_sampled(tmp_path: Path):
    """A sampler has the log-probabilities of the pass that saved it, and prefers what was learned."""
    with Serving(tmp_path / "server") as serving:
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
    with Serving(tmp_path / "server", "--as", "Org/Model") as serving:
        service = tinker.ServiceClient(base_url=serving.address, api_key="tml-secret")
        run = service.create_lora_training_client(base_model="Org/Model", rank=4, seed=1).result()
        assert run.get_info().model_data.model_name == "Org/Model" and run.get_tokenizer().encode("a")
        serving.kill()
        files = [path for path in (tmp_path / "server" / "state").rglob("*") if path.is_file()]
        assert not any(b"tml-secret" in path.read_bytes() for path in files)
        assert {path.suffix for path in files} <= {".sqlite", ".sqlite-wal", ".sqlite-shm", ".json", ".jinja"}
        assert json.loads((tmp_path / "server/state/tokenizer/tokenizer_config.json").read_text())

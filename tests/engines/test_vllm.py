"""vLLM: how it is launched, and what its stock server gives (marked `vllm`: needs .peers/vllm)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests import moe

from silva.config.sections import Lora, PretrainedModel
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.vllm import VllmDialect
from silva.engines.remote.weights import PROBE
from silva.engines.vllm.settings import VllmEngineSettings
from silva.errors import CapabilityError, ConfigError
from silva.models.loading import LoadedModel, load_model
from silva.models.routing import Routing
from silva.models.snapshots import weight_folder
from silva.types import Completion, SamplingParams, Snapshot
from silva.wire.transport import Peer

PYTHON = Path(__file__).parents[2] / ".peers/vllm/bin/python"
PROMPT = list(b"The forest shares every token once, and")  # as token ids: any will do
STARTS = 400  # seconds
Record = Callable[[str, Any], None]


def test_the_command_has_what_the_client_needs_and_never_the_key() -> None:
    arguments, environment = VllmEngineSettings().command("/models/m", "127.0.0.1", 8000, "secret")
    assert arguments == [
        "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m",
        "--host", "127.0.0.1", "--port", "8000", "--dtype", "auto", "--max-num-seqs", "64",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "20", "--generation-config", "vllm",
        "--enable-prompt-tokens-details",
        "--worker-extension-cls", "silva_vllm.Extension", "--gpu-memory-utilization", "0.9",
    ]  # fmt: skip
    assert environment == {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_API_KEY": "secret", "PYTHONPATH": environment["PYTHONPATH"],
    }  # fmt: skip
    (extension,) = Path(environment["PYTHONPATH"]).glob("*.py")  # and nothing that hides a module of vLLM's
    assert extension.name == "silva_vllm.py"


def test_every_setting_becomes_an_argument() -> None:
    settings = VllmEngineSettings(
        python="/v/bin/python", dtype="float32", context=512, max_concurrent=8, tensor_parallel=2,
        data_parallel=4, kv_cache_gib=3, enforce_eager=True, top_logprobs=5,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3}, arguments=("--block-size", "32"),
    )  # fmt: skip
    arguments, environment = settings.command("m", "::1", 1, "")
    assert arguments[0] == "/v/bin/python"
    assert arguments[9:] == [
        "--dtype", "float32", "--max-num-seqs", "8", "--logprobs-mode", "processed_logprobs",
        "--max-logprobs", "5", "--generation-config", "vllm", "--enable-prompt-tokens-details",
        "--worker-extension-cls", "silva_vllm.Extension",
        "--max-model-len", "512", "--tensor-parallel-size", "2", "--data-parallel-size", "4",
        "--enforce-eager", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}',
        "--no-enable-chunked-prefill", "--block-size", "32",
    ]  # fmt: skip
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3" and "VLLM_API_KEY" not in environment


def test_experts_are_recorded_if_they_are_replayed() -> None:
    plain, same = VllmEngineSettings().command("m", "h", 1, "")
    arguments, environment = VllmEngineSettings().command("m", "h", 1, "", routes=True)
    assert arguments == [*plain, "--enable-return-routed-experts"]
    assert environment == same | {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_adapters_are_loaded_unless_they_are_to_be_merged() -> None:
    plain, same = VllmEngineSettings().command("m", "h", 1, "")
    lora = Lora(rank=20, targets=("q_proj", "v_proj"))
    arguments, environment = VllmEngineSettings().command("m", "h", 1, "", lora=lora)
    assert arguments == [
        *plain, "--enable-lora", "--max-lora-rank", "32", "--max-loras", "2", "--max-cpu-loras", "8",
        "--lora-target-modules", "q_proj", "v_proj",
    ]  # fmt: skip
    assert environment == same | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    of_runs, _ = VllmEngineSettings().command("m", "h", 1, "", lora=lora, several=True)
    room = of_runs.index("--max-loras")
    assert of_runs[room : room + 4] == ["--max-loras", "8", "--max-cpu-loras", "64"]
    assert VllmEngineSettings(adapters=False).command("m", "h", 1, "", lora=lora) == (plain, same)
    with pytest.raises(ConfigError, match=r"engine\.adapters = false: runs are adapters"):
        VllmEngineSettings(adapters=False).command("m", "h", 1, "", lora=lora, several=True)
    arguments, environment = VllmEngineSettings().command("m", "h", 1, "", sent=True)
    assert arguments == [*plain, "--weight-transfer-config", '{"backend": "nccl"}'] and environment == same
    for wrong in (Lora(rank=999), Lora(targets=("lm_head",))):
        with pytest.raises(
            ConfigError, match=r"model\.lora\..*: got (999|lm_head), .*engine\.adapters = false"
        ):
            VllmEngineSettings().command("m", "h", 1, "", lora=wrong)


@pytest.mark.parametrize("argument", ["--api-key=x", "--logprobs_mode", "--trust-remote-code"])
def test_what_the_client_or_safety_depends_on_cannot_be_overruled(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.arguments: got --.*, which Silva sets itself"):
        VllmEngineSettings(arguments=(argument, "raw_logprobs")).command("m", "h", 1, "")


def test_wrong_settings_are_errors() -> None:
    for wrong in ({"gpu_memory": 1.5}, {"top_logprobs": 1}, {"kv_cache_gib": 0}, {"tensor_parallel": 0}):
        with pytest.raises(ValidationError):
            VllmEngineSettings(**wrong)


def test_in_one_process_there_is_no_vllm() -> None:
    with pytest.raises(CapabilityError, match=r'placement\.type = "services"'):
        VllmEngineSettings().build(None)  # type: ignore[arg-type]


def test_its_client_speaks_vllm_and_knows_the_vocabulary() -> None:
    config = SimpleNamespace(model=SimpleNamespace(lora=Lora()), trainer=SimpleNamespace(transfer="nccl"))
    context = SimpleNamespace(renderer=SimpleNamespace(vocabulary=77), say=print, config=config)
    peers = [Peer("http://127.0.0.1:1", name="inference")]
    engine = VllmEngineSettings(top_logprobs=5).client(peers, context)  # type: ignore[arg-type]
    dialect = engine._dialect  # type: ignore[attr-defined]
    assert (type(dialect), dialect._vocabulary, dialect._top) == (VllmDialect, 77, 5)
    assert dialect._lora and dialect._sent


@pytest.fixture(scope="module")
def server(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address and the folder of its model."""
    if not PYTHON.exists():
        pytest.skip("needs vLLM: make peers PEERS=vllm")
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    smollm2.model.save_pretrained(model)
    smollm2.tokenizer.save_pretrained(model)
    with serving(folder, model) as address:
        yield address, model


@contextmanager
def serving(
    folder: Path, model: Path, *, workers: Path | None = None, context: int = 256, **command: Any
) -> Iterator[str]:
    """A server's address; its log is in the folder.

    Args:
        workers: a module with another extension of the workers.
        command: options of `VllmEngineSettings.command`.
    """
    settings = VllmEngineSettings(
        python=str(PYTHON), dtype="float32", context=context, max_concurrent=8, kv_cache_gib=1,
        enforce_eager=True, arguments=("--block-size", "32"),
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments, environment = settings.command(str(model), "127.0.0.1", port, "secret", **command)
    if workers:
        arguments[arguments.index("silva_vllm.Extension")] = f"{workers.stem}.Extension"
        environment["PYTHONPATH"] += f"{os.pathsep}{workers.parent}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            arguments, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        print((folder / "log").read_text()[-4000:])
        raise
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def logprobs(model: torch.nn.Module, tokens: list[int], start: int) -> torch.Tensor:
    """[T, V] of transformers, for tokens[start:]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1)


def furthest(found: tuple[float, ...], expected: torch.Tensor, tokens: tuple[int, ...]) -> float:
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return max(abs(a - b) for a, b in zip(found, own, strict=True))


async def tokens_generated(address: str) -> float:
    """Tokens so far, as the server counts them."""
    text = await asyncio.to_thread(lambda: urlopen(f"{address}/metrics", timeout=30).read().decode())
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("vllm:generation_tokens_total")
    )


async def check_samples(
    engine: HttpEngine, smollm2: LoadedModel, record_property: Callable[[str, Any], None]
) -> None:
    assert engine.capabilities.context == 256 and engine.capabilities.loads == {"folder"}
    params = SamplingParams(24, seed=(1 << 63) - 1)
    first, again = await engine.sample(PROMPT, params), await engine.sample(PROMPT, params)
    assert first.tokens == again.tokens and first.stop_reason == "length"
    assert first.raw_logprobs == first.logprobs and first.versions == (0,) * 24
    assert again.cached_tokens == 32
    expected = logprobs(smollm2.model, [*PROMPT, *first.tokens], len(PROMPT))
    mismatch = furthest(first.logprobs, expected, first.tokens)
    record_property("mismatch of sampled tokens", mismatch)
    assert mismatch < 1e-3
    entropies = -(expected.exp() * expected).sum(-1)
    off = (torch.tensor(first.entropies) - entropies).abs()
    record_property("entropies off by", off.max().item())
    assert off.max() < 2.0 and off.mean() < 0.5  # an estimate from 20 of 49,152

    scores = await engine.score([*PROMPT, *first.tokens], len(PROMPT))
    assert furthest(scores.logprobs, expected, first.tokens) < 1e-3
    assert list(scores.likeliest) == expected.argmax(-1).tolist()

    cooler = SamplingParams(24, temperature=0.5, seed=5)
    found = await engine.sample(PROMPT, cooler)
    with torch.no_grad():
        logits = smollm2.model(torch.tensor([[*PROMPT, *found.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    cooled = (logits.float() / 0.5).log_softmax(-1)
    assert furthest(found.logprobs, cooled, found.tokens) < 1e-3

    stop = first.tokens[3]
    stopped = await engine.sample(PROMPT, SamplingParams(24, seed=params.seed, stop_token_ids=(stop,)))
    assert stopped.tokens == first.tokens[: first.tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop_token"
    piece = smollm2.tokenizer.decode(first.tokens[5])
    by_text = await engine.sample(PROMPT, SamplingParams(24, seed=params.seed, stop=(piece,)))
    assert by_text.stop_reason == "stop_string" and len(by_text.tokens) <= 6
    assert by_text.tokens == first.tokens[: len(by_text.tokens)]
    full = await engine.sample(PROMPT * 6, SamplingParams(99))
    assert (len(full.tokens), full.stop_reason) == (256 - 6 * len(PROMPT), "context_overflow")
    greedy = await engine.sample(PROMPT, SamplingParams(2, temperature=0.0))
    assert greedy.logprobs == greedy.entropies == (0.0, 0.0) and greedy.raw_logprobs[0] < 0


async def check_load(
    engine: HttpEngine,
    address: str,
    model: Path,
    folder: Path,
    smollm2: LoadedModel,
    record_property: Callable[[str, Any], None],
) -> None:
    """Four requests run on over the load: from some token on they come from the new weights, in `folder`."""
    shutil.copytree(model, folder)
    weights, numbers = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "mlp" in name or "embed" in name:  # the head shares its weights with the embeddings
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=numbers)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    snapshot = Snapshot(1, weight_folder(folder))  # its digest takes longer than the requests may
    before = await engine.sample(PROMPT, SamplingParams(24, seed=1))
    running = [asyncio.ensure_future(engine.sample(PROMPT, SamplingParams(210, seed=i))) for i in range(4)]
    start = await tokens_generated(address)
    while await tokens_generated(address) < start + 16:
        pass
    assert not any(each.done() for each in running)
    began = time.monotonic()
    await engine.load(snapshot)
    record_property("seconds of a load", time.monotonic() - began)
    over = await asyncio.gather(*running)
    after = await engine.sample(PROMPT, SamplingParams(24, seed=1))
    assert after.versions == (1,) * 24
    moved = max(abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True))
    record_property("log-probabilities moved by", moved)
    assert moved > 1e-2

    changed = type(smollm2.model).from_pretrained(folder, dtype=torch.float32).eval()
    expected = logprobs(changed, [*PROMPT, *after.tokens], len(PROMPT))
    mismatch = furthest(after.logprobs, expected, after.tokens)
    record_property("mismatch after the load", mismatch)
    assert mismatch < 1e-3
    probe = await engine.score(PROBE, 1)
    assert furthest(probe.logprobs, logprobs(changed, list(PROBE), 1), PROBE[1:]) < 1e-3
    for found in over:
        assert len(found.tokens) == 210 and set(found.versions) == {0}
        old = logprobs(smollm2.model, [*PROMPT, *found.tokens[:2]], len(PROMPT))
        assert furthest(found.logprobs[:2], old, found.tokens[:2]) < 1e-3
        expected = logprobs(changed, [*PROMPT, *found.tokens], len(PROMPT))
        assert furthest(found.logprobs[-5:], expected[-5:], found.tokens[-5:]) < 1e-3


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_samples_scores_and_loads(
    server: tuple[str, Path],
    smollm2: LoadedModel,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """One test, because starting it takes a minute."""
    address, model = server

    async def work() -> None:
        engine = HttpEngine(
            [Peer(address, name="inference", key="secret")],
            ClientSettings(patience=STARTS),
            VllmDialect(vocabulary=smollm2.model.config.vocab_size, reload="silva_reload"),
        )
        began = time.monotonic()
        await engine.connect()
        record_property("seconds until it answers", time.monotonic() - began)
        try:
            await check_samples(engine, smollm2, record_property)
            await check_load(engine, address, model, tmp_path / "changed", smollm2, record_property)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(work(), STARTS + 200))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM records experts with Triton, on a GPU only")
def test_vllm_tells_the_experts_that_transformers_chooses(tmp_path: Path) -> None:
    """With a dense layer between the others, and the second prompt from the cache."""
    if not PYTHON.exists():
        pytest.skip("needs vLLM: make peers PEERS=vllm")
    model = moe.folder(
        tmp_path / "model", hidden_size=64, head_dim=32, num_key_value_heads=2, num_hidden_layers=3,
        mlp_only_layers=[1], max_position_embeddings=256, moe_intermediate_size=64, experts=8,
    )  # fmt: skip

    async def work(address: str) -> list[Completion]:
        peers = [Peer(address, name="inference", key="secret")]
        engine = HttpEngine(peers, ClientSettings(patience=STARTS), VllmDialect(vocabulary=262))
        await engine.connect()
        try:
            assert engine.capabilities.routes
            return [await engine.sample(PROMPT, SamplingParams(24, seed=seed)) for seed in (1, 2)]
        finally:
            await engine.close()

    with serving(tmp_path, model, routes=True) as address:
        found = asyncio.run(asyncio.wait_for(work(address), STARTS + 200))
    loaded = load_model(PretrainedModel(name=str(model)), seed=0).model
    routing = Routing(loaded)
    for each in found:
        assert each.prompt_routes is not None and each.routes is not None
        tokens, routes = [*PROMPT, *each.tokens], np.concatenate([each.prompt_routes, each.routes])
        with torch.no_grad(), routing.recorded() as own:
            loaded.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False)
        expected = np.sort(torch.stack(own, 1).numpy())[:-1]
        assert np.array_equal(np.sort(routing.known(routes, len(tokens), "x"))[1:], expected)
    assert found[1].cached_tokens == 32

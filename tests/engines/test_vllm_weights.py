"""Weights that a trainer brings to a real vLLM: sent to its workers, and as adapters.

What carries the bytes is gloo, as there is no GPU: see gloo_workers.py. The routes, the layout of the chunks
and the loading of what is in them are vLLM's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engines.test_vllm import PROMPT, PYTHON, STARTS, furthest, logprobs, serving, tokens_generated
from tests.trainer.vllm_double import GlooGroup
from transformers import AutoModelForCausalLM, LlamaConfig

from silva.config.sections import Lora, PretrainedModel
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.vllm import VllmDialect
from silva.models.loading import LoadedModel, load_model
from silva.models.tiny import tiny_tokenizer
from silva.orchestrator.probe import Probe
from silva.trainer import broadcast
from silva.trainer.broadcast import Broadcast
from silva.trainer.learner import Learner
from silva.trainer.local import LocalTrainer
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import Datum, Pass, Passed
from silva.trainer.tenants.learner import Tenants
from silva.trainer.transfer import WeightFolders, WeightTransfer
from silva.types import Completion, SamplingParams
from silva.wire.transport import Peer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = Lora(rank=4)
CONTEXT = 4096
LONG = 200  # tokens of 24 layers: mostly such a request is in flight when weights come


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is its own: on a CPU vLLM multiplies by a packed copy of one that shares the embeddings, and
    does not pack what is sent."""
    if not PYTHON.exists():
        pytest.skip("needs vLLM: make peers PEERS=vllm")
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262, hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, pad_token_id=0,
        bos_token_id=None, eos_token_id=257, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def compute() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@torch.no_grad()
def move(loaded: LoadedModel, by: float) -> None:
    for parameter in loaded.model.parameters():
        if parameter.requires_grad:
            parameter.add_(by * torch.randn(parameter.shape))


async def in_flight(
    engine: HttpEngine, trainer: LocalTrainer, loaded: LoadedModel, by: float
) -> tuple[list[Completion], dict[str, torch.Tensor]]:
    """Requests over which a version is published and loaded, and the weights before it.

    Where the server is fast, or the trainer slow, they end before: then longer ones see a further version.
    """
    address, long = engine.reached()["servers"][0].address, LONG
    while True:
        start = await tokens_generated(address)
        asked = [engine.sample(PROMPT, SamplingParams(long, seed=long + n)) for n in range(4)]
        running = [asyncio.ensure_future(each) for each in asked]
        while await tokens_generated(address) < start + 8:
            pass
        before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
        move(loaded, by)
        await engine.load(await trainer.publish())
        left = start + 4 * long - await tokens_generated(address)  # they are computed in step
        found = await asyncio.gather(*running)
        assert {len(each.tokens) for each in found} == {long}
        if left > 80:
            return found, before
        long *= 2


async def check_sent(
    engine: HttpEngine, loaded: LoadedModel, transfer: WeightTransfer, compute: ThreadPoolExecutor
) -> None:
    """A whole model, twice. Requests in flight go on with the new weights."""
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(), seed=0), transfer, compute=compute)
    probe = Probe(262, "float32")
    await engine.load(await trainer.snapshot())
    await probe.ask(trainer)
    await probe.check(engine)
    ended, _ = await in_flight(engine, trainer, loaded, 0.05)
    for found in ended:
        assert {*found.versions} == {trainer.version - 1}
        expected = logprobs(loaded.model, [*PROMPT, *found.tokens], len(PROMPT))
        assert furthest(found.logprobs[-5:], expected[-5:], found.tokens[-5:]) < 1e-3
        assert furthest(found.logprobs[:2], expected[:2], found.tokens[:2]) > 1e-2
    await probe.ask(trainer)
    await probe.check(engine)
    assert engine.version == trainer.version > 0


async def check_adapters(
    engine: HttpEngine, loaded: LoadedModel, folder: Path, compute: ThreadPoolExecutor
) -> None:
    """Three versions or more. Requests in flight end with the adapters that they began with."""
    transfer = WeightFolders(folder, "adapter")
    trainer = LocalTrainer(Learner(loaded, LocalTrainerSettings(), seed=0), transfer, compute=compute)
    trainer.version, probe = 1, Probe(262, "float32")
    await engine.load(await trainer.snapshot())
    await probe.ask(trainer)
    await probe.check(engine)
    for _ in range(3):
        ended, before = await in_flight(engine, trainer, loaded, 0.05)
        await probe.ask(trainer)
        await probe.check(engine)
        after = await engine.sample(PROMPT, SamplingParams(24, seed=1))
        assert {*after.versions} == {trainer.version}
        expected = logprobs(loaded.model, [*PROMPT, *after.tokens], len(PROMPT))
        assert furthest(after.logprobs, expected, after.tokens) < 1e-3
        new = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
        loaded.model.load_state_dict(before, strict=False)
        for found in ended:
            assert {*found.versions} == {trainer.version - 1}
            expected = logprobs(loaded.model, [*PROMPT, *found.tokens], len(PROMPT))
            assert furthest(found.logprobs, expected, found.tokens) < 1e-3
        loaded.model.load_state_dict(new, strict=False)


async def check_folders(engine: HttpEngine, base: Path, folder: Path) -> None:
    """Runs of the Tinker service: each request names the folder of its adapter, and none is the engine's."""
    runs = Tenants(load_model(PretrainedModel(name=str(base)), seed=0), LocalTrainerSettings(), head=False)
    for name in ("one", "other"):
        runs.create(name, rank=4, alpha=32.0, seed=len(name), attn=True, mlp=True, unembed=False)
        for parameter in runs.parameters(name).values():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        runs.save(name, folder / name, optimizer=False)
    asked = [engine.sample(PROMPT, SamplingParams(24, seed=1), adapter=folder / name) for name in runs.runs]
    for name, found in zip(runs.runs, await asyncio.gather(*asked), strict=True):
        tokens = np.array([*PROMPT, *found.tokens])
        datum = Datum(tokens[:-1], tokens[1:], {"weights": np.ones(len(tokens) - 1)})
        (passed,) = runs.passes([Pass(name, [datum], "cross_entropy", {}, backward=False)])
        assert isinstance(passed, Passed)
        expected = passed.logprobs[0]
        assert np.abs(found.logprobs - expected[len(PROMPT) - 1 :]).max() < 1e-3
        scores = await engine.score(tokens, 1, adapter=folder / name, top=3)
        assert np.abs(scores.logprobs - expected).max() < 1e-3
        assert [row[0] for row in scores.top] == [
            *zip(scores.likeliest, scores.likeliest_logprobs, strict=True)
        ]


def test_vllm_gets_whole_models_and_adapters(
    model: Path, tmp_path: Path, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because starting it takes a minute."""
    monkeypatch.setattr(broadcast, "CHUNK", 60_000)  # bytes: several chunks of several tensors
    torch.manual_seed(1)

    async def work(address: str) -> None:
        peer = Peer(address, name="inference", key="secret")
        dialect = VllmDialect(vocabulary=262, sent=True, lora=True)
        engine = HttpEngine([peer], ClientSettings(patience=STARTS), dialect)
        await engine.connect()
        assert engine.capabilities.loads == {"folder", "sent", "adapter"}
        transfer = Broadcast([peer.again()], patience=10.0, timeout=60.0, make=GlooGroup)
        try:
            loaded = load_model(PretrainedModel(name=str(model)), seed=0)
            await check_sent(engine, loaded, transfer, compute)
            loaded.model.save_pretrained(tmp_path / "base")
            tiny_tokenizer().save_pretrained(tmp_path / "base")
            adapted = load_model(PretrainedModel(name=str(tmp_path / "base"), lora=LORA), seed=0)
            await check_adapters(engine, adapted, tmp_path / "versions", compute)
            await check_folders(engine, tmp_path / "base", tmp_path / "runs")
        finally:
            transfer.close()
            await engine.close()

    workers = Path(__file__).with_name("gloo_workers.py")
    with serving(tmp_path, model, workers=workers, context=CONTEXT, lora=LORA, sent=True) as address:
        asyncio.run(asyncio.wait_for(work(address), STARTS + 200))

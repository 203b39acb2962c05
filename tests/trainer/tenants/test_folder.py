"""A run on disk: it goes on bit for bit, PEFT loads it, and what is not its own is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.trainer.tenants.runs import CLIENT, SHAPE, Client, data, gradient, passed, plain, tenants, weights

from silva.engines.local.engine import LocalEngine
from silva.engines.settings import LocalEngineSettings
from silva.errors import CheckpointError
from silva.server.tinker.adapters import FolderSampler
from silva.trainer.tenants import AdamParams, Datum, Pass
from silva.trainer.tenants.learner import Tenants
from silva.types import Completion, SamplingParams, TokenScores

A = Client("a", 4, 1)


def trained(client: Client = A, steps: int = 2, dtype: str = "float32") -> Tenants:
    learner = tenants(dtype)
    client.begin(learner)
    go_on(learner, client, range(steps))
    return learner


def go_on(learner: Tenants, client: Client, steps: range) -> None:
    for step in steps:
        passed(learner.passes([client.ask(step)]))
        learner.optim_step(client.name, client.adam(step))


@pytest.mark.slow
@pytest.mark.parametrize("pending", [False, True])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, pending: bool) -> None:
    learner = trained()
    if pending:
        learner.passes([A.ask(2)])
    learner.save("a", tmp_path)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)  # the same bytes in every process
    again = tenants()
    again.create("a", **CLIENT)
    passed(again.passes([Pass("a", data(50), "ppo", {}, True)]))  # all of it is replaced
    again.optim_step("a", AdamParams(lr=1.0))
    passed(again.passes([Pass("a", data(50), "ppo", {}, True)]))
    again.load("a", tmp_path, optimizer=True)
    assert weights(again, "a") == weights(learner, "a")
    assert gradient(again, "a").keys() == (learner.parameters("a").keys() if pending else set())
    for each in (learner, again):
        if pending:
            each.optim_step("a", A.adam(2))
        go_on(each, A, range(2 + pending, 4))
    assert weights(again, "a") == weights(learner, "a")


@pytest.mark.slow
def test_without_the_optimizer_a_run_begins_with_the_weights(tmp_path: Path) -> None:
    learner, again = trained(), tenants()
    learner.save("a", tmp_path, optimizer=False)
    again.create("b", **CLIENT)
    again.load("b", tmp_path, optimizer=False)
    assert weights(again, "b") == weights(learner, "a")
    with pytest.raises(CheckpointError, match="saved without its optimizer"):
        again.load("b", tmp_path, optimizer=True)
    learner.load("a", tmp_path, optimizer=False)  # its moments are dropped
    for each, run in ((learner, "a"), (again, "b")):
        passed(each.passes([Pass(run, data(7), "ppo", {}, True)]))
        each.optim_step(run, A.adam(0))
    assert weights(again, "b") == weights(learner, "a")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("shape", [{}, {"unembed": True}, {"mlp": False}, {"attn": False}])
def test_peft_loads_it_and_gives_the_same_logits(tmp_path: Path, shape: dict[str, bool]) -> None:
    learner = tenants("float64")
    learner.create("a", rank=4, **{**SHAPE, **shape})
    passed(learner.passes([Pass("a", data(0), "ppo", {}, True)]))
    learner.optim_step("a", AdamParams(lr=0.1))
    learner.save("a", tmp_path)
    theirs = PeftModel.from_pretrained(plain("float64").model, str(tmp_path), autocast_adapter_dtype=False)
    tokens = torch.arange(20)[None]
    with torch.no_grad(), learner._adapters.rows([("a", 0, 20)]):
        mine = learner.loaded.model(tokens, use_cache=False).logits
        base = plain("float64").model(tokens, use_cache=False).logits
        torch.testing.assert_close(mine, theirs(input_ids=tokens, use_cache=False).logits, rtol=0, atol=1e-12)
    assert (mine - base).abs().max() > 1e-3
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert all("." not in name for name in config["target_modules"])


@pytest.mark.slow
def test_the_sampler_of_a_folder_records_what_training_computes(tmp_path: Path) -> None:
    """Log-probabilities of sampled tokens, and of a prompt, in float64."""
    learner = trained(dtype="float64")
    learner.save("a", tmp_path, optimizer=False)

    async def sampled() -> tuple[Completion, TokenScores]:
        with ThreadPoolExecutor(1) as compute:
            engine = LocalEngine(plain("float64"), LocalEngineSettings(), compute)
            sampler = FolderSampler(engine, 128, 259, ())
            found = await sampler.sample(prompt, SamplingParams(max_tokens=9, seed=3), tmp_path)
            return found, await sampler.score([*prompt, *found.tokens], 1, tmp_path, 0)

    prompt = list(range(40, 50))
    found, scored = asyncio.run(sampled())
    tokens = np.array([*prompt, *found.tokens])
    datum = Datum(tokens[:-1], tokens[1:], {"weights": np.ones(len(tokens) - 1)})
    (there,) = passed(learner.passes([Pass("a", [datum], "cross_entropy", {}, False)]))
    (computed,) = there.logprobs
    assert len(found.tokens) > 1 and computed.dtype == np.float64
    np.testing.assert_allclose(scored.logprobs, computed, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.logprobs, computed[len(prompt) - 1 :], rtol=0, atol=1e-12)


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "run.json").read_text())
        change(content)
        (folder / "run.json").write_text(json.dumps(content))

    return apply


def flip(name: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-5] ^= 1
        (folder / name).write_bytes(content)

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (
        lambda folder: (folder / "run.json").unlink(),
        "run.json: cannot be read: .*expected a folder of a run",
    ),
    "no JSON": (lambda folder: (folder / "run.json").write_text("{"), "run.json: cannot be read"),
    "no run": (lambda folder: (folder / "run.json").write_text("{}"), "run.json: got {}, expected alpha, "),
    "steps": (
        rewrite(lambda content: content["steps"].update(x=1)),
        "run.json: steps of x, which",
    ),
    "files": (rewrite(lambda content: content.update(files=3)), "run.json: got {.*expected alpha, "),
    "rank": (rewrite(lambda content: content.update(rank=8)), "a run with rank 8, expected 4"),
    "alpha": (rewrite(lambda content: content.update(alpha=16.0)), "a run with alpha 16.0, expected 8.0"),
    "base": (rewrite(lambda content: content.update(base="0000")), "a run with base 0000"),
    "missing": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors: cannot",
    ),
    "weights": (flip("adapter_model.safetensors"), "adapter_model.safetensors: damaged, its sha256"),
    "moments": (flip("optimizer.safetensors"), "optimizer.safetensors: damaged, its sha256"),
    "config": (flip("adapter_config.json"), "adapter_config.json: damaged, its sha256"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_foreign_or_damaged_folder_changes_nothing(tmp_path: Path, kind: str) -> None:
    damage, says = DAMAGES[kind]
    learner = trained(steps=1)
    learner.save("a", tmp_path)
    passed(learner.passes([A.ask(1)]))
    with torch.no_grad():
        next(iter(learner.parameters("a").values())).add_(1)
    before, pulls = weights(learner, "a"), gradient(learner, "a")
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        learner.load("a", tmp_path, optimizer=True)
    assert learner.runs == ("a",)
    assert weights(learner, "a") == before
    assert all(torch.equal(value, pulls[name]) for name, value in gradient(learner, "a").items())


def test_tensors_of_another_run_are_refused(tmp_path: Path) -> None:
    """Even if the digests are right: somebody has made the folder by hand."""
    learner = trained(steps=1)
    learner.save("a", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors["base_model.model.x"] = tensors.pop(name)
    save_file(tensors, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    rewrite(lambda content: content["files"].update({file.name: digest}))(tmp_path)
    with pytest.raises(CheckpointError, match=f"missing: {name}; unexpected: base_model.model.x"):
        learner.load("a", tmp_path, optimizer=False)

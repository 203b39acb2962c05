"""Runs of all weights: each is the learner of one model on the same data, whoever else is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import moe
from tests.trainer.tenants.runs import CLIENT, SHAPE, Client, data, gradient, passed, plain, tenants, weights
from tests.trainer.tenants.test_learner import KINDS, OF_SILVA, sample_of
from transformers import AutoModelForCausalLM

from silva.config.sections import PretrainedModel
from silva.errors import CapabilityError, CheckpointError, ModelError, NonFiniteError
from silva.models.loading import load_model
from silva.models.snapshots import read_weights, take_weights, weight_folder
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import AdamParams, Pass
from silva.trainer.tenants.learner import Tenants
from silva.types import OptimParams

ALL: dict[str, Any] = {"rank": 0, "alpha": 32.0, "seed": 0, "attn": True, "mlp": True, "unembed": True}
A = Client("a", 0, 1, unembed=True)


def go_on(learner: Tenants, steps: range) -> None:
    for step in steps:
        passed(learner.passes([A.ask(step)]))
        learner.optim_step("a", A.adam(step))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_gradients_and_steps_are_those_of_the_local_trainer(loss: str, dtype: str) -> None:
    learner, alone = tenants(dtype), Learner(plain(dtype), LocalTrainerSettings(self_check=False), seed=0)
    learner.create("a", **ALL)
    learner.create("b", **CLIENT)
    tolerance: Any = {"rtol": KINDS[dtype], "atol": KINDS[dtype]}
    for step in range(3):
        mine, other = data(step, loss=loss), Pass("b", data(9), "ppo", {}, backward=True)
        metrics = alone.forward_backward([sample_of(datum) for datum in mine], OF_SILVA[loss])
        (_, found) = passed(learner.passes([other, Pass("a", mine, loss, {}, backward=True)]))
        assert found.metrics["loss:sum"] == pytest.approx(metrics["loss"], rel=10 * KINDS[dtype])
        expected = alone.stepper.parameters
        assert gradient(learner, "a").keys() == expected.keys()
        for name, value in gradient(learner, "a").items():
            wanted = expected[name].grad
            largest = max(1.0, float(wanted.abs().max()))  # of sums whose parts cancel
            torch.testing.assert_close(value, wanted, rtol=KINDS[dtype], atol=KINDS[dtype] * largest)
        norm = learner.optim_step("a", AdamParams(1e-3, 0.9, 0.95, 1e-8, 0.1, grad_clip_norm=0.5))
        wanted = alone.optim_step(OptimParams(1e-3, (0.9, 0.95), 1e-8, 0.1, max_grad_norm=0.5))
        assert norm["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=10 * KINDS[dtype])
        for name, value in learner.parameters("a").items():
            torch.testing.assert_close(value.data, expected[name].data, **tolerance)


def test_nobody_else_is_changed_and_a_pass_that_fails_changes_nothing() -> None:
    learner, alone = tenants(), tenants()
    for each in (learner, alone):
        each.create("b", rank=4, **SHAPE)
    base = {name: p.detach().clone() for name, p in learner.loaded.model.named_parameters()}
    learner.create("a", **ALL)
    wrong = [data(1)[0]]
    wrong[0].inputs["advantages"][:] = 1e300  # type: ignore[index]
    asked = [A.ask(0), Pass("a", wrong, "ppo", {}, True), Pass("b", data(5), "ppo", {}, True)]
    first, failed, _ = learner.passes(asked)
    assert not isinstance(first, Exception) and isinstance(failed, NonFiniteError)
    alone.create("a", **ALL)
    passed(alone.passes([A.ask(0)]))
    passed(alone.passes([Pass("b", data(5), "ppo", {}, True)]))
    for run in "ab":
        found, expected = gradient(learner, run), gradient(alone, run)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert found.keys() == expected.keys() != set()
        learner.optim_step(run, AdamParams(1e-2))
        alone.optim_step(run, AdamParams(1e-2))
        assert weights(learner, run) == weights(alone, run)
    after = dict(learner.loaded.model.named_parameters())
    assert all(torch.equal(after[name], base[name]) for name in base)
    learner.drop("a")
    assert learner.runs == ("b",)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit_from_a_folder_of_transformers(tmp_path: Path, dtype: str) -> None:
    learner, again = tenants(dtype), tenants(dtype)
    learner.create("a", **ALL)
    go_on(learner, range(2))
    passed(learner.passes([A.ask(2)]))
    learner.save("a", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    mine = dict(theirs.named_parameters())
    assert all(torch.equal(p, mine[name]) for name, p in learner.parameters("a").items())
    again.create("a", **ALL)
    passed(again.passes([Pass("a", data(50), "ppo", {}, True)]))  # all of it is replaced
    again.load("a", tmp_path, optimizer=True)
    for each in (learner, again):
        each.optim_step("a", A.adam(2))
        go_on(each, range(3, 5))
    for name, master in learner._get("a").stepper.masters.items():
        assert torch.equal(again._get("a").stepper.masters[name], master)
    learner.create("lora", **CLIENT)
    with pytest.raises(CheckpointError, match="a run with rank 0, expected 4"):
        learner.load("lora", tmp_path, optimizer=True)
    again.load("a", tmp_path, optimizer=False)
    with pytest.raises(CheckpointError, match="damaged"):
        (tmp_path / "model.safetensors").write_bytes(b"")
        again.load("a", tmp_path, optimizer=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_trained_written_and_read_like_all_other_weights(tmp_path: Path, family: str) -> None:
    """Files of transformers have tensors of their own for each expert, and the model has one for all."""
    settings = PretrainedModel(name=str(moe.folder(tmp_path / "model", family)))

    learner, again = (Tenants(load_model(settings, seed=0), LocalTrainerSettings()) for _ in range(2))
    alone = Learner(load_model(settings, seed=0), LocalTrainerSettings(self_check=False), seed=0)
    with pytest.raises(CapabilityError, match="train_mlp: experts have no adapters here"):
        learner.create("lora", **CLIENT)
    learner.create("lora", **{**CLIENT, "mlp": False})
    learner.create("a", **ALL)
    for step in range(2):
        mine, other = data(step), Pass("lora", data(9), "ppo", {}, backward=True)
        metrics = alone.forward_backward([sample_of(datum) for datum in mine], OF_SILVA["ppo"])
        (_, found) = passed(learner.passes([other, Pass("a", mine, "ppo", {}, backward=True)]))
        assert found.metrics["loss:sum"] == pytest.approx(metrics["loss"], rel=1e-5)
        # With this eps, since the sign of a gradient of 1e-9 is that of its rounding.
        learner.optim_step("a", AdamParams(1e-2, 0.9, 0.95, 1e-2, 0.1, grad_clip_norm=0.5))
        alone.optim_step(OptimParams(1e-2, (0.9, 0.95), 1e-2, 0.1, max_grad_norm=0.5))
        for name, value in learner.parameters("a").items():
            torch.testing.assert_close(value, alone.stepper.parameters[name], rtol=0, atol=1e-6)
    learner.save("a", tmp_path / "saved")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    again.create("a", **ALL)
    again.load("a", tmp_path / "saved", optimizer=True)
    sampled = load_model(settings, seed=0)
    take_weights(sampled, read_weights(sampled, weight_folder(tmp_path / "saved")))
    of_engine = dict(sampled.model.named_parameters())
    for name, value in learner.parameters("a").items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(again.parameters("a")[name], value) and torch.equal(of_engine[name], value)


def test_without_its_optimizer_a_run_begins_with_the_weights(tmp_path: Path) -> None:
    learner, again = tenants("bfloat16"), tenants("bfloat16")
    learner.create("a", **ALL)
    go_on(learner, range(1))
    learner.save("a", tmp_path, optimizer=False)
    again.create("a", **ALL)
    again.load("a", tmp_path, optimizer=False)
    found = {name: p.detach().float().numpy() for name, p in again.parameters("a").items()}
    for name, parameter in learner.parameters("a").items():
        np.testing.assert_array_equal(found[name], parameter.detach().float().numpy())
    with pytest.raises(CheckpointError, match="saved without its optimizer"):
        again.load("a", tmp_path, optimizer=True)


def test_what_cannot_be_trained_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = tenants()
    with pytest.raises(CapabilityError, match="rank 0 trains all weights; expected train_attn"):
        learner.create("a", **{**ALL, "mlp": False})
    monkeypatch.setattr("silva.models.memory.memory_limit", lambda: 1000)
    with pytest.raises(CapabilityError, match=r"to train all weights takes .* expected rank 1 or more"):
        learner.create("a", **ALL)
    monkeypatch.undo()
    learner.create("a", **ALL)
    with pytest.raises(ModelError, match="it exists"):
        learner.create("a", **ALL)
    assert learner.runs == ("a",)

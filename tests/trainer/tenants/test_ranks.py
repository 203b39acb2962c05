"""Runs whose passes several ranks share: each has all runs and the model or a part of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.rank import PARALLEL, divided, folder, group, starter, starts_ranks  # noqa: F401
from tests.forked_ranks import Starter
from tests.trainer.tenants.runs import CLIENT, data, passed, plain, tenants, weights
from tests.trainer.tenants.test_full import ALL
from tests.trainer.tenants.test_learner import sample_of

from silva.config.sections import Lora, PretrainedModel
from silva.errors import CapabilityError, CheckpointError, NonFiniteError
from silva.models.loading import load_model
from silva.models.pieces import local, whole_of
from silva.trainer.learner import Learner
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.tenants import AdamParams, Pass
from silva.trainer.tenants.learner import Tenants
from silva.types import LossSpec, OptimParams

KINDS = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2}


@divided
@pytest.mark.parametrize("dtype", KINDS)
def test_ranks_learn_what_one_process_does(folder: Path, dtype: str) -> None:  # noqa: F811
    """A run of adapters whose passes have a row for one rank alone, and one of all weights if it can be."""
    mesh = mesh_of(PARALLEL, "cpu")
    settings = LocalTrainerSettings(micro_batch_tokens=64, gradient_checkpointing=dtype == "float32")
    ours = Tenants(plain(dtype), settings, mesh=mesh)
    alone = tenants(dtype, micro_batch_tokens=64)
    tolerance: Any = {"rtol": KINDS[dtype], "atol": KINDS[dtype]}
    for learner in (ours, alone):
        learner.create("a", **{**ALL, "rank": 2 if mesh.parts > 1 else 0})
        learner.create("b", **{**ALL, "rank": 4})
    wrong = data(7)
    wrong[1].inputs["advantages"][:] = 1e308  # type: ignore[index]  # on one rank
    for step in range(3):
        asked = [Pass("a", data(step, 5), "ppo", {}, True), Pass("b", data(step + 50, 1), "ppo", {}, True)]
        if step == 1:
            asked.append(Pass("b", wrong, "ppo", {}, True))
            asked.append(Pass("b", data(90, 4), "ppo", {}, False))
        found, expected = ours.passes(asked), alone.passes(asked)
        if step == 1:
            assert all(isinstance(each.pop(2), NonFiniteError) for each in (found, expected))
        for mine, other in zip(passed(found), passed(expected), strict=True):
            assert mine.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=10 * KINDS[dtype])
            for values, wanted in zip(mine.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(values, wanted, **tolerance)
        for run in "ab":
            if step == 1:  # a gradient that is not stepped on is saved once, not once a rank
                ours.save(run, folder / run)
                ours.load(run, folder / run, optimizer=True)
            norms = [each.optim_step(run, AdamParams(1e-3)) for each in (ours, alone)]
            assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=10 * KINDS[dtype])
            theirs = alone.parameters(run)
            for name, value in ours.parameters(run).items():
                torch.testing.assert_close(value.data, theirs[name].data, **tolerance)
    for run in "ab":
        if dtype != "bfloat16" or run == "b":
            digests = mesh.gather(hashlib.sha256(weights(ours, run)).hexdigest())
            assert len({*digests}) == 1
    for run in "ab":  # what is saved, and what goes on from there, changes no bit of what follows
        ours.save(run, folder / f"{run}0")
    ended = []
    for kept in (False, True):
        for run in "ab":
            ours.load(run, folder / f"{run}0", optimizer=True)
            passed(ours.passes([Pass(run, data(30, 5), "ppo", {}, True)]))
            if kept:
                ours.save(run, folder / run)
                if run == "b":
                    ours.load(run, folder / run, optimizer=True)
            passed(ours.passes([Pass(run, data(31, 5), "ppo", {}, True)]))
            ours.optim_step(run, AdamParams(1e-3))
        ended.append([value.detach().clone() for run in "ab" for value in ours.parameters(run).values()])
    assert all(torch.equal(one, other) for one, other in zip(*ended, strict=True))
    (folder / "a/run.json").unlink(missing_ok=True)
    mesh.gather("")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ours.load("a", folder / "a", optimizer=True)


@divided
def test_a_part_of_the_model_on_each_rank(folder: Path) -> None:  # noqa: F811
    """It is read from files, and between passes no rank has more. A run has the bits that it has alone, the
    weights of the learner of one model on the same ranks, and folders that one process goes on from."""
    mesh = mesh_of(PARALLEL, "cpu")
    if mesh.rank == 0:
        made = plain("float64")
        made.model.save_pretrained(folder / "model")
        made.tokenizer.save_pretrained(folder / "model")
    mesh.gather("written")
    settings = PretrainedModel(name=str(folder / "model")).model_copy(update={"dtype": "float64"})

    stored = load_model(settings, seed=0, stored=True)
    ours = Tenants(stored, LocalTrainerSettings(micro_batch_tokens=64), mesh=mesh)
    with pytest.raises(CapabilityError, match="expected rank 1 or more"):
        ours.create("all", **ALL)
    for run in ("a", "b", "alone"):
        ours.create(run, **{**CLIENT, "rank": 2 if run == "b" else 4})
    peft = load_model(settings.model_copy(update={"lora": Lora(rank=4, alpha=8.0)}), seed=0, stored=True)
    for name, parameter in peft.model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(ours.parameters("a")[name.replace(".default", "")])
    learner = Learner(peft, LocalTrainerSettings(self_check=False), seed=0, mesh=mesh)
    for step in range(3):
        mine = data(step, 1 if step == 1 else 5)
        passed(ours.passes([Pass("b", data(9, 3), "ppo", {}, True), Pass("a", mine, "ppo", {}, True)]))
        passed(ours.passes([Pass("alone", mine, "ppo", {}, True)]))
        learner.forward_backward([sample_of(datum) for datum in mine], LossSpec("clipped"))
        for run in ("a", "alone"):
            ours.optim_step(run, AdamParams(1e-2, 0.9, 0.95, 1e-8))
        learner.optim_step(OptimParams(1e-2, (0.9, 0.95), 1e-8, 0.0, max_grad_norm=None))
        assert weights(ours, "a") == weights(ours, "alone")
    theirs = {n.replace(".default", ""): whole_of(p) for n, p in learner.stepper.parameters.items()}
    for name, value in ours.parameters("a").items():
        torch.testing.assert_close(value.data, theirs[name].data, rtol=1e-12, atol=1e-12)
    whole = sum(p.numel() for p in plain("float64").model.parameters())
    held = sum(local(p).numel() for p in ours.loaded.model.parameters())
    assert held <= whole / mesh.parts + 200  # what a layer's numbers leave over
    ours.save("a", folder / "saved")
    one = tenants("float64", micro_batch_tokens=64)
    one.create("a", **CLIENT)
    one.load("a", folder / "saved", optimizer=True)
    assert weights(one, "a") == weights(ours, "a")


@starts_ranks
@pytest.mark.slow
def test_ranks(starter: Starter, tmp_path: Path) -> None:  # noqa: F811
    for size, parallel, tests in (
        (2, {"dp_replicate": 2}, "ranks_learn"),
        (3, {"dp_replicate": 3}, "ranks_learn and float64"),
        (2, {"dp_shard": 2}, "ranks_learn or a_part"),
        (4, {"dp_shard": 2, "dp_replicate": 2}, "ranks_learn and float64 or a_part"),
    ):
        made = tmp_path / f"{size}{len(parallel)}{'dp_shard' in parallel}"
        made.mkdir()
        starter.check(size, parallel, __file__, tests, made)

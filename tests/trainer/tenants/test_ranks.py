"""Runs whose passes several ranks share: each rank has the model and all runs, which learn as on one rank."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.rank import PARALLEL, divided, folder, group, starter, starts_ranks  # noqa: F401
from tests.forked_ranks import Starter
from tests.trainer.tenants.runs import data, passed, plain, tenants, weights
from tests.trainer.tenants.test_full import ALL

from silva.errors import CheckpointError, NonFiniteError
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.sharding.ranks import mesh_of
from silva.trainer.tenants import AdamParams, Pass
from silva.trainer.tenants.learner import Tenants

KINDS = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2}


@divided
@pytest.mark.parametrize("dtype", KINDS)
def test_ranks_learn_what_one_process_does(folder: Path, dtype: str) -> None:  # noqa: F811
    """A run of adapters whose passes have a row for one rank alone, and one of all weights."""
    mesh = mesh_of(PARALLEL, "cpu")
    ours = Tenants(plain(dtype), LocalTrainerSettings(micro_batch_tokens=64), mesh=mesh)
    alone = tenants(dtype, micro_batch_tokens=64)
    tolerance: Any = {"rtol": KINDS[dtype], "atol": KINDS[dtype]}
    for learner in (ours, alone):
        learner.create("a", **ALL)
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


@starts_ranks
@pytest.mark.slow
def test_two_and_three_ranks(starter: Starter, tmp_path: Path) -> None:  # noqa: F811
    for size, tests in ((2, "ranks_learn"), (3, "ranks_learn and float64")):
        made = tmp_path / str(size)
        made.mkdir()
        starter.check(size, {"dp_replicate": size}, __file__, tests, made)

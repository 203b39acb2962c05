"""Advantages, losses and aggregation equal TRL's own (tests/golden/make_trl.py made the numbers)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silva.algorithms.advantages import ADVANTAGES
from silva.algorithms.aggregation import normalise
from silva.algorithms.losses import LossInputs, compute
from silva.types import LossSpec, Sample

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "trl.json").read_text())
AGGREGATION = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",  # over the whole batch; bnpo is over a micro-batch, of which there is one here
    "dr_grpo": "constant",
}


def table(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def groups() -> torch.Tensor:
    return torch.arange(len(GOLDEN["rewards"])) // GOLDEN["group_size"]


@pytest.mark.parametrize("name", ["mean_std", "mean", "leave_one_out"])
def test_advantages(name: str) -> None:
    ours = ADVANTAGES[name](table("rewards"), groups())
    assert ours.tolist() == pytest.approx(GOLDEN["advantages"][name], rel=1e-12, abs=1e-12)


def spec_of(settings: dict[str, Any]) -> LossSpec:
    low = settings["epsilon"]
    params = {
        "clip_low": low,
        "clip_high": settings.get("epsilon_high", low),
        "clip_dual": settings.get("delta"),  # TRL's upper bound on the ratio acts only where A < 0
        "kl_coef": settings.get("beta", 0.0),
        "kl_estimator": "k3",
        "kl_correction": settings.get("use_bias_correction_kl", False),
        "entropy_coef": settings.get("entropy_coef", 0.0),
    }
    return LossSpec("clipped", params)


def weights_of(make_sample: Callable[..., Sample], loss_type: str) -> torch.Tensor:
    """[B, T]: the normalised weights of rows of one token of context, then the completion."""
    samples = [make_sample(f"t/{b}", [0, *row]) for b, row in enumerate(GOLDEN["mask"])]
    samples = [s.replace(loss_weights=s.loss_weights.astype(np.float64)) for s in samples]
    constant = len(samples) * GOLDEN["longest"] if loss_type == "dr_grpo" else None
    normalised = normalise(samples, AGGREGATION[loss_type], constant=constant)
    return torch.tensor(np.array([s.loss_weights[1:] for s in normalised]))


@pytest.mark.parametrize("case", GOLDEN["losses"])
def test_loss_gradient_and_metrics(case: str, make_sample: Callable[..., Sample]) -> None:
    golden = GOLDEN["losses"][case]
    trained = table("mask").bool()
    logprobs = table("logprobs").requires_grad_()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    advantages = torch.tensor(GOLDEN["advantages"]["mean_std"], dtype=torch.float64)
    inputs = LossInputs(
        logprobs[trained],
        old_logprobs=table("old_logprobs")[trained],
        advantages=advantages[rows[trained]],
        rows=rows[trained],
        reference_logprobs=table("reference_logprobs")[trained],
        entropies=table("entropies")[trained],
    )
    loss, metrics = compute(spec_of(golden["settings"]), inputs)
    weights = weights_of(make_sample, golden["settings"]["loss_type"])[trained]
    total = (weights * loss).sum()
    total.backward()

    assert total.item() == pytest.approx(golden["loss"], rel=1e-12)
    assert logprobs.grad is not None
    theirs = torch.tensor(golden["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, theirs, rtol=1e-12, atol=1e-15)
    for name, value in golden["metrics"].items():
        if name == "kl" and golden["settings"]["use_bias_correction_kl"]:
            continue  # TRL logs it times the ratio; ours is the plain estimate
        # TRL keeps the masks of its clip metrics in float32; `delta` is left out of them.
        if name == "clip_ratio/region_mean":
            own = metrics["clipped"] * ((inputs.advantages > 0) | (metrics["ratio"] < 1))
            assert own.mean().item() == pytest.approx(value, rel=1e-6)
        else:
            assert metrics[name].mean().item() == pytest.approx(value, rel=1e-12)


def test_every_branch_is_taken() -> None:
    """The inputs clip above, below and by `delta`, and hold a group without variance and masked tokens."""
    ratio = (table("logprobs") - table("old_logprobs")).exp()
    advantage = torch.tensor(GOLDEN["advantages"]["mean_std"])[:, None]
    trained = table("mask").bool()
    assert (trained & (advantage > 0) & (ratio > 1.28)).sum() >= 2
    assert (trained & (advantage < 0) & (ratio < 0.8)).sum() >= 2
    assert (trained & (advantage < 0) & (ratio > 1.5)).sum() >= 2
    assert (advantage == 0).sum() == GOLDEN["group_size"]
    assert len({case["loss"] for case in GOLDEN["losses"].values()}) == len(GOLDEN["losses"])

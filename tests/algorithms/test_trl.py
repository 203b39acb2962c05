"""Advantages, losses, corrections and aggregation equal TRL's own numbers (tests/golden/make_trl.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import row_of
from tests.golden.read import read

from silva.algorithms.advantages import ADVANTAGES, Scores
from silva.algorithms.aggregation import normalise
from silva.algorithms.losses import LossInputs
from silva.algorithms.objective import compute
from silva.types import LossSpec

GOLDEN = read("trl")
AGGREGATION = {
    "grpo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",  # over the whole batch; bnpo is over a micro-batch, of which there is one here
    "cispo": "token_mean",
    "dr_grpo": "constant",
}


def table(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def groups() -> torch.Tensor:
    return torch.arange(len(GOLDEN["rewards"])) // GOLDEN["group_size"]


@pytest.mark.parametrize("name", ["mean_std", "mean", "leave_one_out"])
def test_advantages(name: str) -> None:
    ours = ADVANTAGES[name].function(Scores(table("rewards"), groups()))
    assert ours.tolist() == pytest.approx(GOLDEN["advantages"][name], rel=1e-12, abs=1e-12)


def spec_of(settings: dict[str, Any]) -> LossSpec:
    low, high = settings.get("epsilon"), settings.get("epsilon_high")
    params: dict[str, Any] = {
        "kl_coef": settings.get("beta", 0.0),
        "kl_estimator": "k3",
        "kl_bias_correction": settings.get("use_bias_correction_kl", False),
        "entropy_coef": settings.get("entropy_coef", 0.0),
    }
    if mode := settings.get("vllm_importance_sampling_mode"):
        level, weight = mode.split("_")
        params["rollout_correction"] = {
            "weight": weight,
            "level": level,
            "low": settings["vllm_importance_sampling_clip_min"],
            "high": settings["vllm_importance_sampling_clip_max"],
        }
    if settings["loss_type"] == "cispo":  # TRL's `epsilon_high` is the largest weight
        return LossSpec("cispo", params | {"clip_low": 1.0, "clip_high": high - 1})
    params |= {"clip_low": low, "clip_high": high or low}
    if settings.get("importance_sampling_level") == "sequence":
        return LossSpec("gspo", params)
    # TRL's upper bound on the ratio acts only where A < 0
    return LossSpec("clipped", params | {"clip_dual": settings.get("delta")})


def weights_of(loss_type: str) -> torch.Tensor:
    """[B, T]: the normalised weights of rows of one token of context, then the completion."""
    samples = [row_of(f"t/{b}", [0, *row]) for b, row in enumerate(GOLDEN["mask"])]
    samples = [s.replace(loss_weights=s.loss_weights.astype(np.float64)) for s in samples]
    constant = len(samples) * GOLDEN["longest"] if loss_type == "dr_grpo" else None
    normalised = normalise(samples, AGGREGATION[loss_type], constant=constant)
    return torch.tensor(np.array([s.loss_weights[1:] for s in normalised]))


@pytest.mark.parametrize("case", GOLDEN["losses"])
def test_loss_gradient_and_metrics(case: str) -> None:
    golden = GOLDEN["losses"][case]
    trained = table("mask").bool()
    logprobs = table("logprobs").requires_grad_()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    advantages = torch.tensor(GOLDEN["advantages"]["mean_std"], dtype=torch.float64)
    spec = spec_of(golden["settings"])
    corrected = (
        "rollout_correction" in spec.params
    )  # as in a run: who sampled is given if it is corrected for
    inputs = LossInputs(
        logprobs[trained],
        old_logprobs=table("old_logprobs")[trained],
        advantages=advantages[rows[trained]],
        rows=rows[trained],
        reference_logprobs=table("reference_logprobs")[trained],
        entropies=table("entropies")[trained],
        sampler_logprobs=table("sampler_logprobs")[trained] if corrected else None,
    )
    loss, metrics = compute(spec, inputs)
    weights = weights_of(golden["settings"]["loss_type"])[trained]
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
        if spec.name == "gspo" and name == "clip_ratio/region_mean":  # over sequences; weights are 1 / (12 n)
            assert (weights * metrics["clipped"]).sum().item() == pytest.approx(value, rel=1e-6)
        elif name == "cispo_clip_ratio":  # of tokens with A > 0 only, out of all
            own = metrics["clipped"] * (inputs.advantages > 0)
            assert own.mean().item() == pytest.approx(value, rel=1e-6)
        elif name == "clip_ratio/region_mean":
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
    weight = (table("old_logprobs") - table("sampler_logprobs")).exp()
    assert (trained & (advantage != 0) & (weight > 1.4)).sum() >= 2
    assert (trained & (advantage != 0) & (weight < 0.7)).sum() >= 2
    sequence = ((table("old_logprobs") - table("sampler_logprobs")) * trained).sum(1).exp()
    assert (sequence > 1.4).sum() >= 2
    assert (sequence < 0.5).sum() >= 2
    assert len({case["loss"] for case in GOLDEN["losses"].values()}) == len(GOLDEN["losses"])

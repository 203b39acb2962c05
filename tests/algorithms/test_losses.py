from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from silva.algorithms.losses import LOSSES, Loss, LossInputs, LossSettings
from silva.algorithms.objective import compute
from silva.errors import ConfigError, RecordError
from silva.types import LossSpec


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(ratios: Tensor, advantages: Tensor, **more: Tensor) -> LossInputs:
    """Old probability 0.2 everywhere, so that log p = log(0.2 r)."""
    old = torch.full_like(ratios, math.log(0.2))
    rows = torch.zeros(len(ratios), dtype=torch.int64)
    return LossInputs((old + ratios.log()).requires_grad_(), old, advantages, rows, **more)


def gradient(loss: Tensor, inputs: LossInputs) -> list[float]:
    return torch.autograd.grad(loss.sum(), inputs.logprobs)[0].tolist()


def test_reinforce_by_hand() -> None:
    """log(0.2) = -1.609438, log(0.3) = -1.203973: 2 * 1.609438 = 3.218876, -0.5 * 1.203973 = -0.601986."""
    inputs = inputs_of(tensor(1.0, 1.5), tensor(2.0, -0.5))
    loss, metrics = compute(LossSpec("reinforce"), inputs)
    assert loss.tolist() == pytest.approx([3.218875825, -0.601986402], rel=1e-9)
    assert gradient(loss, inputs) == pytest.approx([-2.0, 0.5])
    assert metrics["ratio"].tolist() == pytest.approx([1.0, 1.5])
    # 1.5 - ln 1.5 - 1 = 0.5 - 0.405465 = 0.094535
    assert metrics["mismatch_kl"].tolist() == pytest.approx([0.0, 0.094534892], abs=1e-9)


# Of a loss: ratios, advantages, its values, its gradient by log p, and which tokens it clips.
BY_HAND = {
    # Clip to [0.8, 1.28]; d/dlogp of -A r is -A r, and 0 where the clipped branch is the larger.
    # A =  2, r = 1.5: max(-3.0, -2.56) = -2.56, clipped.  A =  2, r = 0.5: max(-1.0, -1.6) = -1.0.
    # A = -1, r = 1.5: max( 1.5,  1.28) =  1.5.            A = -1, r = 0.5: max( 0.5,  0.8) = 0.8, clipped.
    "clip": (
        LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.28}), [1.5, 0.5, 1.5, 0.5, 1.1],
        [2, 2, -1, -1, 3], [-2.56, -1.0, 1.5, 0.8, -3.3], [0, -1.0, 1.5, 0, -3.3], [1, 0, 0, 1, 0],
    ),
    # c = 3 bounds the loss at -A c where A < 0, and touches nothing else.
    # A = -1, r = 4: min(max(4, 1.2), 3) = 3, clipped.  A = -1, r = 2: 2.  A = 2, r = 4: -2.4.
    # A = -1, r = 0.5: min(max(0.5, 0.8), 3) = 0.8, clipped as before.
    "dual clip": (
        LossSpec("clipped", {"clip_dual": 3.0}), [4, 2, 4, 0.5],
        [-1, -1, 2, -1], [3.0, 2.0, -2.4, 0.8], [0, 2.0, 0, 0], [1, 0, 1, 1],
    ),
    # Weight in [0.5, 1.5], log 0.2 r: A = 2, r = 3: -1.5 * 2 * ln 0.6, gradient -1.5 * 2 = -3.
    # A = -1, r = 0.25: 0.5 * ln 0.05, gradient 0.5.  A = 1, r = 1.2: -1.2 ln 0.24, gradient -1.2.
    "cispo": (
        LossSpec("cispo", {"clip_low": 0.5, "clip_high": 0.5}), [3, 0.25, 1.2],
        [2, -1, 1], [1.532476871, -1.497866137, 1.712539627], [-3.0, 0.5, -1.2], [1, 1, 0],
    ),
    # By default in [0, 4]: -4 * ln 1 and -0.01 ln 0.002.
    "cispo's own bounds": (
        LossSpec("cispo"), [5, 0.01], [1, 1], [0.0, 0.0621460810], [-4.0, -0.01], [1, 0],
    ),
    # max_ratio 2: A = 1, r = 3: -2, no gradient; A = -1, r = 3: 2, none; A = 2, r = 0.5: -1, gradient -1.
    "aipo": (
        LossSpec("aipo", {"max_ratio": 2.0}), [3, 3, 0.5],
        [1, -1, 2], [-2.0, 2.0, -1.0], [0, 0, -1.0], [1, 1, 0],
    ),
    # Added are 0.1 ln(3)^2 = 0.120695 (gradient 0.2 ln 3) and 0.1 ln(2)^2 = 0.048045 (gradient -0.2 ln 2).
    "aipo with kl_tau": (
        LossSpec("aipo", {"max_ratio": 2.0, "kl_tau": 0.1}), [3, 3, 0.5], [1, -1, 2],
        [-1.879305104, 2.120694896, -0.951954699], [0.2197224577, 0.2197224577, -1.1386294361], [1, 1, 0],
    ),
    # kl_beta 0.5, A = 2, r = 3: -2 ln 0.6 + 0.25 ln(3)^2; gradient -2 + 0.5 ln 3.
    # A = -1, r = 0.5: ln 0.1 + 0.25 ln(2)^2 = -2.302585 + 0.120113; gradient 1 - 0.5 ln 2.
    "dro": (
        LossSpec("dro", {"kl_beta": 0.5}), [3, 0.5],
        [2, -1], [1.323388488, -2.182471840], [-1.450693856, 0.653426410], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "ratios", "advantages", "values", "slope", "clipped"), BY_HAND.values(), ids=BY_HAND
)
def test_values_gradients_and_clips_by_hand(
    spec: LossSpec, ratios: list, advantages: list, values: list, slope: list, clipped: list | None
) -> None:
    inputs = inputs_of(tensor(*ratios), tensor(*advantages))
    loss, metrics = compute(spec, inputs)
    assert loss.tolist() == pytest.approx(values, rel=1e-8, abs=1e-12)
    assert gradient(loss, inputs) == pytest.approx(slope, rel=1e-8)
    assert ("clipped" in metrics) == (clipped is not None)
    assert clipped is None or metrics["clipped"].tolist() == clipped


def test_balanced_clip_by_hand() -> None:
    """Clip to [0.8, 1.2]: the value stays that of the clip, the gradient of A = 2, r = 1.5 becomes -2 * 1.2.

    A =  2, r = 1.5: -2.4, gradient -2.4 (0 where its entropy 0.5 is under the threshold 1)
    A =  2, r = 1.1: -2.2, not clipped
    A = -1, r = 1.5:  1.5, gradient  1.5; never clipped above
    A = -1, r = 0.5:  0.8, gradient  0: the lower bound stays flat
    """
    ratios, advantages = tensor(1.5, 1.1, 1.5, 0.5, 1.5), tensor(2, 2, -1, -1, 2)
    entropies = tensor(2, 2, 2, 2, 0.5)
    for threshold, last in [(0.0, -2.4), (1.0, 0.0)]:
        inputs = inputs_of(ratios, advantages, entropies=entropies if threshold else None)
        loss, metrics = compute(LossSpec("clipped", {"balanced_clip_min_entropy": threshold}), inputs)
        assert loss.tolist() == pytest.approx([-2.4, -2.2, 1.5, 0.8, -2.4])
        assert gradient(loss, inputs) == pytest.approx([-2.4, -2.2, 1.5, 0.0, last])
        assert metrics["clipped"].tolist() == [0, 0, 0, 1, float(last == 0)]


def test_gspo_by_hand() -> None:
    """Clip to [0.9, 1.1]. Row 7: s = sqrt(1.6 * 0.9) = 1.2. Row 3: s = (2 * 0.5 * 0.343)^(1/3) = 0.7.

    Row 7, A = 2 and -1: max(-2.4, -2.2) = -2.2, clipped; max(1.2, 1.1) = 1.2, gradient 1.2.
    Row 3, A = 1, -2, 0: max(-0.7, -0.9) = -0.7; max(1.4, 1.8) = 1.8, clipped; 0.
    """
    ratios, rows = tensor(1.6, 2, 0.5, 0.9, 0.343), torch.tensor([7, 3, 3, 7, 3])
    inputs = dataclasses.replace(inputs_of(ratios, tensor(2, 1, -2, -1, 0)), rows=rows)
    loss, metrics = compute(LossSpec("gspo", {"clip_low": 0.1, "clip_high": 0.1}), inputs)
    assert loss.tolist() == pytest.approx([-2.2, -0.7, 1.8, 1.2, 0.0], rel=1e-12)
    assert gradient(loss, inputs) == pytest.approx([0.0, -0.7, 0.0, 1.2, 0.0], rel=1e-12)
    assert metrics["clipped"].tolist() == [1, 0, 1, 0, 0]
    assert metrics["ratio"].tolist() == pytest.approx(ratios.tolist())


def test_gspo_bounds_by_default_are_those_of_the_paper() -> None:
    ratios = tensor(1 - 3.1e-4, 1 - 2.9e-4, 1 + 3.9e-4, 1 + 4.1e-4)
    inputs = dataclasses.replace(inputs_of(ratios, tensor(-1, -1, 1, 1)), rows=torch.arange(4))
    assert compute(LossSpec("gspo"), inputs)[1]["clipped"].tolist() == [1, 0, 0, 1]


def test_correction_weighs_the_policy_loss_only() -> None:
    """p_old / p_sampler = 3, 0.25, 1.5 with p_old 0.2 and A = 1 at p = p_old: -w, by TIS at most 2.

    Of the KL to the reference 0.1 (ln 2 - 0.5 = 0.193147, gradient 0.5) all is left: -2 + 0.193147, ...
    Mean of w: 3.75 / 3 = 1.25; of w^2: (4 + 0.0625 + 2.25) / 3 = 2.104167: 1.5625 / 2.104167 = 74.3 % of 3.
    """
    inputs = inputs_of(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    inputs = dataclasses.replace(
        inputs,
        sampler_logprobs=inputs.old_logprobs - tensor(3, 0.25, 1.5).log(),
        reference_logprobs=inputs.old_logprobs - math.log(2),
    )
    spec = LossSpec("clipped", {"rollout_correction": {}, "kl_coef": 1.0, "kl_bias_correction": False})
    loss, metrics = compute(spec, inputs)
    assert loss.tolist() == pytest.approx([-1.806852819, -0.056852819, -1.306852819], rel=1e-8)
    assert gradient(loss, inputs) == pytest.approx([-1.5, 0.25, -1.0])
    weight, squared = metrics["correction_weight"], metrics["correction_weight_squared"]
    assert weight.tolist() == pytest.approx([2.0, 0.25, 1.5])
    assert (weight.mean() ** 2 / squared.mean()).item() == pytest.approx(0.742574257)
    assert metrics["masked"].tolist() == [0, 0, 0]
    # w - ln w - 1: 2 - ln 3, -0.75 + ln 4, 0.5 - ln 1.5; the update has not moved yet
    assert metrics["mismatch_kl"].tolist() == pytest.approx([0.901387711, 0.636294361, 0.094534892])
    assert metrics["approx_kl"].tolist() == pytest.approx([0, 0, 0], abs=1e-15)


def test_rejection_is_by_the_policy_as_it_is_now_against_the_sampler() -> None:
    """p / p_old = 2 on all tokens, p_old / p_sampler = 1, 2, 4, 1: p / p_sampler = 2, 4, 8, 2.

    Of tokens in [0, 5] the third falls. Of rows in [0, 5] the fourth falls too, which is of the same row.
    Both at once, the token and its weight: times w = 1, 2, and of 4 nothing.
    """
    inputs = inputs_of(tensor(2, 2, 2, 2), tensor(1, 1, 1, 1))
    sampler, rows = inputs.old_logprobs - tensor(1, 2, 4, 1).log(), torch.tensor([0, 1, 2, 2])
    inputs = dataclasses.replace(inputs, sampler_logprobs=sampler, rows=rows)

    def of(**correction: object) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = compute(LossSpec("aipo", {"rollout_correction": correction}), inputs)
        assert gradient(loss, inputs) == pytest.approx(loss.tolist())
        return loss, metrics

    for level, values in (("token", [-2.0, -2.0, 0.0, -2.0]), ("any", [-2.0, -2.0, 0.0, 0.0])):
        loss, metrics = of(weight=None, reject={level: [None, 5.0]})
        assert loss.tolist() == pytest.approx(values)
        assert metrics["masked"].tolist() == [float(value == 0) for value in values]
        assert "correction_weight" not in metrics
    loss, metrics = of(reject={"token": [None, 5.0]})
    assert loss.tolist() == pytest.approx([-2.0, -4.0, 0.0, -2.0])
    assert metrics["correction_weight"].tolist() == pytest.approx([1.0, 2.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("level", "expected"), [("token", [-1.5, -1.0, 0.0]), ("sequence", [-1.5, -1.5, 0.0])]
)
def test_a_token_that_nobody_sampled_has_no_weight_and_leaves_those_of_its_row(
    level: str, expected: list[float]
) -> None:
    """p_old / p_sampler = 1.5, 1 and unknown, of one row; p / p_old = 1, A = 1."""
    inputs = inputs_of(tensor(1, 1, 1), tensor(1, 1, 1))
    sampler = inputs.old_logprobs - tensor(1.5, 1, math.nan).log()
    inputs = dataclasses.replace(inputs, sampler_logprobs=sampler, rows=torch.zeros(3, dtype=torch.int64))
    loss, metrics = compute(LossSpec("clipped", {"rollout_correction": {"level": level}}), inputs)
    assert loss.tolist() == pytest.approx(expected)
    assert metrics["masked"].tolist() == [0, 0, 1]
    assert gradient(loss, inputs) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_metrics_by_age_add_up_over_micro_batches(dtype: torch.dtype) -> None:
    """Ages 0, 0, 1, 2, 5, 3 with r = 1.5, 1, 1.5, 1, 1.5, 1 and A = 1: clipped are the first, third, fifth.

    Means over all 6: share 2/6 of age 0, 1/6 of 1 and 2, 2/6 of 3+; clipped 1/6, 1/6, 0, 1/6.
    """
    ratios, ages = tensor(1.5, 1, 1.5, 1, 1.5, 1), torch.tensor([0, 0, 1, 2, 5, 3], dtype=dtype)

    def means(parts: list[list[int]]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for part in parts:
            inputs = inputs_of(ratios[part], torch.ones(len(part), dtype=torch.float64), ages=ages[part])
            for name, values in compute(LossSpec("clipped"), inputs)[1].items():
                sums[name] = sums.get(name, 0.0) + values.sum().item()
        return {name: value / 6 for name, value in sums.items() if "/" in name}

    whole = means([[0, 1, 2, 3, 4, 5]])
    assert whole == pytest.approx(
        {
            "share/age0": 2 / 6, "share/age1": 1 / 6, "share/age2": 1 / 6, "share/age3+": 2 / 6,
            "clipped/age0": 1 / 6, "clipped/age1": 1 / 6, "clipped/age2": 0, "clipped/age3+": 1 / 6,
        }
    )  # fmt: skip
    assert means([[0, 1], [2, 3, 4], [5]]) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("params", "values", "slope", "metrics"),
    [
        ({}, [1.0, 2.0], -1.0, {"nll"}),
        # 0.1 k1 with k1 = log p - log p_ref: 1 + 0.1 * (-1 + 3) = 1.2, 2 + 0.1 * (-2 + 3) = 2.1.
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, [1.2, 2.1], -0.9, {"nll", "kl"}),
    ],
)
def test_cross_entropy_reads_neither_advantages_nor_sampling_logprobs(
    params: dict, values: list[float], slope: float, metrics: set[str]
) -> None:
    """Nobody sampled its tokens, and it is finite with a KL too."""
    logprobs, nan = tensor(-1.0, -2.0).requires_grad_(), tensor(math.nan, math.nan)
    reference = tensor(-3.0, -3.0) if params else None
    inputs = LossInputs(logprobs, nan, nan, torch.zeros(2, dtype=torch.int64), reference)
    loss, found = compute(LossSpec("cross_entropy", params), inputs)
    assert loss.tolist() == pytest.approx(values)
    assert gradient(loss, inputs) == pytest.approx([slope, slope])
    assert set(found) == metrics


def test_dft_weighs_each_token_by_its_probability() -> None:
    """p = 0.5 and 0.25: p * -log p = 0.346574 and 0.346574; the slopes are -p, since the weight has none."""
    logprobs, nan = tensor(0.5, 0.25).log().requires_grad_(), tensor(math.nan, math.nan)
    inputs = LossInputs(logprobs, nan, nan, torch.zeros(2, dtype=torch.int64))
    loss, found = compute(LossSpec("cross_entropy", {"weighting": "dft"}), inputs)
    assert loss.tolist() == pytest.approx([0.346574, 0.346574], abs=1e-6)
    assert gradient(loss, inputs) == pytest.approx([-0.5, -0.25])
    assert found["nll"].tolist() == pytest.approx([0.693147, 1.386294], abs=1e-6)


def test_kl_and_entropy_terms_by_hand() -> None:
    """log p = ln 0.2 and ln 0.3, reference 0.1 and 0.3, k3: r = 0.5 gives 0.193147, r = 1 gives 0.

    reinforce at A = 1: 1.609438, 1.203973; + 0.1 * (0.193147, 0) - 0.01 * (2, 1) = 1.608753, 1.193973.
    Gradient by log p: -1 + 0.1 * (1 - r) = -0.95, -1.0; by entropy: -0.01.
    """
    entropies = tensor(2.0, 1.0).requires_grad_()
    reference = tensor(0.1, 0.3).log()
    inputs = inputs_of(tensor(1.0, 1.5), tensor(1.0, 1.0), reference_logprobs=reference, entropies=entropies)
    terms = {"kl_coef": 0.1, "kl_estimator": "k3", "kl_bias_correction": False, "entropy_coef": 0.01}
    spec = LossSpec("reinforce", terms)
    loss, metrics = compute(spec, inputs)
    assert loss.tolist() == pytest.approx([1.608752631, 1.193972804], rel=1e-9)
    assert metrics["kl"].tolist() == pytest.approx([math.log(2) - 0.5, 0.0], abs=1e-12)
    assert metrics["entropy"].tolist() == [2.0, 1.0]
    by_logprobs, by_entropies = torch.autograd.grad(loss.sum(), [inputs.logprobs, entropies])
    assert by_logprobs.tolist() == pytest.approx([-0.95, -1.0])
    assert by_entropies.tolist() == [-0.01, -0.01]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_corrected_kl_has_the_gradient_of_the_reverse_kl_off_policy(estimator: str, scored: bool) -> None:
    """Over all four tokens, weighted by the probability with which an older policy sampled them, also if the
    trainer has scored them since with newer weights."""
    logits = tensor(0.3, -1.0, 0.8, 0.1).requires_grad_()
    sampler, newer, reference = (
        tensor(*values).log_softmax(0)
        for values in [(0.0, 0.5, -0.2, 0.9), (0.2, -0.5, 0.4, 0.6), (-0.5, 0.4, 0.2, 1.0)]
    )
    logprobs = logits.log_softmax(0)
    old, known = (newer, sampler) if scored else (sampler, None)
    inputs = LossInputs(
        logprobs, old, torch.zeros_like(old), torch.arange(4), reference, sampler_logprobs=known
    )
    correction = {"rollout_correction": {}} if scored else {}
    spec = LossSpec("reinforce", {"kl_coef": 1.0, "kl_estimator": estimator, **correction})
    loss = (sampler.exp() * compute(spec, inputs)[0]).sum()
    expected = torch.autograd.grad(loss, logits, retain_graph=True)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(expected, reverse, rtol=1e-12, atol=1e-15)


def test_what_is_only_watched_does_not_touch_the_loss() -> None:
    """Coefficients of 0 leave the loss finite even where a watched KL is not; metrics carry no graph."""
    inputs = inputs_of(
        tensor(1.0),
        tensor(1.0),
        reference_logprobs=tensor(-math.inf),
        entropies=tensor(math.nan).requires_grad_(),
    )
    loss, metrics = compute(LossSpec("clipped"), inputs)
    assert loss.tolist() == [-1.0]
    assert metrics["kl"].tolist() == [math.inf]
    assert not any(metric.requires_grad for metric in metrics.values())


SHARED = "kl_coef, kl_estimator, kl_bias_correction, entropy_coef, rollout_correction"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ppo", {}, "unknown loss: got 'ppo', expected one of reinforce, clipped, gspo, cispo, aipo, dro, "
         "cross_entropy$"),
        ("clipped", {"clip_lo": 0.1}, "unknown parameter of loss clipped: got 'clip_lo', expected some of "
         f"clip_low, clip_high, clip_dual, balanced_clip_min_entropy, {SHARED}$"),
        ("reinforce", {"clip_low": 0.1}, "unknown parameter of loss reinforce: got 'clip_low'"),
        ("reinforce", {"kl_estimator": "k4"}, "kl_estimator: got 'k4', expected one of .k1., .k2., .k3.$"),
        ("gspo", {"clip_low": 1.1}, "loss gspo: clip_low: got 1.1, expected a number >= 0 and <= 1$"),
        ("cispo", {"clip_low": 1.1}, "loss cispo: clip_low: got 1.1, expected a number >= 0 and <= 1$"),
        ("aipo", {"max_ratio": 0.9}, "loss aipo: max_ratio: got 0.9, expected a number >= 1$"),
        ("aipo", {"kl_tau": -1.0}, "loss aipo: kl_tau: got -1.0, expected a number >= 0$"),
        ("dro", {"kl_beta": -0.1}, "loss dro: kl_beta: got -0.1, expected a number >= 0$"),
        ("cross_entropy", {"rollout_correction": {}}, "cross_entropy: got a rollout_correction, expected n"),
        ("clipped", {"rollout_correction": {"reject": {"token": [8, 0.1]}}},
         "loss clipped: reject token: got bounds 8.0 and 0.1, expected 0 <= low < high$"),
        ("clipped", {"clip_low": 1.1, "kl_coef": "1", "clip_high": -1},
         "clip_low: got 1.1, .*; clip_high: got -1, expected a number >= 0$"),
        ("clipped", {"clip_dual": 1.2}, "clip_dual: got 1.2, expected more than 1 . clip_high"),
    ],
)  # fmt: skip
def test_wrong_specs_are_refused(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compute(LossSpec(name, params), inputs_of(tensor(1.0), tensor(1.0)))


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ({"kl_coef": 0.1}, "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropies"),
        ({"balanced_clip_min_entropy": 0.1}, "entropies"),
        ({"rollout_correction": {}}, "sampler_logprobs"),
    ],
)
def test_a_term_without_its_inputs_is_refused(params: dict, missing: str) -> None:
    with pytest.raises(RecordError, match=f"got no {missing}"):
        compute(LossSpec("clipped", params), inputs_of(tensor(1.0), tensor(1.0)))


def test_misaligned_inputs_are_refused() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RecordError, match=r"advantages must align .* got \(3,\), expected \(2,\)"):
        LossInputs(tensor(0, 0), tensor(0, 0), tensor(1, 2, 3), rows)
    with pytest.raises(RecordError, match=r"got shape \(1, 2\), expected \[N\]"):
        LossInputs(tensor(0, 0)[None], tensor(0, 0)[None], tensor(0, 0)[None], rows[None])


class Own(LossSettings):
    type: Literal["own"] = "own"
    scale: float = 2.0


def test_a_loss_is_a_function_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what it names, in any order; the rest is added as to all others: 2 * 3 * -1.6 - 0.5 * 4."""

    def own(*, rows: Tensor, settings: Own, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return settings.scale * logprobs * (rows + 3), {"own": logprobs.detach()}

    monkeypatch.setitem(LOSSES, "own", Loss(Own, own))
    inputs = inputs_of(tensor(1.0), tensor(1.0), entropies=tensor(4.0))
    loss, metrics = compute(LossSpec("own", {"entropy_coef": 0.5}), inputs)
    assert loss.tolist() == pytest.approx([6 * math.log(0.2) - 2.0], rel=1e-12)
    assert set(metrics) == {"own", "entropy"} and LOSSES["own"].imitates
    loss, _ = compute(LossSpec("own", {"scale": 4.0}), inputs)
    assert loss.tolist() == pytest.approx([12 * math.log(0.2)], rel=1e-12)


def test_a_loss_that_needs_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs * entropies, {}

    monkeypatch.setitem(LOSSES, "own", Loss(Own, own))
    with pytest.raises(RecordError, match=r"loss own: got no entropies, expected \[N\]"):
        compute(LossSpec("own"), inputs_of(tensor(1.0), tensor(1.0)))
    with pytest.raises(ConfigError, match="loss Own: its function takes inputs, expected some of settings"):
        Loss(Own, lambda inputs: (inputs, {}))

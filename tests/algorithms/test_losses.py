from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from silva.algorithms.losses import LOSSES, LossInputs, compute
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


def test_clipped_by_hand() -> None:
    """Clip to [0.8, 1.28]; d/dlogp of -A r is -A r, and 0 where the clipped branch is the larger.

    A =  2, r = 1.5: max(-3.0, -2.56) = -2.56, clipped
    A =  2, r = 0.5: max(-1.0, -1.6 ) = -1.0,  gradient -1.0
    A = -1, r = 1.5: max( 1.5,  1.28) =  1.5,  gradient  1.5
    A = -1, r = 0.5: max( 0.5,  0.8 ) =  0.8,  clipped
    A =  3, r = 1.1: max(-3.3, -3.3 ) = -3.3,  gradient -3.3
    """
    inputs = inputs_of(tensor(1.5, 0.5, 1.5, 0.5, 1.1), tensor(2, 2, -1, -1, 3))
    loss, metrics = compute(LossSpec("clipped", {"clip_low": 0.2, "clip_high": 0.28}), inputs)
    assert loss.tolist() == pytest.approx([-2.56, -1.0, 1.5, 0.8, -3.3])
    assert gradient(loss, inputs) == pytest.approx([0.0, -1.0, 1.5, 0.0, -3.3])
    assert metrics["clipped"].tolist() == [1, 0, 0, 1, 0]


def test_dual_clip_by_hand() -> None:
    """c = 3 bounds the loss at -A c where A < 0, and touches nothing else.

    A = -1, r = 4: min(max(4, 1.2), 3) = 3, clipped.  A = -1, r = 2: 2.  A = 2, r = 4: -2.4.
    A = -1, r = 0.5: min(max(0.5, 0.8), 3) = 0.8, clipped as before.
    """
    inputs = inputs_of(tensor(4, 2, 4, 0.5), tensor(-1, -1, 2, -1))
    loss, metrics = compute(LossSpec("clipped", {"clip_dual": 3.0}), inputs)
    assert loss.tolist() == pytest.approx([3.0, 2.0, -2.4, 0.8])
    assert gradient(loss, inputs) == pytest.approx([0.0, 2.0, 0.0, 0.0])
    assert metrics["clipped"].tolist() == [1, 0, 1, 1]


def test_cross_entropy_reads_neither_advantages_nor_sampling_logprobs() -> None:
    nan = tensor(math.nan, math.nan)
    logprobs = tensor(-0.5, -2.0).requires_grad_()
    inputs = LossInputs(logprobs, old_logprobs=nan, advantages=nan, rows=torch.zeros(2, dtype=torch.int64))
    loss, metrics = compute(LossSpec("cross_entropy"), inputs)
    assert loss.tolist() == [0.5, 2.0]
    assert gradient(loss, inputs) == [-1.0, -1.0]
    assert metrics == {}


def test_kl_and_entropy_terms_by_hand() -> None:
    """log p = ln 0.2 and ln 0.3, reference 0.1 and 0.3, k3: r = 0.5 gives 0.193147, r = 1 gives 0.

    reinforce at A = 1: 1.609438, 1.203973; + 0.1 * (0.193147, 0) - 0.01 * (2, 1) = 1.608753, 1.193973.
    Gradient by log p: -1 + 0.1 * (1 - r) = -0.95, -1.0; by entropy: -0.01.
    """
    entropies = tensor(2.0, 1.0).requires_grad_()
    reference = tensor(0.1, 0.3).log()
    inputs = inputs_of(tensor(1.0, 1.5), tensor(1.0, 1.0), reference_logprobs=reference, entropies=entropies)
    spec = LossSpec("reinforce", {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.01})
    loss, metrics = compute(spec, inputs)
    assert loss.tolist() == pytest.approx([1.608752631, 1.193972804], rel=1e-9)
    assert metrics["kl"].tolist() == pytest.approx([math.log(2) - 0.5, 0.0], abs=1e-12)
    assert metrics["entropy"].tolist() == [2.0, 1.0]
    by_logprobs, by_entropies = torch.autograd.grad(loss.sum(), [inputs.logprobs, entropies])
    assert by_logprobs.tolist() == pytest.approx([-0.95, -1.0])
    assert by_entropies.tolist() == [-0.01, -0.01]


def test_corrected_kl_by_hand() -> None:
    """A = 0 leaves the KL alone. p = 0.3, p_old = 0.2, reference 0.15: ratio 1.5, r = 0.5.

    k3 = 0.193147, times 1.5 = 0.289721; gradient 1.5 * (k3 + 1 - r) = 1.5 * ln 2 = 1.039721.
    """
    inputs = inputs_of(tensor(1.5), tensor(0.0), reference_logprobs=tensor(0.15).log())
    loss, metrics = compute(LossSpec("reinforce", {"kl_coef": 1.0, "kl_correction": True}), inputs)
    assert loss.tolist() == pytest.approx([0.289720771], rel=1e-8)
    assert gradient(loss, inputs) == pytest.approx([1.5 * math.log(2)], rel=1e-12)
    assert metrics["kl"].tolist() == pytest.approx([math.log(2) - 0.5])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_corrected_kl_has_the_gradient_of_the_reverse_kl_off_policy(estimator: str) -> None:
    """Over all four tokens, weighted by the probability with which an older policy sampled them."""
    logits = tensor(0.3, -1.0, 0.8, 0.1).requires_grad_()
    old, reference = (
        tensor(*values).log_softmax(0) for values in [(0.0, 0.5, -0.2, 0.9), (-0.5, 0.4, 0.2, 1.0)]
    )
    logprobs = logits.log_softmax(0)
    inputs = LossInputs(logprobs, old, torch.zeros_like(old), torch.arange(4), reference)
    spec = LossSpec("reinforce", {"kl_coef": 1.0, "kl_estimator": estimator, "kl_correction": True})
    expected = torch.autograd.grad((old.exp() * compute(spec, inputs)[0]).sum(), logits, retain_graph=True)
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


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name: str, estimator: str, correction: bool) -> None:
    """float64, away from the kinks at 0.8, 1.2 and 2.5, every branch of the clip taken."""
    ratios = tensor(0.5, 0.9, 1.1, 1.5, 3.0, 0.5, 0.9, 1.1, 1.5, 3.0)
    advantages = tensor(1, 2, 0.5, 1, 1.5, -1, -2, -0.5, -1, -1.5)
    generator = torch.Generator().manual_seed(1)
    reference = -2 * torch.rand(10, generator=generator, dtype=torch.float64)
    entropies = torch.rand(10, generator=generator, dtype=torch.float64).requires_grad_()
    params = {"kl_coef": 0.3, "kl_estimator": estimator, "kl_correction": correction, "entropy_coef": 0.2}
    spec = LossSpec(name, params | ({"clip_dual": 2.5} if name == "clipped" else {}))
    at = inputs_of(ratios, advantages)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        inputs = LossInputs(logprobs, at.old_logprobs, advantages, at.rows, reference, entropies)
        return compute(spec, inputs)[0]

    assert torch.autograd.gradcheck(loss, (at.logprobs, entropies), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("clip_dual", [None, 3.0])
def test_on_policy_the_clipped_gradient_is_that_of_reinforce(clip_dual: float | None) -> None:
    """At r = 1 both branches of max() are equal: its gradient is shared between them and must add up."""
    inputs = inputs_of(torch.ones(4, dtype=torch.float64), tensor(1.5, -2.0, 0.0, 0.3))
    plain, _ = compute(LossSpec("reinforce"), inputs)
    clipped, metrics = compute(LossSpec("clipped", {"clip_dual": clip_dual}), inputs)
    assert gradient(clipped, inputs) == pytest.approx(gradient(plain, inputs), abs=1e-15)
    assert metrics["clipped"].sum() == 0


def test_tokens_do_not_see_each_other() -> None:
    """Permuted or cut in two, every token keeps its loss, gradient and metrics."""
    generator = torch.Generator().manual_seed(2)
    ratios = 0.5 + torch.rand(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    spec = LossSpec("clipped", {"clip_high": 0.1})

    def losses_and_gradients(index: Tensor) -> Tensor:
        inputs = inputs_of(ratios[index], advantages[index])
        loss, metrics = compute(spec, inputs)
        return torch.stack([loss.detach(), tensor(*gradient(loss, inputs)), metrics["clipped"]])

    whole = losses_and_gradients(torch.arange(12))
    order = torch.randperm(12, generator=generator)
    assert torch.equal(losses_and_gradients(order), whole[:, order])
    cut = [losses_and_gradients(part) for part in torch.arange(12).split([5, 7])]
    assert torch.equal(torch.cat(cut, dim=1), whole)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LossSpec("ppo"), "unknown loss: got 'ppo', expected one of reinforce, clipped, cross_entropy"),
        (
            LossSpec("clipped", {"clip_lo": 0.1}),
            "unknown parameter of loss clipped: got 'clip_lo', expected some of "
            "clip_low, clip_high, clip_dual, kl_coef, kl_estimator, kl_correction, entropy_coef",
        ),
        (LossSpec("reinforce", {"clip_low": 0.1}), "unknown parameter of loss reinforce: got 'clip_low'"),
        (LossSpec("reinforce", {"kl_estimator": "k4"}), "got 'k4', expected one of k1, k2, k3"),
        (LossSpec("clipped", {"clip_low": 1.0}), "got clip_low 1.0 .* expected 0 <= clip_low < 1"),
        (LossSpec("clipped", {"clip_dual": 1.2}), "got clip_dual 1.2, expected more than 1 . clip_high"),
    ],
)
def test_wrong_specs_are_refused(spec: LossSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compute(spec, inputs_of(tensor(1.0), tensor(1.0)))


@pytest.mark.parametrize(
    ("params", "missing"), [({"kl_coef": 0.1}, "reference_logprobs"), ({"entropy_coef": 0.1}, "entropies")]
)
def test_a_term_without_its_inputs_is_refused(params: dict, missing: str) -> None:
    with pytest.raises(RecordError, match=f"got no {missing}"):
        compute(LossSpec("reinforce", params), inputs_of(tensor(1.0), tensor(1.0)))


def test_misaligned_inputs_are_refused() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RecordError, match=r"advantages must align .* got \(3,\), expected \(2,\)"):
        LossInputs(tensor(0, 0), tensor(0, 0), tensor(1, 2, 3), rows)
    with pytest.raises(RecordError, match=r"got shape \(1, 2\), expected \[N\]"):
        LossInputs(tensor(0, 0)[None], tensor(0, 0)[None], tensor(0, 0)[None], rows[None])

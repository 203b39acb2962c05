"""Policy-gradient losses, per token, over the trained tokens of a micro-batch laid out in one dimension.

There are no masks here: tokens without loss never arrive. There is no averaging either: the normaliser
of the whole update sits in each token's weight (`aggregation.py`), so that

    total = (weights_N * loss_N).sum()

has the same gradient however the update was cut into micro-batches. Adding a loss is one function and
one line in `LOSSES`; its keyword arguments are its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from silva.algorithms.kl import KL_ESTIMATORS
from silva.errors import ConfigError, RecordError
from silva.types import LossSpec

Metrics = dict[str, Tensor]  # [N] each, detached


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss sees of N trained tokens.

    Args:
        logprobs: [N] of the policy being trained at the sample's temperature, with gradient.
        old_logprobs: [N] of the policy that sampled; NaN on tokens nobody sampled (expert tokens).
        advantages: [N].
        rows: [N] int64, which sample a token belongs to.
        reference_logprobs: [N] of the reference policy; needed where `kl_coef` is above 0.
        entropies: [N] in nats, with gradient; needed where `entropy_coef` is not 0.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    rows: Tensor
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 1:
            raise RecordError(f"logprobs of LossInputs: got shape {tuple(self.logprobs.shape)}, expected [N]")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value.shape != self.logprobs.shape:
                raise RecordError(
                    f"{field.name} must align with logprobs of LossInputs: "
                    f"got {tuple(value.shape)}, expected {tuple(self.logprobs.shape)}"
                )


def compute(spec: LossSpec, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The loss that `spec` names, plus `kl_coef` * KL to the reference, minus `entropy_coef` * entropy.

    Args:
        spec: a name in `LOSSES`; params are that loss's keywords and `kl_coef` (default 0),
            `kl_estimator` (default "k3"), `kl_correction` (default False: the estimator as it is; True:
            times the ratio p / p_old, see kl.py), `entropy_coef` (default 0).
        inputs: N tokens.

    Returns:
        loss [N] with gradient, and metrics [N] each, detached: those of the loss, `kl` where the
        reference is known, `entropy` where entropies are.

    Raises:
        ConfigError: unknown loss, parameter or estimator, or a value out of range.
        RecordError: a term has a coefficient but its inputs are missing.
    """
    loss, own, terms = _resolve(spec)
    loss_N, metrics = loss(inputs, **own)

    kl_coef, entropy_coef = float(terms["kl_coef"]), float(terms["entropy_coef"])
    if inputs.reference_logprobs is not None:
        kl_N = KL_ESTIMATORS[terms["kl_estimator"]](inputs.logprobs, inputs.reference_logprobs)
        metrics["kl"] = kl_N.detach()
        if kl_coef:  # not 0 * kl_N: an infinite KL that is only watched must not turn the loss into NaN
            correction_N = _ratio(inputs)[0] if terms["kl_correction"] else 1.0
            loss_N = loss_N + kl_coef * correction_N * kl_N
    elif kl_coef:
        raise RecordError(f"loss {spec.name} with kl_coef {kl_coef}: got no reference_logprobs, expected [N]")

    if inputs.entropies is not None:
        metrics["entropy"] = inputs.entropies.detach()
        if entropy_coef:
            loss_N = loss_N - entropy_coef * inputs.entropies
    elif entropy_coef:
        raise RecordError(
            f"loss {spec.name} with entropy_coef {entropy_coef}: got no entropies, expected [N]"
        )
    return loss_N, metrics


def reinforce(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-A log p (Williams 1992): the gradient is exact on-policy only; nothing corrects for staleness.

    Returns:
        loss [N]; metrics `ratio`, `mismatch_kl`.
    """
    _, metrics = _ratio(inputs)
    return -inputs.advantages * inputs.logprobs, metrics


def clipped(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = p / p_old (PPO, arXiv:1707.06347, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). `clip_dual` = c bounds the loss
    of tokens with A < 0 by -A c, so that one very unlikely old token cannot dominate (dual-clip PPO,
    arXiv:1912.09729, eq. 5). At r = 1 the gradient is that of `reinforce`.

    Returns:
        loss [N]; metrics `ratio`, `mismatch_kl`, `clipped` (1 where the clip took the gradient away).
    """
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ConfigError(
            f"loss clipped: got clip_low {clip_low} and clip_high {clip_high}, "
            "expected 0 <= clip_low < 1 and clip_high >= 0"
        )
    if clip_dual is not None and clip_dual <= 1 + clip_high:
        raise ConfigError(
            f"loss clipped: got clip_dual {clip_dual}, expected more than 1 + clip_high ({clip_high})"
        )

    ratio_N, metrics = _ratio(inputs)
    advantages_N = inputs.advantages
    free_N = -advantages_N * ratio_N
    loss_N = torch.maximum(free_N, -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high))
    too_good_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    too_bad_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    clipped_N = too_good_N | too_bad_N
    if clip_dual is not None:
        bound_N = -advantages_N * clip_dual
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
        clipped_N = clipped_N | ((advantages_N < 0) & (ratio_N > clip_dual))
    metrics["clipped"] = clipped_N.to(loss_N.dtype)
    return loss_N, metrics


def cross_entropy(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-log p: for tokens to imitate; reads neither advantages nor sampling log-probabilities. No metrics."""
    return -inputs.logprobs, {}


LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "reinforce": reinforce,
    "clipped": clipped,
    "cross_entropy": cross_entropy,
}


def _ratio(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """r = p / p_old [N] with gradient, and metrics; mismatch_kl = r - log r - 1 estimates KL(p_old || p)."""
    log_ratio_N = inputs.logprobs - inputs.old_logprobs
    ratio_N = log_ratio_N.exp()
    mismatch_N = log_ratio_N.expm1() - log_ratio_N
    return ratio_N, {"ratio": ratio_N.detach(), "mismatch_kl": mismatch_N.detach()}


_TERMS: Mapping[str, object] = {
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_correction": False,
    "entropy_coef": 0.0,
}


def _resolve(spec: LossSpec) -> tuple[Callable[..., tuple[Tensor, Metrics]], dict, dict]:
    """The loss, its own parameters and those of the added terms, checked by name."""
    if spec.name not in LOSSES:
        raise ConfigError(f"unknown loss: got {spec.name!r}, expected one of {', '.join(LOSSES)}")
    loss = LOSSES[spec.name]
    known = [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = [name for name in spec.params if name not in known and name not in _TERMS]
    if unknown:
        raise ConfigError(
            f"unknown parameter of loss {spec.name}: got {', '.join(map(repr, unknown))}, "
            f"expected some of {', '.join([*known, *_TERMS])}"
        )
    own = {name: value for name, value in spec.params.items() if name in known}
    terms = {name: spec.params.get(name, default) for name, default in _TERMS.items()}
    if terms["kl_estimator"] not in KL_ESTIMATORS:
        raise ConfigError(
            f"kl_estimator of loss {spec.name}: got {terms['kl_estimator']!r}, "
            f"expected one of {', '.join(KL_ESTIMATORS)}"
        )
    return loss, own, terms

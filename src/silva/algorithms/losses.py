"""Policy-gradient losses, per token, over the trained tokens of a micro-batch laid out in one dimension.

There are no masks here: tokens without loss never arrive. There is no averaging either: the normaliser
of the whole update sits in each token's weight (`aggregation.py`), so that

    total = (weights_N * loss_N).sum()

has the same gradient however the update was cut into micro-batches. Adding a loss is one function and
one line in `LOSSES`; its keyword arguments are its parameters.

| loss | gradient = factor * grad log p | beyond its bounds |
|---|---|---|
| reinforce | -A | none: exact on-policy only |
| clipped (PPO) | -A r | 0 where the ratio has already moved the way A wants |
| gspo | -A s, s of the whole row | as clipped, whole rows |
| cispo | -A clip(r) | bounded |
| aipo | -A r | 0 |
| dro | -A + beta log r | pulled back, the further the more |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from silva.algorithms.correction import importance_weights, kept, over_rows
from silva.algorithms.kl import KL_ESTIMATORS
from silva.errors import ConfigError, RecordError
from silva.types import LossSpec

Metrics = dict[str, Tensor]  # [N] each, detached


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss sees of N trained tokens.

    Args:
        logprobs: [N] of the policy being trained at the sample's temperature, with gradient.
        old_logprobs: [N] of the trainer before the update where it scored them (sampler_logprobs is given
            then), else of the policy that sampled; NaN on tokens nobody sampled (expert tokens).
        advantages: [N].
        rows: [N] int64, which sample a token belongs to; samples are whole.
        reference_logprobs: [N] of the reference policy; needed where `kl_coef` is above 0.
        entropies: [N] in nats, with gradient; needed where `entropy_coef` is not 0.
        sampler_logprobs: [N] as recorded while sampling; needed for `correction`.
        ages: [N] whole, version of the trainer minus that of the token; adds metrics by age. Worth giving
            where they differ within the update.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    rows: Tensor
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ages: Tensor | None = None

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
    """The loss that `spec` names, times w, plus `kl_coef` * KL to the reference - `entropy_coef` * entropy.

    Args:
        spec: a name in `LOSSES`; params are that loss's keywords and, with correction.py's functions,
            `correction` (default None; "truncate" or "mask" by w = p_old / p_sampler), `correction_level`
            ("token"), `correction_low` and `correction_high` (None), `reject` ({}; bounds for p / p_sampler
            by level); `kl_coef` (0), `kl_estimator` ("k3"), `kl_correction` (False: the estimator as it is;
            True: times the ratio p / p_old, see kl.py), `entropy_coef` (0).
        inputs: N tokens.

    Returns:
        loss [N] with gradient, and metrics [N] each, detached: those of the loss, `kl` where the
        reference is known, `entropy` where entropies are, those of `_corrected` and of `_by_age`.

    Raises:
        ConfigError: unknown loss, parameter or estimator, or a value out of range.
        RecordError: a term has a coefficient but its inputs are missing.
    """
    loss, own, terms = _resolve(spec)
    loss_N, metrics = loss(inputs, **own)
    loss_N = _corrected(loss_N, metrics, inputs, terms)

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
    if inputs.ages is not None:
        metrics |= _by_age(metrics, inputs.ages, inputs.logprobs)
    return loss_N, metrics


def check(spec: LossSpec) -> None:
    """Refuse what `compute` would refuse in the first update.

    Raises:
        ConfigError: as `compute`.
    """
    one = torch.zeros(1)
    compute(spec, LossInputs(one, one, one, one.long(), one, one, one, one.long()))


def reinforce(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-A log p (Williams 1992): the gradient is exact on-policy only; nothing corrects for staleness.

    Returns:
        loss [N]; metrics of `_ratio`.
    """
    _, metrics = _ratio(inputs)
    return -inputs.advantages * inputs.logprobs, metrics


def clipped(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    clip_balanced_above: float | None = None,
) -> tuple[Tensor, Metrics]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = p / p_old (PPO, arXiv:1707.06347, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476). `clip_dual` = c bounds the loss
    of tokens with A < 0 by -A c, so that one very unlikely old token cannot dominate (dual-clip PPO,
    arXiv:1912.09729, eq. 5). `clip_balanced_above` is entropy-balanced clipping (AEPO, arXiv:2510.14545):
    above 1 + high the bound becomes (1 + high) r / sg(r), of the same value, so that tokens with A > 0 and
    at least that entropy, in nats, keep the gradient -A (1 + high) grad log p. 0 is all tokens, as the
    authors' code has it (there with `clip_dual` 3). At r = 1 the gradient is that of `reinforce`.

    Returns:
        loss [N]; metrics of `_ratio`, and `clipped` (1 where the clip took the gradient away).
    """
    if clip_dual is not None and clip_dual <= 1 + clip_high:
        raise ConfigError(
            f"loss clipped: got clip_dual {clip_dual}, expected more than 1 + clip_high ({clip_high})"
        )
    ratio_N, metrics = _ratio(inputs)
    loss_N, clipped_N = _clip("clipped", ratio_N, inputs.advantages, clip_low, clip_high)
    if clip_balanced_above is not None:
        balanced_N = (inputs.advantages > 0) & (ratio_N > 1 + clip_high)
        if clip_balanced_above > 0:
            if inputs.entropies is None:
                raise RecordError(
                    f"loss clipped with clip_balanced_above {clip_balanced_above}: "
                    "got no entropies, expected [N]"
                )
            balanced_N = balanced_N & (inputs.entropies >= clip_balanced_above)
        bound_N = (1 + clip_high) * (inputs.logprobs - inputs.logprobs.detach()).exp()
        loss_N = torch.where(balanced_N, -inputs.advantages * bound_N, loss_N)
        clipped_N = clipped_N & ~balanced_N
    if clip_dual is not None:
        bad_N = inputs.advantages < 0
        loss_N = torch.where(bad_N, torch.minimum(loss_N, -inputs.advantages * clip_dual), loss_N)
        clipped_N = clipped_N | (bad_N & (ratio_N > clip_dual))
    metrics["clipped"] = clipped_N.to(loss_N.dtype)
    return loss_N, metrics


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, Metrics]:
    """`clipped` by the ratio of the whole row, s = exp(mean of log r) (GSPO, arXiv:2507.18071, eq. 7).

    In its token form (eq. 13 and 14) s_t = sg(s) p_t / sg(p_t): every token has the value s and its own
    gradient, which allows an advantage per token; where all are equal the two forms have one gradient.
    Bounds are the paper's (section 5.1), much tighter than a token's, as s is a mean. It belongs with
    `sequence_mean_token_mean`. Of a trajectory whose context was rewritten each row is a sequence.

    Returns:
        loss [N]; metrics of `_ratio` (per token), and `clipped` (1 on the tokens of a row where the clip
        took the gradient away).
    """
    _, metrics = _ratio(inputs)
    mean_N = over_rows((inputs.logprobs - inputs.old_logprobs).detach(), inputs.rows, "geometric")
    ratio_N = (mean_N + (inputs.logprobs - inputs.logprobs.detach())).exp()
    loss_N, clipped_N = _clip("gspo", ratio_N, inputs.advantages, clip_low, clip_high)
    metrics["clipped"] = clipped_N.to(loss_N.dtype)
    return loss_N, metrics


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 3.0) -> tuple[Tensor, Metrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: no token loses its gradient (CISPO, arXiv:2506.13585, eq. 4).

    Defaults as Tinker's, a weight in [0, 4]; the paper too has no lower bound. TRL's `epsilon_high` is the
    weight itself: 1 + clip_high (ScaleRL, arXiv:2510.13786, takes 5).

    Returns:
        loss [N]; metrics of `_ratio`, and `clipped` (1 where the weight was bounded).
    """
    _check_clip("cispo", clip_low, clip_high)
    ratio_N, metrics = _ratio(inputs)
    weight_N = ratio_N.detach().clamp(1 - clip_low, 1 + clip_high)
    metrics["clipped"] = (weight_N != ratio_N).to(weight_N.dtype)
    return -weight_N * inputs.advantages * inputs.logprobs, metrics


def aipo(inputs: LossInputs, *, delta: float = 8.0, kl_tau: float = 0.0) -> tuple[Tensor, Metrics]:
    """-min(r, delta) A + kl_tau (log r)^2: clipped on one side (AIPO, LlamaRL, arXiv:2505.24034).

    As PRIME-RL has it, so that tokens above delta lose their gradient (the paper keeps it, times delta,
    which is `cispo` with clip_low 1 and clip_high delta - 1); 8 is PRIME-RL's delta. Its later form masks
    instead of clipping: `reject` {"token": [0.125, 8]}, see correction.py; its kl_tau is 1e-3 then.

    Returns:
        loss [N]; metrics of `_ratio`, and `clipped` (1 where r is above delta).
    """
    if not (delta >= 1 and kl_tau >= 0):
        raise ConfigError(
            f"loss aipo: got delta {delta} and kl_tau {kl_tau}, expected delta >= 1 and kl_tau >= 0"
        )
    ratio_N, metrics = _ratio(inputs)
    metrics["clipped"] = (ratio_N > delta).to(ratio_N.dtype)
    loss_N = -ratio_N.clamp(max=delta) * inputs.advantages
    if kl_tau:
        loss_N = loss_N + kl_tau * (inputs.logprobs - inputs.old_logprobs).square()
    return loss_N, metrics


def dro(inputs: LossInputs, *, beta: float = 0.05) -> tuple[Tensor, Metrics]:
    """-(A log p - beta / 2 (log r)^2): off-policy by a quadratic pull to p_old (DRO, arXiv:2405.19107).

    The paper's squared error, divided by beta and without what is constant in p, with the advantage in
    place of reward minus value; beta as in Tinker's example.

    Returns:
        loss [N]; metrics of `_ratio`.
    """
    if beta < 0:
        raise ConfigError(f"loss dro: got beta {beta}, expected at least 0")
    _, metrics = _ratio(inputs)
    pull_N = (inputs.logprobs - inputs.old_logprobs).square()
    return beta / 2 * pull_N - inputs.advantages * inputs.logprobs, metrics


def cross_entropy(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-log p: for tokens to imitate; reads neither advantages nor sampling log-probabilities. No metrics."""
    return -inputs.logprobs, {}


LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "reinforce": reinforce,
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "aipo": aipo,
    "dro": dro,
    "cross_entropy": cross_entropy,
}


def _ratio(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """r = p / p_old [N] with gradient, and metrics `ratio` and r - log r - 1, an estimate of KL(p_old || p).

    The latter is `mismatch_kl` where p_old is the sampler. Where it is not it is `approx_kl`, what updates
    have moved, and `mismatch_kl` is that of p_old / p_sampler.
    """
    log_ratio_N = inputs.logprobs - inputs.old_logprobs
    ratio_N = log_ratio_N.exp()
    metrics = {"ratio": ratio_N.detach()}
    if inputs.sampler_logprobs is None:
        metrics["mismatch_kl"] = _k3(log_ratio_N)
    else:
        metrics["approx_kl"] = _k3(log_ratio_N)
        metrics["mismatch_kl"] = _k3(inputs.old_logprobs - inputs.sampler_logprobs)
    return ratio_N, metrics


def _k3(log_ratio_N: Tensor) -> Tensor:
    return (log_ratio_N.expm1() - log_ratio_N).detach()


def _check_clip(name: str, low: float, high: float) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ConfigError(
            f"loss {name}: got clip_low {low} and clip_high {high}, "
            "expected 0 <= clip_low <= 1 and clip_high >= 0"
        )


def _clip(name: str, ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO, and where it has no gradient, both [N]."""
    _check_clip(name, low, high)
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(1 - low, 1 + high))
    too_good_N = (advantages_N > 0) & (ratio_N > 1 + high)
    too_bad_N = (advantages_N < 0) & (ratio_N < 1 - low)
    return loss_N, too_good_N | too_bad_N


def _corrected(loss_N: Tensor, metrics: Metrics, inputs: LossInputs, terms: Mapping[str, Any]) -> Tensor:
    """The loss times w (`correction`), 0 where rejected (`reject`); adds metrics.

    `masked` is 1 where w is 0. The means of `correction_weight` and `correction_weight_squared` over an
    update give its effective sample size as a share of its tokens: mean(w)^2 / mean(w^2).
    """
    sampler_N, kind, bounds = inputs.sampler_logprobs, terms["correction"], terms["reject"]
    if not (kind or bounds):
        return loss_N
    weights_N = torch.ones_like(loss_N)
    if kind:
        if sampler_N is None:
            raise RecordError(f"correction {kind}: got no sampler_logprobs, expected [N]")
        weights_N = importance_weights(
            inputs.old_logprobs - sampler_N,
            inputs.rows,
            kind,
            level=terms["correction_level"],
            low=terms["correction_low"],
            high=terms["correction_high"],
        )
    if bounds:
        behaviour_N = inputs.old_logprobs if sampler_N is None else sampler_N
        weights_N = torch.where(kept(inputs.logprobs - behaviour_N, inputs.rows, bounds), weights_N, 0.0)
    metrics["masked"] = (weights_N == 0).to(loss_N.dtype)
    if kind:
        metrics |= {"correction_weight": weights_N, "correction_weight_squared": weights_N.square()}
    return weights_N * loss_N


def _by_age(metrics: Metrics, ages_N: Tensor, like_N: Tensor) -> Metrics:
    """`share/age0` ... `share/age3+`: 1 on tokens of that age. `clipped/age0` ...: `clipped` on them, else 0.

    Means of both over all tokens are what is logged (0 for an age that no token has); their quotient is
    the clipped share of the tokens of an age. So also for `masked`.
    """
    found: Metrics = {}
    ages_N = ages_N.long().clamp(0, OLDEST)
    for age in ages_N.unique().tolist():
        at_N = (ages_N == age).to(like_N.dtype)
        name = f"age{age}+" if age == OLDEST else f"age{age}"
        found[f"share/{name}"] = at_N
        found |= {f"{m}/{name}": metrics[m] * at_N for m in ("clipped", "masked") if m in metrics}
    return found


OLDEST = 3  # ages from here on are counted together

_TERMS: Mapping[str, object] = {
    "correction": None,
    "correction_level": "token",
    "correction_low": None,
    "correction_high": None,
    "reject": {},
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
    if loss is cross_entropy and (terms["correction"] or terms["reject"]):
        raise ConfigError(
            f"loss cross_entropy: got correction {terms['correction']!r} and reject {terms['reject']!r}, "
            "expected neither: nobody sampled its tokens"
        )
    if terms["kl_estimator"] not in KL_ESTIMATORS:
        raise ConfigError(
            f"kl_estimator of loss {spec.name}: got {terms['kl_estimator']!r}, "
            f"expected one of {', '.join(KL_ESTIMATORS)}"
        )
    return loss, own, terms

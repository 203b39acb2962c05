"""What an update minimises, per token: the loss a spec names, with what all losses have in common.

    w * loss  +  kl_coef * r * KL to the reference  -  entropy_coef * entropy
    w: correction.py; r = policy / sampler, see kl.py

`LossSpec` is what crosses to a trainer: the name of the loss, and as plain data its settings and `Terms`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import ValidationError

from silva.algorithms.correction import RolloutCorrection, bounded_ratio, importance_weights, kept
from silva.algorithms.kl import KL_ESTIMATORS, k3, weighted
from silva.algorithms.losses import LOSSES, Loss, LossInputs, LossSettings
from silva.config.field_types import describe
from silva.config.sections import NotNegative, Section
from silva.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from torch import Tensor

    from silva.algorithms.losses import Metrics
    from silva.types import LossSpec

    KlEstimator = str
else:
    KlEstimator = Literal[tuple(KL_ESTIMATORS)]

OLDEST = 3  # ages from here on are counted together
S = TypeVar("S", bound=Section)


class Terms(Section):
    """What is added to a loss, or multiplies it."""

    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference in the loss; 0 needs no reference."""
    kl_estimator: KlEstimator = "k3"
    """Per-token estimator: k1 (high variance), k2 (biased), k3 (low variance)."""
    kl_bias_correction: bool = True
    """Weight it by the probability ratio, for the gradient of its mean; without it k1 regularises nothing."""
    entropy_coef: NotNegative = 0.0
    """Weight of the bonus for the entropy of the token distribution, in nats."""
    rollout_correction: RolloutCorrection | None = None
    """Correct for a sampler whose probabilities are not the trainer's; costs a forward pass."""


def compute(spec: LossSpec, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The loss that `spec` names, times w, plus `kl_coef` * KL to the reference - `entropy_coef` * entropy.

    Args:
        spec: a name in `LOSSES`, with the keys of its settings and of `Terms`; what is left out has its
            default.
        inputs: N tokens.

    Returns:
        loss [N] with gradient, and metrics [N] each, detached: those of the loss, of `_ratio` unless the loss
        imitates, `kl` if the reference is known, `entropy` if entropies are, those of `_of_weights` and of
        `_by_age`.

    Raises:
        ConfigError: unknown loss or parameter, or a value out of range.
        RecordError: a term has a coefficient but its inputs are missing.
    """
    loss, settings, terms = parse(spec)
    metrics: Metrics = {} if loss.imitates else _ratio(inputs)
    weights_N = _weights(inputs, terms.rollout_correction)
    known = inputs if weights_N is None else _without(inputs, weights_N == 0)
    loss_N, own = loss.function(**_arguments(spec.name, loss, settings, known))
    metrics |= own
    if weights_N is not None:
        loss_N = (weights_N * loss_N).masked_fill(weights_N == 0, 0.0)
        metrics |= _of_weights(weights_N, terms.rollout_correction)

    if inputs.reference_logprobs is not None:
        kl_N = KL_ESTIMATORS[terms.kl_estimator](inputs.logprobs, inputs.reference_logprobs)
        metrics["kl"] = kl_N.detach()
        if terms.kl_coef:  # not 0 * kl_N: an infinite KL that is only watched must not turn the loss into NaN
            if terms.kl_bias_correction and not loss.imitates:  # else it may be unknown who sampled
                kl_N = weighted(
                    terms.kl_estimator, inputs.logprobs, inputs.reference_logprobs, known.behaviour_logprobs
                )
            loss_N = loss_N + terms.kl_coef * kl_N
    elif terms.kl_coef:
        raise RecordError(
            f"loss {spec.name} with kl_coef {terms.kl_coef}: got no reference_logprobs, expected [N]"
        )

    if inputs.entropies is not None:
        metrics["entropy"] = inputs.entropies.detach()
        if terms.entropy_coef:
            loss_N = loss_N - terms.entropy_coef * inputs.entropies
    elif terms.entropy_coef:
        raise RecordError(
            f"loss {spec.name} with entropy_coef {terms.entropy_coef}: got no entropies, expected [N]"
        )
    if inputs.ages is not None:
        metrics |= _by_age(metrics, inputs.ages, inputs.logprobs)
    return loss_N, metrics


def parse(spec: LossSpec) -> tuple[Loss, LossSettings, Terms]:
    """The loss that a spec names, with its settings and terms, checked.

    Raises:
        ConfigError: unknown loss or parameter, or a value out of range.
    """
    if spec.name not in LOSSES:
        raise ConfigError(f"unknown loss: got {spec.name!r}, expected one of {', '.join(LOSSES)}")
    loss, shared = LOSSES[spec.name], Terms.model_fields
    own = [name for name in loss.settings.model_fields if name != "type"]
    if unknown := [name for name in spec.params if name not in own and name not in shared]:
        raise ConfigError(
            f"unknown parameter of loss {spec.name}: got {', '.join(map(repr, unknown))}, "
            f"expected some of {', '.join([*own, *shared])}"
        )
    settings = _checked(loss.settings, spec, own)
    terms = _checked(Terms, spec, shared)
    if loss.imitates and terms.rollout_correction is not None:
        raise ConfigError(
            f"loss {spec.name}: got a rollout_correction, expected none: nobody sampled its tokens"
        )
    return loss, settings, terms


def _checked(section: type[S], spec: LossSpec, names: Any) -> S:
    given = {name: value for name, value in spec.params.items() if name in names}
    try:
        # JSON, as it crosses to a trainer: strict, yet lists do for tuples.
        return section.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problems = [_problem(section, item) for item in error.errors(include_url=False)]
        raise ConfigError(f"loss {spec.name}: {'; '.join(problems)}") from error


def _problem(section: type[Section], item: Mapping[str, Any]) -> str:
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    name = str(item["loc"][0])
    expected = describe(section.model_fields[name])
    return f"{name}: got {item['input']!r}, expected {expected or item['msg']}"


def _arguments(name: str, loss: Loss, settings: LossSettings, inputs: LossInputs) -> dict[str, Any]:
    found = {each: settings if each == "settings" else getattr(inputs, each) for each in loss.takes}
    if missing := sorted(each for each in loss.required if found[each] is None):
        raise RecordError(f"loss {name}: got no {', '.join(missing)}, expected [N]")
    return found


def _ratio(inputs: LossInputs) -> Metrics:
    """`ratio` r = p / p_old, and r - log r - 1, an estimate of KL(p_old || p).

    The latter is `mismatch_kl` if p_old is the sampler. If it is not it is `approx_kl`, what updates
    have moved, and `mismatch_kl` is that of p_old / p_sampler.
    """
    new_N, old_N = inputs.logprobs.detach(), inputs.old_logprobs
    metrics = {"ratio": bounded_ratio(new_N - old_N)}
    if inputs.sampler_logprobs is None:
        return metrics | {"mismatch_kl": k3(old_N, new_N)}
    return metrics | {"approx_kl": k3(old_N, new_N), "mismatch_kl": k3(inputs.sampler_logprobs, old_N)}


def _weights(inputs: LossInputs, settings: RolloutCorrection | None) -> Tensor | None:
    """[N] by which the loss is multiplied: w, or 1; 0 where rejected or not sampled. None: by nothing."""
    if settings is None or not (settings.weight or settings.reject):
        return None
    sampler_N, weights_N = inputs.sampler_logprobs, inputs.logprobs.new_ones(inputs.logprobs.shape)
    if settings.weight:
        if sampler_N is None:
            raise RecordError(f"rollout_correction {settings.weight}: got no sampler_logprobs, expected [N]")
        unknown_N = sampler_N.isnan()  # tokens that nobody sampled, which have no ratio
        log_ratios_N = (inputs.old_logprobs - sampler_N).masked_fill(unknown_N, 0.0)
        weights_N = importance_weights(log_ratios_N, inputs.rows, settings).masked_fill(unknown_N, 0.0)
    if settings.reject:
        log_ratios_N = inputs.logprobs - inputs.behaviour_logprobs
        weights_N = weights_N.where(kept(log_ratios_N, inputs.rows, settings), 0.0)
    return weights_N


def _without(inputs: LossInputs, dropped_N: Tensor) -> LossInputs:
    """The inputs, with the policy's own in place of every NaN among the log-probs of dropped tokens.

    The gradient of what is multiplied by 0 is 0 only where it is finite.
    """
    own_N = inputs.logprobs.detach()

    def filled(logprobs_N: Tensor) -> Tensor:
        return own_N.where(dropped_N & logprobs_N.isnan(), logprobs_N)

    sampler_N = inputs.sampler_logprobs
    return replace(
        inputs,
        old_logprobs=filled(inputs.old_logprobs),
        sampler_logprobs=None if sampler_N is None else filled(sampler_N),
    )


def _of_weights(weights_N: Tensor, settings: RolloutCorrection | None) -> Metrics:
    """`masked` is 1 where the weight is 0.

    The means of `correction_weight` and `correction_weight_squared` over an update give its effective sample
    size as a share of its tokens: mean(w)^2 / mean(w^2).
    """
    metrics = {"masked": (weights_N == 0).to(weights_N.dtype)}
    if settings is not None and settings.weight:
        metrics |= {"correction_weight": weights_N, "correction_weight_squared": weights_N.square()}
    return metrics


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

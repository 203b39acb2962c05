"""Controllers: settings of the next step from what the last one measured.

Each is a function of its settings and of floats. Its state is what the caller passes in again, so it is saved
with the state of a run like any other number; before the first measurement nothing is called.
"""

from __future__ import annotations

import math

from pydantic import model_validator

from silva.config.sections import Above0, Section
from silva.errors import ConfigError, RecordError


class AdaptiveTemperature(Section):
    """Sample hotter while rewards are alike: T * reference_std / std of the last batch (MinRL)."""

    reference_std: Above0 = 1.0
    """The standard deviation of rewards at which the temperature is the configured one."""
    low: Above0 = 0.6
    """Lowest temperature."""
    high: Above0 = 2.0
    """Also taken if all rewards are equal."""

    @model_validator(mode="after")
    def _ordered(self) -> AdaptiveTemperature:
        if self.low > self.high:
            raise ValueError(f"low: got {self.low} with high = {self.high}, expected at most that")
        return self


class AdaptiveEntropy(Section):
    """Move entropy_coef, from 0, so that the entropy stays above a target (Skywork-OR1)."""

    target: Above0 = 0.2
    """In nats a token."""
    step: Above0 = 1e-4
    """By how much the coefficient changes."""
    max_coef: Above0 = 5e-3
    """The largest coefficient, in units of loss for each nat."""


class AdaptiveKl(Section):
    """Move kl_coef towards a KL per token (arXiv:1909.08593)."""

    target: Above0 = 0.01
    """In nats."""
    horizon: Above0 = 10.0
    """In updates: larger is slower."""


def adaptive_temperature(settings: AdaptiveTemperature, base: float, reward_std: float) -> float:
    """Sampling temperature T' = clamp(T reference_std / std, low, high): equal rewards ask for more variety
    (MinRL's temperature scaling).

    T is the configured temperature and not the one of the last step, so nothing builds up. If rewards
    can never spread as far as `reference_std` the result stays at `high`: with rewards of 0 and 1 the std is
    at most 0.5.

    Args:
        base: T, above 0.
        reward_std: standard deviation of all raw rewards of the last batch (MinRL: divided by n).

    Raises:
        ConfigError: T is not above 0.
    """
    if not base > 0:
        raise ConfigError(f"adaptive temperature: got a configured temperature of {base}, expected base > 0")
    if reward_std <= 0:
        return settings.high
    return min(max(base * settings.reference_std / reward_std, settings.low), settings.high)


def adaptive_entropy_coef(settings: AdaptiveEntropy, coef: float, entropy: float) -> float:
    """c' = clamp(c + step, 0, max_coef) if the entropy is below target, c - step if it is above
    (Skywork-OR1, arXiv:2505.22312, section 3.2.5; the defaults are those of its released recipes).

    c is the state, from 0 on; what the loss gets is `gated_entropy_coef` of it.

    Args:
        coef: c of the last step.
        entropy: mean over the trained tokens of the last step, in nats.
    """
    direction = (entropy < settings.target) - (entropy > settings.target)
    return min(max(coef + direction * settings.step, 0.0), settings.max_coef)


def gated_entropy_coef(settings: AdaptiveEntropy, coef: float, entropy: float) -> float:
    """c if the entropy is at or below target, else 0: the bonus only ever pushes towards the target.

    The other half of Skywork-OR1's rule. Arguments as `adaptive_entropy_coef`.
    """
    return coef if entropy <= settings.target else 0.0


def adaptive_kl_coef(settings: AdaptiveKl, coef: float, kl: float) -> float:
    """The KL coefficient of the next update: proportional control (arXiv:1909.08593, section 2.2).

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) / horizon); the paper's K_beta = 0.1 is a horizon of 10.

    Args:
        coef: of this update, at least 0; a coefficient of 0 stays 0.
        kl: mean over the tokens of this update, in nats.

    Raises:
        RecordError: a KL that is NaN, which would move the coefficient for no reason.
    """
    if math.isnan(kl):
        raise RecordError("adaptive KL: got a KL of nan, expected a number")
    return coef * (1 + min(max(kl / settings.target - 1, -0.2), 0.2) / settings.horizon)

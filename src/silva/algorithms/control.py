"""Controllers: settings of the next step from what the last one measured.

Each is a function of floats. What it remembers is what the caller hands in again, so it is saved with the
state of a run like any other number; before the first measurement nothing is called.
"""

from __future__ import annotations

import math

from silva.errors import ConfigError, RecordError


def adaptive_temperature(
    base: float, reward_std: float, *, reference: float = 1.0, low: float = 0.6, high: float = 2.0
) -> float:
    """Sampling temperature T' = clamp(T reference / std, low, high): equal rewards ask for more variety
    (MinRL's temperature scaling).

    T is the configured temperature and not the one of the last step, so nothing builds up. Where rewards
    can never spread as far as `reference` the result stays at `high`: with rewards of 0 and 1 the std is
    at most 0.5.

    Args:
        base: T, above 0.
        reward_std: standard deviation of all raw rewards of the last batch (MinRL: divided by n).
        reference: the std at which T' = T.
        low: smallest T', above 0.
        high: largest T', also taken where the std is 0 or less.

    Raises:
        ConfigError: a setting is out of range.
        RecordError: the std is not finite.
    """
    if not (base > 0 and reference > 0 and 0 < low <= high):
        raise ConfigError(
            f"adaptive temperature: got base {base}, reference {reference}, low {low} and high {high}, "
            "expected base > 0, reference > 0 and 0 < low <= high"
        )
    _check_finite("adaptive temperature", "reward_std", reward_std)
    return min(max(base * reference / reward_std, low), high) if reward_std > 0 else high


def adaptive_entropy_coef(
    coef: float, entropy: float, *, target: float = 0.2, step: float = 1e-4, low: float = 0.0,
    high: float = 5e-3,
) -> float:  # fmt: skip
    """c' = clamp(c + step, low, high) where the entropy is below target, c - step where it is above
    (Skywork-OR1, arXiv:2505.22312, section 3.2.5; the defaults are those of its released recipes).

    c is what to remember, from 0 on; what the loss gets is `gated_entropy_coef` of it.

    Args:
        coef: c of the last step.
        entropy: mean over the trained tokens of the last step, in nats.
        target: in nats.
        step: by how much c changes, above 0.
        low: smallest c.
        high: largest c.

    Raises:
        ConfigError: a setting is out of range.
        RecordError: coefficient or entropy is not finite.
    """
    if not (step > 0 and low <= high):
        raise ConfigError(
            f"adaptive entropy: got step {step}, low {low} and high {high}, expected step > 0 and low <= high"
        )
    _check_finite("adaptive entropy", "coef", coef)
    _check_finite("adaptive entropy", "entropy", entropy)
    direction = (entropy < target) - (entropy > target)
    return min(max(coef + direction * step, low), high)


def gated_entropy_coef(coef: float, entropy: float, *, target: float = 0.2) -> float:
    """c where the entropy is at or below target, else 0: the bonus only ever pushes towards the target.

    The other half of Skywork-OR1's rule. Arguments and errors as `adaptive_entropy_coef`.
    """
    _check_finite("adaptive entropy", "entropy", entropy)
    return coef if entropy <= target else 0.0


def _check_finite(controller: str, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise RecordError(f"{controller}: got {name} {value}, expected a finite number")

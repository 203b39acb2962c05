from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from silva.algorithms.control import (
    AdaptiveEntropy,
    AdaptiveKl,
    AdaptiveTemperature,
    adaptive_entropy_coef,
    adaptive_kl_coef,
    adaptive_temperature,
    gated_entropy_coef,
)
from silva.errors import ConfigError, RecordError


@pytest.mark.parametrize(
    ("base", "std", "expected"),
    [
        (1.2, 1.0, 1.2),  # at the reference: as configured
        (1.2, 1.5, 0.8),  # 1.2 / 1.5
        (1.2, 0.75, 1.6),  # 1.2 / 0.75
        (1.2, 0.6, 2.0),  # 1.2 / 0.6, just the limit
        (1.2, 0.5, 2.0),  # 2.4, too high
        (1.2, 2.5, 0.6),  # 0.48, too low
        (1.2, 0.0, 2.0),
        (1.2, -1.0, 2.0),
        (0.9, 1e-320, 2.0),  # the quotient overflows to infinity
    ],
)
def test_adaptive_temperature_by_hand(base: float, std: float, expected: float) -> None:
    assert adaptive_temperature(AdaptiveTemperature(), base, std) == pytest.approx(expected, rel=1e-15)


def test_adaptive_temperature_with_other_settings() -> None:
    """0.8 * 0.25 / 0.4 = 0.5."""
    settings = AdaptiveTemperature(reference_std=0.25, low=0.1, high=3.0)
    assert adaptive_temperature(settings, 0.8, 0.4) == pytest.approx(0.5)


def test_adaptive_temperature_refuses() -> None:
    for wrong in ({"reference_std": 0.0}, {"low": 0.0}, {"high": float("nan")}):
        with pytest.raises(ValidationError, match=r"greater than 0|finite number"):
            AdaptiveTemperature(**wrong)
    with pytest.raises(ValidationError, match=r"low: got 2\.5 with high = 2\.0, expected at most that"):
        AdaptiveTemperature(low=2.5)
    with pytest.raises(ConfigError, match="got a configured temperature of 0"):
        adaptive_temperature(AdaptiveTemperature(), 0.0, 0.5)
    with pytest.raises(RecordError, match="got reward_std nan, expected a finite number"):
        adaptive_temperature(AdaptiveTemperature(), 1.0, float("nan"))


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.0, 0.1, 0.0001),  # below the target of 0.2: up
        (0.0010, 0.3, 0.0009),  # above: down
        (0.0010, 0.2, 0.0010),  # there
        (0.0, 0.3, 0.0),  # never below 0
        (0.00495, 0.1, 0.005),  # never above the limit
    ],
)
def test_adaptive_entropy_coef_by_hand(coef: float, entropy: float, expected: float) -> None:
    assert adaptive_entropy_coef(AdaptiveEntropy(), coef, entropy) == pytest.approx(
        expected, rel=1e-12, abs=1e-18
    )


def test_a_run_of_the_entropy_controller() -> None:
    """Target 1, step 0.5: c = 0.5, 1.0, 1.0 (limit), 0.5, 0.5 (there); the loss gets it up to 1 only."""
    settings = AdaptiveEntropy(target=1.0, step=0.5, max_coef=1.0)
    coef, states, applied = 0.0, [], []
    for entropy in (0.9, 0.5, 0.2, 1.4, 1.0):
        coef = adaptive_entropy_coef(settings, coef, entropy)
        states.append(coef)
        applied.append(gated_entropy_coef(settings, coef, entropy))
    assert states == [0.5, 1.0, 1.0, 0.5, 0.5]
    assert applied == [0.5, 1.0, 1.0, 0.0, 0.5]


def test_the_controller_holds_a_process_at_its_target() -> None:
    """A policy whose entropy falls by 0.02 a step and gains 20 c: in the end it stays that near to 0.2."""
    settings = AdaptiveEntropy()
    entropy, coef, seen = 0.3, 0.0, []
    for _ in range(400):
        coef = adaptive_entropy_coef(settings, coef, entropy)
        entropy += 20 * gated_entropy_coef(settings, coef, entropy) - 0.02
        seen.append(entropy)
    assert max(abs(entropy - 0.2) for entropy in seen[200:]) < 0.02


def test_adaptive_entropy_coef_refuses() -> None:
    for wrong in ({"step": 0.0}, {"max_coef": -1.0}):
        with pytest.raises(ValidationError, match="greater than 0"):
            AdaptiveEntropy(**wrong)
    with pytest.raises(RecordError, match="got entropy nan, expected a finite number"):
        adaptive_entropy_coef(AdaptiveEntropy(), 0.0, float("nan"))
    with pytest.raises(RecordError, match="got coef inf"):
        adaptive_entropy_coef(AdaptiveEntropy(), float("inf"), 0.1)
    with pytest.raises(RecordError, match="got entropy nan"):
        gated_entropy_coef(AdaptiveEntropy(), 0.0, float("nan"))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.5),  # on target
        (6.6, 0.505),  # error 0.1: 0.5 * (1 + 0.1 / 10)
        (60.0, 0.51),  # error 9, clipped to 0.2
        (math.inf, 0.51),
        (5.4, 0.495),
        (0.0, 0.49),  # error -1, clipped to -0.2
        (-1.0, 0.49),  # k1 may be negative
    ],
)
def test_adaptive_kl_coef_by_hand(kl: float, expected: float) -> None:
    assert adaptive_kl_coef(AdaptiveKl(target=6.0), 0.5, kl) == pytest.approx(expected, rel=1e-12)
    assert adaptive_kl_coef(AdaptiveKl(target=6.0, horizon=100.0), 0.5, kl) == pytest.approx(
        0.5 + (expected - 0.5) / 10, rel=1e-12
    )


def test_adaptive_kl_coef_refuses() -> None:
    for wrong in ({"target": 0.0}, {"horizon": -1.0}):
        with pytest.raises(ValidationError, match="greater than 0"):
            AdaptiveKl(**wrong)
    with pytest.raises(RecordError, match="got a KL of nan"):
        adaptive_kl_coef(AdaptiveKl(), 0.5, math.nan)

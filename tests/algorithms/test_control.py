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
    quarter = AdaptiveTemperature(reference_std=0.25)
    assert adaptive_temperature(quarter, base, std / 4) == pytest.approx(expected, rel=1e-15)


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
    assert gated_entropy_coef(AdaptiveEntropy(), coef, entropy) == (coef if entropy <= 0.2 else 0.0)


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


def test_what_is_no_number_and_settings_out_of_range_are_refused() -> None:
    with pytest.raises(RecordError, match="got a KL of nan"):
        adaptive_kl_coef(AdaptiveKl(), 0.5, math.nan)
    with pytest.raises(ConfigError, match="got a configured temperature of 0"):
        adaptive_temperature(AdaptiveTemperature(), 0.0, 0.5)
    with pytest.raises(ValidationError, match=r"low: got 2\.5 with high = 2\.0, expected at most that"):
        AdaptiveTemperature(low=2.5)
    assert AdaptiveTemperature(low=2.0).low == 2.0
    for settings, key in (
        (AdaptiveTemperature, "reference_std"), (AdaptiveEntropy, "target"), (AdaptiveEntropy, "step"),
        (AdaptiveEntropy, "max_coef"), (AdaptiveKl, "target"), (AdaptiveKl, "horizon"),
    ):  # fmt: skip
        with pytest.raises(ValidationError, match="greater than 0"):
            settings(**{key: 0.0})

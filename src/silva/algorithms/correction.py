"""Weights and masks for tokens that another policy sampled than the one being trained.

    mu       the sampler: log-probabilities as recorded while sampling
    pi_old   the trainer's own before the update: other kernels than mu's, or newer weights
    pi       being trained; pi_old until the first step

What a loss makes of pi / pi_old (its clip) is its own business. Here are the weight w = pi_old / mu and
masks by pi / mu, both detached, to multiply any loss with. A row is a sample, never cut over micro-batches.
Masked tokens still count in the normaliser, which is fixed before the first micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from silva.config.sections import Above0, NotNegative, Section

if TYPE_CHECKING:
    from torch import Tensor

# Of a ratio: each token's, or the geometric mean or the product over its row.
Level = Literal["token", "geometric", "sequence"]
RejectLevel = Literal["token", "geometric", "sequence", "any"]
BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}  # as published, for ratios of tokens
LARGEST = 20.0  # log-ratio: e^20 is 5e8. Float32 overflows from e^88 on, and inf * 0 is NaN


class RolloutCorrection(Section):
    """For a sampler whose probabilities differ from the trainer's: w = p_trainer / p_sampler at the start."""

    weight: Literal["truncate", "mask"] | None = "truncate"
    """`truncate` bounds w (TIS); `mask` drops tokens outside the bounds (IcePop); null only rejects."""
    level: Level = "token"
    """Of a token, or the geometric mean or the product (`sequence`) over its row."""
    low: NotNegative | None = None
    """null: 0 to truncate, 0.5 to mask."""
    high: Above0 | None = None
    """null: 2 to truncate, 5 to mask."""
    reject: dict[RejectLevel, tuple[float | None, float | None]] = {}  # noqa: RUF012 - pydantic copies it
    """Bounds of p_now / p_sampler outside which a token, or its whole row, is dropped."""

    @model_validator(mode="after")
    def _bounds_hold_something(self) -> RolloutCorrection:
        if self.weight is not None:
            _check(self.weight, *self.bounds)
        elif given := [name for name in ("low", "high") if getattr(self, name) is not None]:
            raise ValueError(f"{given[0]}: got {getattr(self, given[0])} with weight = null, expected null")
        elif self.level != "token":
            raise ValueError(f'level: got "{self.level}" with weight = null, expected "token"; see `reject`')
        for level, pair in self.reject.items():
            _check(f"reject {level}", *_open(pair))
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Of w."""
        low, high = BOUNDS[self.weight or "truncate"]
        return low if self.low is None else self.low, high if self.high is None else self.high


def bounded_ratio(log_ratios: Tensor) -> Tensor:
    """exp of log-ratios, at most e^20 as in verl; above it a constant, which has no gradient."""
    return log_ratios.clamp(max=LARGEST).exp()


def importance_weights(log_ratios: Tensor, rows: Tensor, settings: RolloutCorrection) -> Tensor:
    """w = pi_old / mu, kept from dominating.

    - `truncate`: clip(w, low, high), by default [0, 2] (truncated importance sampling, TIS; Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; cap as in verl).
    - `mask`: w inside [low, high] and 0 outside, by default [0.5, 5] (IcePop, arXiv:2510.18855).

    Over a row, `sequence` is the unbiased weight of the whole sequence, of variance exponential in its
    length; `geometric` is that to the power 1 / length: biased, but comparable between lengths.

    Args:
        log_ratios: [N] of log pi_old - log mu.
        rows: [N] int64, which sample a token belongs to.
        settings: with a `weight`.

    Returns:
        [N], detached; the same on all tokens of a row if the level is not "token".
    """
    low, high = settings.bounds
    ratio_N = over_rows(log_ratios.detach(), rows, settings.level).exp()
    if settings.weight == "truncate":
        return ratio_N.clamp(low, high)
    return ratio_N.masked_fill((ratio_N < low) | (ratio_N > high), 0.0)


def kept(log_ratios: Tensor, rows: Tensor, settings: RolloutCorrection) -> Tensor:
    """Which tokens have a ratio pi / mu inside all bounds of `reject`; one that is NaN is not.

    `any` drops all tokens of a row with one token outside. PRIME-RL's masks of December 2025
    are {"token": [0.125, 8], "geometric": [0.1, 10], "any": [0, 100]}; its mask by a row's least ratio is
    {"any": [low, None]}.

    Args:
        log_ratios: [N] of log pi - log mu.
        rows: [N] int64, which sample a token belongs to.

    Returns:
        [N] bool.
    """
    log_ratios = log_ratios.detach()
    kept_N = rows == rows
    for level, pair in settings.reject.items():
        low, high = _open(pair)
        ratio_N = over_rows(log_ratios, rows, "token" if level == "any" else level).exp()
        inside_N = (ratio_N >= low) & (ratio_N <= high)
        if level == "any":
            inside_N = over_rows((~inside_N).to(ratio_N.dtype), rows, "sequence") == 0
        kept_N &= inside_N
    return kept_N


def over_rows(log_ratios: Tensor, rows: Tensor, level: Level) -> Tensor:
    """Log-ratios at a level: [N] themselves, or their mean (geometric) or sum (sequence) over a row."""
    if level == "token":
        return log_ratios
    _, row_N, count_R = rows.unique(return_inverse=True, return_counts=True)
    total_R = log_ratios.new_zeros(len(count_R)).index_add(0, row_N, log_ratios)
    return (total_R / count_R if level == "geometric" else total_R)[row_N]


def _open(pair: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = pair
    return 0.0 if low is None else low, math.inf if high is None else high


def _check(what: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"{what}: got bounds {low} and {high}, expected 0 <= low < high")

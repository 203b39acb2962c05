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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from silva.errors import ConfigError

LEVELS = ("token", "geometric", "product")  # of a ratio: each token's, or the mean or product over its row
BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}  # as published, for ratios per token


def importance_weights(
    log_ratios: Tensor,
    rows: Tensor,
    kind: str,
    *,
    level: str = "token",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """w = pi_old / mu, kept from dominating.

    - `truncate`: clip(w, low, high), by default [0, 2] (truncated importance sampling, TIS; Yao et al. 2025,
      "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; cap as in verl).
    - `mask`: w inside [low, high] and 0 outside, by default [0.5, 5] (IcePop, arXiv:2510.18855).

    Over a row, `product` is the unbiased weight of the whole sequence, of variance exponential in its
    length; `geometric` is that to the power 1 / length: biased, but comparable between lengths.

    Args:
        log_ratios: [N] of log pi_old - log mu.
        rows: [N] int64, which sample a token belongs to.
        kind: a name in `BOUNDS`.
        level: one of `LEVELS`.
        low: None for the default of `kind`.
        high: None for the default of `kind`.

    Returns:
        [N], detached; the same on all tokens of a row where `level` is not "token".

    Raises:
        ConfigError: unknown kind or level, or bounds that hold nothing.
    """
    if kind not in BOUNDS:
        raise ConfigError(f"correction: got {kind!r}, expected one of {', '.join(BOUNDS)}")
    low = BOUNDS[kind][0] if low is None else low
    high = BOUNDS[kind][1] if high is None else high
    _check(f"correction {kind}", low, high)
    ratio_N = over_rows(log_ratios.detach(), rows, level).exp()
    if kind == "truncate":
        return ratio_N.clamp(low, high)
    return torch.where((ratio_N < low) | (ratio_N > high), 0.0, ratio_N)


def kept(log_ratios: Tensor, rows: Tensor, bounds: Mapping[str, Sequence[float | None]]) -> Tensor:
    """Which tokens have a ratio pi / mu inside all bounds; one that is NaN is not.

    Levels are `LEVELS` and `any`: all tokens of a row with one token outside. PRIME-RL's masks are
    {"token": [0.125, 8], "geometric": [0.1, 10], "any": [0, 100]}; its mask by a row's least ratio is
    {"any": [low, None]}.

    Args:
        log_ratios: [N] of log pi - log mu.
        rows: [N] int64, which sample a token belongs to.
        bounds: level -> [low, high], None for no bound.

    Returns:
        [N] bool.

    Raises:
        ConfigError: unknown level, or bounds that hold nothing.
    """
    log_ratios = log_ratios.detach()
    kept_N = torch.ones_like(log_ratios, dtype=torch.bool)
    for level, pair in bounds.items():
        if len(pair) != 2:
            raise ConfigError(f"reject {level}: got {list(pair)}, expected [low, high]")
        low = 0.0 if pair[0] is None else pair[0]
        high = math.inf if pair[1] is None else pair[1]
        _check(f"reject {level}", low, high)
        ratio_N = over_rows(log_ratios, rows, "token" if level == "any" else level).exp()
        inside_N = (ratio_N >= low) & (ratio_N <= high)
        if level == "any":
            inside_N = over_rows((~inside_N).to(ratio_N.dtype), rows, "product") == 0
        kept_N &= inside_N
    return kept_N


def over_rows(log_ratios: Tensor, rows: Tensor, level: str) -> Tensor:
    """Log-ratios at a level: [N] themselves, or the mean (geometric) or sum (product) of each token's row.

    Raises:
        ConfigError: unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"level of a probability ratio: got {level!r}, expected one of {', '.join(LEVELS)}")
    if level == "token":
        return log_ratios
    _, row_N, count_R = torch.unique(rows, return_inverse=True, return_counts=True)
    total_R = log_ratios.new_zeros(len(count_R)).index_add(0, row_N, log_ratios)
    return (total_R / count_R if level == "geometric" else total_R)[row_N]


def _check(what: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"{what}: got bounds {low} and {high}, expected 0 <= low < high")

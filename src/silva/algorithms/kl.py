"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, with
r = reference / policy, so log r = reference_logprobs - logprobs. As *values* k1 and k3 are unbiased
and k2 is biased but of low variance. As *loss terms* (what happens when they are differentiated through
`logprobs`, on-policy; Tang & Munos 2025, arXiv:2506.09477) they differ in another way:

| estimator | value | gradient = factor * grad log p | expected gradient |
|---|---|---|---|
| k1 | -log r | 1 | 0: regularises nothing, adds noise; good for measuring |
| k2 | (log r)^2 / 2 | -log r | of KL(policy || reference) |
| k3 | r - log r - 1 | 1 - r | of KL(reference || policy) |

Multiplied by the probability ratio policy / sampling policy (`kl_correction`, losses.py) an estimator's
expected gradient becomes that of its expected value, also off-policy: of KL(policy || reference) for k1
and k3 (DeepSeek-V3.2, arXiv:2512.02556), of a second-order approximation of it for k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from silva.errors import ConfigError, RecordError


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-log r: unbiased, high variance, negative for about half of the tokens. Zero expected gradient.

    Args:
        logprobs: [N] of the policy, with gradient.
        reference_logprobs: [N] of the reference on the same tokens, same temperature.

    Returns:
        [N], in nats.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2: biased as a value, but its gradient is unbiased for that of KL(policy || reference).

    Shapes as `k1`.
    """
    return 0.5 * (reference_logprobs - logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r - log r - 1 >= 0: unbiased, low variance (GRPO, arXiv:2402.03300, eq. 4).

    The factor 1 - r of its gradient is below 1 where the policy is above the reference, and grows with r
    where it is under it. Shapes as `k1`.
    """
    log_ratio_N = reference_logprobs - logprobs
    # expm1, not exp - 1: near the reference the terms cancel to second order
    return log_ratio_N.expm1() - log_ratio_N


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_rewards(logprobs: Tensor, reference_logprobs: Tensor, coef: float = 1.0) -> Tensor:
    """-coef * k1 per token, to be added to token rewards: KL in the reward (arXiv:1909.08593, eq. 2).

    As a reward k1 does regularise, unlike as a loss. With coef 1, the teacher as reference and no other
    reward, these are the advantages of on-policy distillation (Lu et al. 2025, Thinking Machines).

    Args:
        logprobs: [N] of the policy that sampled the tokens.
        reference_logprobs: [N] of the reference or teacher on the same tokens, same temperature.
        coef: at least 0.

    Returns:
        [N], in nats, detached.
    """
    return -coef * k1(logprobs, reference_logprobs).detach()


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float = 10.0) -> float:
    """The KL coefficient of the next update: proportional control (arXiv:1909.08593, section 2.2).

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) / horizon); the paper's K_beta = 0.1 is a horizon of 10.

    Args:
        coef: of this update, at least 0; a coefficient of 0 stays 0.
        kl: mean over the tokens of this update, in nats.
        target: the KL to hold, in nats, above 0.
        horizon: in updates: larger is slower.

    Raises:
        ConfigError: a target or horizon that is not above 0.
        RecordError: a KL that is NaN, which would move the coefficient for no reason.
    """
    if not (target > 0 and horizon > 0):
        raise ConfigError(
            f"adaptive KL: got target {target} and horizon {horizon}, expected both to be above 0"
        )
    if math.isnan(kl):
        raise RecordError("adaptive KL: got a KL of nan, expected a number")
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) / horizon)

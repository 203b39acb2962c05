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

Multiplied by the probability ratio policy / sampling policy (`weighted`), the expected gradient of an
estimator becomes that of its expected value, also off-policy: of KL(policy || reference) for k1 and k3
(DeepSeek-V3.2, arXiv:2512.02556), of a second-order approximation of it for k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from silva.algorithms.correction import LARGEST, bounded_ratio

if TYPE_CHECKING:
    from torch import Tensor


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
    where it is under it. Above e^20 r goes on as its tangent, which stays finite. Shapes as `k1`.
    """
    log_ratio_N = reference_logprobs - logprobs
    above_N = math.exp(LARGEST) * (log_ratio_N - LARGEST).clamp(min=0)
    # expm1, not exp - 1: near the reference the terms cancel to second order
    return log_ratio_N.clamp(max=LARGEST).expm1() + above_N - log_ratio_N


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def weighted(name: str, logprobs: Tensor, reference_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """An estimator times policy / behaviour, which is at most e^20; a token above has no gradient.

    Args:
        name: in `KL_ESTIMATORS`.
        behaviour_logprobs: [N] of the policy that sampled the tokens. Other shapes as `k1`.
    """
    log_weight_N = (logprobs - behaviour_logprobs).clamp(max=LARGEST)
    weight_N, logprobs = log_weight_N.exp(), behaviour_logprobs + log_weight_N
    if name == "k3":
        # weight * r is the constant reference / behaviour. In the product its gradient has to cancel, which
        # leaves nothing of the other terms in float32 once r is above e^17.
        constant_N = bounded_ratio(reference_logprobs - behaviour_logprobs)
        return constant_N - weight_N * (1 + reference_logprobs - logprobs)
    return weight_N * KL_ESTIMATORS[name](logprobs, reference_logprobs)


def kl_rewards(logprobs: Tensor, reference_logprobs: Tensor, coef: float) -> Tensor:
    """-coef * k1 per token, to be added to token rewards: KL in the reward (arXiv:1909.08593, eq. 2).

    As a reward k1 does regularise, unlike as a loss. With coef 1 and no other reward, these are the
    advantages of on-policy distillation (Lu et al. 2025, Thinking Machines).

    Args:
        logprobs: [N] of the policy that sampled the tokens.
        reference_logprobs: [N] of the reference on the same tokens, same temperature.
        coef: at least 0.

    Returns:
        [N], in nats, detached.
    """
    return -coef * k1(logprobs, reference_logprobs).detach()

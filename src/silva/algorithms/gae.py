"""Returns and advantages of the tokens of one trajectory: pure functions of tensors.

credit.py joins them to samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from silva.errors import RecordError


def discounted_returns(rewards: Tensor, gamma: float | Tensor) -> Tensor:
    """G_k = r_k + gamma_k G_{k+1}: with one gamma the sum over j >= k of gamma^(j - k) r_j.

    Args:
        rewards: [K].
        gamma: one, or [K].

    Returns:
        [K], in the dtype of the rewards.
    """
    gammas = torch.as_tensor(gamma, dtype=torch.float64).expand(len(rewards)).tolist()
    returns, last = [], 0.0
    for reward, rate in zip(reversed(rewards.tolist()), reversed(gammas), strict=True):
        last = reward + rate * last
        returns.append(last)
    return rewards.new_tensor(returns[::-1])


def gae(
    values: Tensor,
    rewards: Tensor,
    trained: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t.

    Generalised advantage estimation (arXiv:1506.02438, eq. 16) as in PPO (arXiv:1707.06347, eq. 11), a token
    being an action. t counts trained tokens only: what the environment says is no action, so the next value
    is that of the next trained token, and no discount is taken on the way.

    Args:
        values: [T] of the critic before each token was sampled; anything where not trained.
        rewards: [T], 0 where not trained.
        trained: [T] bool.
        gamma: discount per token.
        lam: 0 trusts the critic, 1 the rewards.
        bootstrap: value after the last token: 0 where the episode ended by itself.

    Returns:
        advantages [T] and returns (advantages + values, what the critic should have said) [T], 0 where not
        trained.

    Raises:
        RecordError: shapes differ, or a reward stands where nothing is trained.
    """
    values_N, rewards_N = _trained_only(values, rewards, trained)
    deltas_N = rewards_N + gamma * _next(values_N, bootstrap) - values_N
    return _spread(discounted_returns(deltas_N, gamma * lam), values_N, trained)


def bi_level_gae(
    values: Tensor,
    rewards: Tensor,
    trained: Tensor,
    turns: Tensor,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
    bootstrap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """GAE over turns, then within each turn over its tokens (VAGEN, arXiv:2510.16907; RAGEN's bi-level GAE).

    With e_k the last trained token of turn k, whatever its reward:

        A(e_k) = r(e_k) + turn_gamma V(e_{k+1}) - V(e_k) + turn_gamma turn_lam A(e_{k+1})
        A_t = delta_t + gamma lam A_{t+1} for t before e_k in its turn, delta_t as in `gae`

    so that discounts over turns do not depend on how many tokens a turn has. A reward within a turn (a
    penalty for a token, not a turn's reward) counts in that turn only. With one turn and the same gamma and
    lambda for both it is `gae`, and so it is with all four at 1 and rewards on the ends of turns.

    Args:
        turns: [T] number of the turn that a token belongs to, not falling over trained tokens.
        gamma, lam: within turns.
        turn_gamma, turn_lam: between turns; 0.95 is RAGEN's.
        bootstrap: value after the last turn.
        values, rewards, trained: as in `gae`.

    Returns:
        As `gae`.

    Raises:
        RecordError: shapes differ, or a reward stands where nothing is trained.
    """
    values_N, rewards_N = _trained_only(values, rewards, trained)
    turns_N = turns[trained]
    is_end_N = torch.ones_like(turns_N, dtype=torch.bool)
    is_end_N[:-1] = turns_N[1:] != turns_N[:-1]

    values_K = values_N[is_end_N]
    deltas_K = rewards_N[is_end_N] + turn_gamma * _next(values_K, bootstrap) - values_K
    deltas_N = rewards_N + gamma * _next(values_N, bootstrap) - values_N
    deltas_N[is_end_N] = discounted_returns(deltas_K, turn_gamma * turn_lam)
    within_N = torch.full(is_end_N.shape, gamma * lam, dtype=torch.float64)
    within_N[is_end_N] = 0.0  # what comes after a turn is in its end already
    return _spread(discounted_returns(deltas_N, within_N), values_N, trained)


def token_rewards(rewards: Tensor, turns: Tensor, trained: Tensor) -> Tensor:
    """Puts each turn's reward on its last trained token, or on the last one before it where it has none.

    A reward before any trained token is left out: nothing that is trained led to it.

    Args:
        rewards: [K].
        turns: [T] from 0 to K - 1, not falling.
        trained: [T] bool.

    Returns:
        [T].
    """
    where_N = trained.nonzero().squeeze(1)
    last_K = torch.searchsorted(turns[where_N], torch.arange(len(rewards)), right=True) - 1
    led = last_K >= 0
    return rewards.new_zeros(len(turns)).index_add(0, where_N[last_K[led]], rewards[led])


def _trained_only(values: Tensor, rewards: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """[N] values and rewards of the trained tokens."""
    if not values.shape == rewards.shape == trained.shape:
        raise RecordError(
            f"values, rewards and trained must align: got {tuple(values.shape)}, {tuple(rewards.shape)} and "
            f"{tuple(trained.shape)}, expected [T] each"
        )
    if bool((rewards[~trained] != 0).any()):
        raise RecordError(f"rewards: got {rewards.tolist()}, expected 0 where nothing is trained")
    return values[trained], rewards[trained]


def _next(values: Tensor, bootstrap: float) -> Tensor:
    return torch.cat([values[1:], values.new_tensor([bootstrap])])[: len(values)]


def _spread(advantages_N: Tensor, values_N: Tensor, trained_T: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [T] each, 0 where not trained."""
    advantages_T = values_N.new_zeros(len(trained_T)).masked_scatter(trained_T, advantages_N)
    returns_T = values_N.new_zeros(len(trained_T)).masked_scatter(trained_T, advantages_N + values_N)
    return advantages_T, returns_T

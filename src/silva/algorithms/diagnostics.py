"""Signs of an unhealthy policy: pure functions to numbers for the log, nothing that is trained on.

Keys have no prefix; who logs them adds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from silva.errors import ConfigError, RecordError
from silva.types import Turn

ZSCORE_EPS = 1e-3  # as RAGEN-2 has it


def collapse(logprobs_NN: Tensor, tokens_N: Tensor, *, ks: Sequence[int] = (1, 2, 4, 8)) -> dict[str, float]:
    """Does the reasoning depend on its prompt? RAGEN-2's diagnosis of template collapse (arXiv:2604.06268).

    Reasoning i was sampled under prompt i and is scored under every prompt j, L_ij = log p(z_i | x_j). With
    matched_i = L_ii and marginal_i = log (1/N sum_j exp L_ij):

    - `mutual_information`, in nats: mean of matched - marginal. 0 where reasoning ignores its prompt, at
      most log N (`mutual_information_bound`) where each could stem from its own prompt only.
    - `conditional_entropy` H(Z | X), in nats: -mean of matched. High with no mutual information means many
      words for one template.
    - `mi_zscore`: mean of matched - marginal, over (std of marginal, divided by N, + 0.001).
    - `retrieval_accuracy@k`: share of reasonings whose own prompt is among the k likeliest; what chance
      gives is k / N (`retrieval_chance@k`). Among equal likelihoods the order is random, and this is the
      expectation over it, so a policy that ignores its prompt scores exactly chance.

    The first three also as `..._per_token`, from L_ij / tokens_i: long reasonings weigh no more there.

    Args:
        logprobs_NN: [N, N] log-likelihoods summed over tokens, rows reasonings, columns N >= 2 different
            prompts; -inf where a prompt rules a reasoning out.
        tokens_N: [N] tokens of each reasoning, 1 or more.
        ks: those above N are left out.

    Raises:
        RecordError: the shapes do not fit, a likelihood is NaN or +inf (or -inf for the own prompt), or a
            reasoning is empty.
    """
    n = len(logprobs_NN)
    if logprobs_NN.shape != (n, n) or n < 2 or tokens_N.shape != (n,):
        raise RecordError(
            f"collapse: got log-likelihoods {tuple(logprobs_NN.shape)} and token counts "
            f"{tuple(tokens_N.shape)}, expected [N, N] and [N] with N >= 2"
        )
    scores_NN = logprobs_NN.detach().double()
    if bool((scores_NN.isnan() | (scores_NN == math.inf)).any() | scores_NN.diagonal().isinf().any()):
        raise RecordError(
            "collapse: got a log-likelihood that is NaN, +inf, or -inf under the prompt it was sampled from, "
            "expected finite ones, or -inf under another prompt"
        )
    if bool((tokens_N < 1).any()):
        raise RecordError(f"collapse: got a reasoning of {int(tokens_N.min())} tokens, expected 1 or more")

    own_N1 = scores_NN.diagonal()[:, None]
    likelier_N, equal_N = (scores_NN > own_N1).sum(1), (scores_NN == own_N1).sum(1)  # equal: at least itself
    metrics = _information(scores_NN)
    per_token = _information(scores_NN / tokens_N[:, None])
    metrics |= {f"{name}_per_token": value for name, value in per_token.items()}
    metrics["mutual_information_bound"] = math.log(n)
    for k in (k for k in ks if k <= n):
        metrics[f"retrieval_accuracy@{k}"] = ((k - likelier_N).double() / equal_N).clamp(0, 1).mean().item()
        metrics[f"retrieval_chance@{k}"] = k / n
    return metrics


def _information(scores_NN: Tensor) -> dict[str, float]:
    matched_N = scores_NN.diagonal()
    marginal_N = scores_NN.logsumexp(1) - math.log(len(scores_NN))
    information = (matched_N - marginal_N).mean()
    return {
        "mutual_information": information.item(),
        "conditional_entropy": -matched_N.mean().item(),
        "mi_zscore": (information / (marginal_N.std(correction=0) + ZSCORE_EPS)).item(),
    }


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that stood before: 1 - different n-grams / all n-grams (seq-rep-n, arXiv:1908.04319).

    Returns:
        0 where nothing repeats, or where there are fewer than n tokens; towards 1 in a loop.

    Raises:
        ConfigError: n below 1.
    """
    if n < 1:
        raise ConfigError(f"repetition: got n-grams of {n} tokens, expected 1 or more")
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return 1.0 - len(set(zip(*(tokens[i:] for i in range(n)), strict=False))) / total


def response_metrics(turns: Iterable[Turn]) -> dict[str, float]:
    """How the replies of these turns look, whoever gave them.

    Returns:
        `tokens_mean` and `tokens_max` of a reply, `cut` (share that ended for lack of room), `thoughts`
        (share with reasoning that is not blank) and `repetition` (mean over replies, 4-grams); nothing
        where there is no turn.
    """
    turns = list(turns)
    if not turns:
        return {}
    replies = [turn.reply_tokens for turn in turns]
    return {
        "tokens_mean": _mean([len(reply) for reply in replies]),
        "tokens_max": float(max(len(reply) for reply in replies)),
        "cut": _mean([turn.cut for turn in turns]),
        "thoughts": thought_share(turns),
        "repetition": _mean([repetition(reply) for reply in replies]),
    }


def thought_share(turns: Sequence[Turn]) -> float:
    """Share of replies with reasoning that is not blank; 0 where there is no turn."""
    # The reply is the last message: a turn whose context was replaced holds earlier replies too.
    found = [any((m.reasoning or "").strip() for m in turn.messages[-1:]) for turn in turns]
    return _mean(found) if found else 0.0


def explained_variance(returns_N: Tensor, values_N: Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a constant one.

    Blind to a constant error, as variances are. Below 0 the critic is worse than none.

    Args:
        returns_N: [N] of the trained tokens.
        values_N: [N] that the critic predicted for them.

    Returns:
        NaN where all returns are equal: there is nothing to explain.

    Raises:
        RecordError: the shapes differ, or N is 0.
    """
    if returns_N.ndim != 1 or returns_N.shape != values_N.shape or not len(returns_N):
        raise RecordError(
            f"values must align with returns: got {tuple(values_N.shape)} for {tuple(returns_N.shape)}, "
            "expected [N] each with N >= 1"
        )
    returns_N, values_N = returns_N.detach().double(), values_N.detach().double()
    if bool((returns_N == returns_N[0]).all()):
        return math.nan
    left = (returns_N - values_N).var(correction=0) / returns_N.var(correction=0)
    return 1.0 - left.item()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

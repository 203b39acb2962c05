"""Entropy of a distribution of which only the likeliest tokens are known, as APIs give it."""

from __future__ import annotations

import numpy as np

from silva.errors import RecordError

SLACK = 1e-6  # by which probabilities that were rounded may add up to more than 1


def top_entropy(logprobs: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """The entropy of each row, and how far it can be off.

    The tokens that are not known share the rest r of the probability, and none of them is likelier than the
    least of the known ones, p. Their part is largest if all are equally likely, -r ln(r / (V - k)), and
    smallest if as many as possible have p. The estimate is the middle of the two bounds.

    Args:
        logprobs: [T, k] of the k likeliest tokens, any order.
        vocabulary: V, at least k.

    Returns:
        entropies [T] in nats, float64; half the distance of the bounds [T]: 0 if k = V or r = 0.

    Raises:
        RecordError: these are not the likeliest tokens of a distribution: a probability of 0, a row that adds
            up to more than 1, or a rest that does not fit below the least of them.
    """
    known = np.exp(np.asarray(logprobs, np.float64))
    k = known.shape[-1] if known.ndim == 2 else 0
    if not 1 <= k <= vocabulary or not (known > 0).all() or not (known.sum(1) <= 1 + SLACK).all():
        raise RecordError(
            f"top_entropy: got log-probabilities {known.shape} with sums up to "
            f"{known.sum(-1).max(initial=0):g} for {vocabulary} tokens, expected [T, k] of k <= V that add "
            "up to 1 at most"
        )
    rest, least = np.clip(1 - known.sum(1), 0, 1), known.min(1)
    if k == vocabulary:
        rest = np.where(rest < SLACK, 0.0, rest)
    unknown = vocabulary - k
    if (rest > unknown * least + SLACK).any():
        raise RecordError(
            f"top_entropy: got {rest.max():g} left for {unknown} tokens that are likelier than none of those "
            "known, expected the likeliest tokens of a distribution"
        )
    known_part = -(known * np.log(known)).sum(1)
    high = -_xlogx(rest) + rest * np.log(max(unknown, 1))
    whole = np.floor(rest / least + 1e-12)
    low = -whole * least * np.log(least) - _xlogx(np.clip(rest - whole * least, 0, 1))
    low = np.minimum(low, high)
    return known_part + (low + high) / 2, (high - low) / 2


def _xlogx(x: np.ndarray) -> np.ndarray:
    return x * np.log(np.where(x > 0, x, 1.0))

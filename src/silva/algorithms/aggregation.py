"""From losses per token to one number: the normaliser of an update, folded into each token's weight.

It is computed from all samples of the update, over ranks and micro-batches, before the first of them
runs. Summing weight * loss then gives the same gradient however the update is cut.

A *sequence* is a trajectory, also where a rewritten context spread it over several samples. Only what is
trained counts: tokens with a weight above 0, sequences with at least one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from silva.errors import ConfigError
from silva.types import Sample


def normalise(samples: Sequence[Sample], mode: str, *, constant: float | None = None) -> list[Sample]:
    """Multiplies `loss_weights` by the normaliser of `mode`, with n sequences of tokens_i trained tokens:

    - `token_mean`: 1 / sum of tokens_i. Every token counts the same (DAPO, arXiv:2503.14476).
    - `sequence_mean_token_mean`: 1 / (n tokens_i). Every sequence counts the same (GRPO, arXiv:2402.03300).
    - `sequence_mean_token_sum`: 1 / n. The plain policy gradient of a whole sequence (RLOO).
    - `constant`: 1 / constant (Dr. GRPO, arXiv:2503.20783: sequences * longest answer).

    Every other stream gets the `token_mean` of its own tokens, so that none changes what another weighs.

    Args:
        samples: all samples of one update, with weights above 0, mostly 1, where trained and 0 elsewhere.
        mode: a name in `AGGREGATIONS`.
        constant: for `constant` only, above 0.

    Returns:
        The samples in their order, weights in their dtype; unchanged where nothing is trained.

    Raises:
        ConfigError: unknown mode, or a constant that is missing, useless or not above 0.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError(f"unknown aggregation: got {mode!r}, expected one of {', '.join(AGGREGATIONS)}")
    if (mode == "constant") != (constant is not None):
        raise ConfigError(
            f"aggregation {mode}: got constant {constant}, expected one with mode constant and only there"
        )
    if constant is not None and not (constant > 0 and math.isfinite(constant)):
        raise ConfigError(f"aggregation constant: got {constant}, expected a finite number above 0")

    own = _divided(samples, [sample.loss_weights for sample in samples], mode, constant)
    normal = [sample.replace(loss_weights=w) for sample, w in zip(samples, own, strict=True)]
    for name in sorted({name for sample in samples for name in sample.streams}):
        rows = [i for i, sample in enumerate(normal) if name in sample.streams]
        given = [normal[i].streams[name] for i in rows]
        for i, weights in zip(rows, _divided([normal[i] for i in rows], given, "token_mean"), strict=True):
            normal[i] = normal[i].replace(streams={**normal[i].streams, name: weights})
    return normal


def _divided(
    samples: Sequence[Sample], given: Sequence[np.ndarray], mode: str, constant: float | None = None
) -> list[np.ndarray]:
    """The weights, one array [T] a sample; unchanged if nothing is trained."""
    tokens: Counter[str] = Counter()  # trained ones of each trajectory that has any
    for sample, weights in zip(samples, given, strict=True):
        if trained := int(np.count_nonzero(weights > 0)):
            tokens[sample.trajectory] += trained

    def divided(weights: np.ndarray, own: int) -> np.ndarray:
        if not own:
            return weights
        denominator = AGGREGATIONS[mode](len(tokens), own, tokens.total(), constant or 0.0)
        return (weights.astype(np.float64) / denominator).astype(weights.dtype)

    return [divided(w, tokens[sample.trajectory]) for sample, w in zip(samples, given, strict=True)]


# (sequences, trained tokens of the token's own sequence, of all, constant) -> what its loss is divided by
AGGREGATIONS: dict[str, Callable[[int, int, int, float], float]] = {
    "token_mean": lambda sequences, own, total, constant: total,
    "sequence_mean_token_mean": lambda sequences, own, total, constant: sequences * own,
    "sequence_mean_token_sum": lambda sequences, own, total, constant: sequences,
    "constant": lambda sequences, own, total, constant: constant,
}

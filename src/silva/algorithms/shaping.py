"""Shaped rewards that depend on length: pure, to be added to `Trajectory.shaped`, never to raw rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from silva.algorithms.advantages import Scores
from silva.errors import ConfigError, RecordError


def overlong(lengths: Tensor, *, longest: int, buffer: int, coef: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to longest - buffer tokens, from there falling evenly to -coef at `longest`, and -coef above.

    Args:
        lengths: [B] sampled tokens.
        longest: the limit; 16384 + 4096 in the paper.
        buffer: tokens over which it falls, at most `longest`; 4096 in the paper.
        coef: what an answer that is cut off loses.

    Returns:
        [B] in the dtype of the lengths if that is a float one, else float32.

    Raises:
        ConfigError: a buffer that is no part of `longest`.
    """
    if not 0 < buffer <= longest:
        raise ConfigError(f"overlong buffer: got {buffer} tokens, expected 1 to longest ({longest})")
    return coef * ((longest - buffer - lengths) / buffer).clamp(-1, 0)


def length_penalty(scores: Scores, *, coef: float) -> Tensor:
    """-coef * mean reward of the group * l / longest of the group: brevity counts once a task is solved.

    PRIME-RL's linear penalty, with coefficients of 0.25 for sampled tokens, 0.1 for tokens shown and 0.1
    for turns there (a sum of three calls). A group whose mean is not above 0 is not penalised: a negative
    mean would reward length.

    Args:
        scores: with raw rewards, and what is to be kept short as lengths.

    Returns:
        [B].

    Raises:
        RecordError: scores without lengths.
    """
    if scores.lengths is None:
        raise RecordError("length_penalty: got no lengths, expected [B]")
    lengths_B = scores.lengths.to(scores.rewards.dtype)
    _, group_B = torch.unique(scores.groups, return_inverse=True)
    longest_B = torch.ones_like(lengths_B).scatter_reduce(0, group_B, lengths_B, "amax")[group_B]
    return -coef * scores.group_mean().clamp(min=0) * lengths_B / longest_B

"""Shaped rewards that depend on length: pure, to be added to `Trajectory.shaped`, never to raw rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from silva.algorithms.advantages import Scores
from silva.errors import RecordError


def overlong(lengths: Tensor, rooms: Tensor, *, buffer: float) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to (1 - buffer) L tokens, from there falling evenly to -1 at L, what an answer that is cut off loses.

    Args:
        lengths: [B] sampled tokens of answers.
        rooms: [B] L, the most tokens that each could have had, at least 1; 16384 + 4096 in the paper.
        buffer: above 0, share of L over which it falls; 0.2 in the paper.

    Returns:
        [B] in the dtype of the lengths if that is a float one, else float32.
    """
    return ((rooms - lengths) / (buffer * rooms) - 1).clamp(-1, 0)


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

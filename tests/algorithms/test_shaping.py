from __future__ import annotations

import pytest
import torch

from silva.algorithms.advantages import Scores
from silva.algorithms.shaping import length_penalty, overlong
from silva.errors import RecordError


def test_overlong_by_hand() -> None:
    """The paper's limit 20480 with a buffer of 4096: it falls from 16384; 17408 is a quarter of the way."""
    lengths = torch.tensor([1, 16384, 17408, 18432, 20480, 30000], dtype=torch.float64)
    found = overlong(lengths, torch.full_like(lengths, 20480), buffer=0.2)
    assert found.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1], abs=1e-12)


def test_length_penalty_by_hand() -> None:
    """Group 1: mean reward 2/3, longest 40: -0.25 * 2/3 * (10, 20, 40) / 40. Group 0 solved nothing, group 2
    is below 0: no penalty. Group 5: mean 1, alone and so the longest: -0.25."""
    rewards = torch.tensor([1.0, 0.0, 1.0, -3.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([1, 0, 1, 2, 1, 0, 2, 5])
    lengths = torch.tensor([10, 5, 20, 8, 40, 9, 3, 7])
    expected = [-1 / 24, 0, -1 / 12, 0, -1 / 6, 0, 0, -0.25]
    assert length_penalty(Scores(rewards, groups, lengths), coef=0.25).tolist() == pytest.approx(
        expected, rel=1e-12
    )
    halved = length_penalty(Scores(rewards, groups, lengths), coef=0.125).tolist()
    assert halved == pytest.approx([p / 2 for p in expected], rel=1e-12)


def test_length_penalty_needs_lengths() -> None:
    with pytest.raises(RecordError, match="length_penalty: got no lengths"):
        length_penalty(Scores(torch.ones(2), torch.zeros(2)), coef=0.25)

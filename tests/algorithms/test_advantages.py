from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden.read import read

from silva.algorithms.advantages import (
    ADVANTAGES,
    Scores,
    leave_one_out,
    length_weighted,
    mean,
    mean_std,
    reward,
)
from silva.algorithms.assign import whiten
from silva.errors import RecordError

GOLDEN = read("advantages_verl")
# Two groups, interleaved, and one of a single trajectory.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 2.0, 5.0, 0.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 9, 4, 9, 9, 4, 1])
LENGTHS = torch.tensor([2, 1, 1, 3, 4, 1, 5])
SCORES = Scores(REWARDS, GROUPS, LENGTHS)
# Group 4: rewards 1, 0, 0, mean 1/3, deviations 2/3, -1/3, -1/3,
#          variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.577350
#          leave one out: 1 - 0 = 1, 0 - 1/2, 0 - 1/2
#          lengths 2, 1, 1: baseline 2 / 4 = 1/2
#          over the mean: (2/3) / (1/3) = 2, -1, -1
#          shares of 1: 1, 0, 0
#          running: 1 - 0, b = 0.05; 0 - 0.05, b = 0.0475; 0 - 0.0475
# Group 9: rewards 2, 2, 5, mean 3, deviations -1, -1, 2, variance (1 + 1 + 4) / 2 = 3, std 1.732051
#          leave one out: 2 - 7/2 = -1.5, -1.5, 5 - 2 = 3
#          lengths 1, 3, 4: baseline (2 + 6 + 20) / 8 = 3.5
#          over the mean: -1/3, -1/3, 2/3
#          shares of 9: 2/9, 2/9, 5/9
#          running: 2 - 0, b = 0.1; 2 - 0.1, b = 0.095 + 0.1 = 0.195; 5 - 0.195
# Group 1: a single trajectory, all of its group; running: 7 - 0
BY_HAND = {
    "reward": [1, 2, 0, 2, 5, 0, 7],
    "mean": [2 / 3, -1, -1 / 3, -1, 2, -1 / 3, 0],
    "mean_std": [1.154500573, -0.577316938, -0.577250287, -0.577316938, 1.154633876, -0.577250287, 0],
    "leave_one_out": [1, -1.5, -0.5, -1.5, 3, -0.5, 0],
    "length_weighted": [0.5, -1.5, -0.5, -1.5, 1.5, -0.5, 0],
    "max_rl": [2, -1 / 3, -1, -1 / 3, 2 / 3, -1, 0],
    "share": [1, 2 / 9, 0, 2 / 9, 5 / 9, 0, 1],
    "running": [1, 2, -0.05, 1.9, 4.805, -0.0475, 7],
}
BASELINES = ["mean", "mean_std", "leave_one_out", "length_weighted"]  # those that a constant does not change


@pytest.mark.parametrize("name", ADVANTAGES)
def test_by_hand(name: str) -> None:
    """mean_std with eps 1e-4: (2/3) / 0.577450269 = 1.154500573, 2 / 1.732150808 = 1.154633876, ..."""
    assert ADVANTAGES[name].function(SCORES).tolist() == pytest.approx(BY_HAND[name], rel=1e-8, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("grpo", lambda scores: mean_std(scores, eps=1e-6)),  # verl's
        ("dr_grpo", mean),
        ("rloo", leave_one_out),
        ("opo", length_weighted),
    ],
)
def test_equal_to_verl(name: str, function: Callable[[Scores], torch.Tensor]) -> None:
    mask = torch.tensor(GOLDEN["mask"], dtype=torch.float64)
    rewards = torch.tensor(GOLDEN["outcome"], dtype=torch.float64).sum(1)
    ours = function(Scores(rewards, torch.tensor(GOLDEN["groups"]), mask.sum(1)))
    theirs = torch.tensor(GOLDEN[name], dtype=torch.float64)
    torch.testing.assert_close(ours[:, None] * mask, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "function"), [("reinforce_plus_plus", reward), ("reinforce_plus_plus_baseline", mean)]
)
def test_whitened_equal_to_verl(name: str, function: Callable[[Scores], torch.Tensor]) -> None:
    """verl divides sums by the number of tokens + 1e-8: with 39 tokens 2.6e-10 off."""
    mask = torch.tensor(GOLDEN["mask"], dtype=torch.float64)
    rewards = torch.tensor(GOLDEN["outcome"], dtype=torch.float64).sum(1)
    per_token = function(Scores(rewards, torch.tensor(GOLDEN["groups"])))[:, None].expand_as(mask)
    ours = whiten(per_token.flatten(), mask.flatten()).view_as(mask) * mask
    torch.testing.assert_close(ours, torch.tensor(GOLDEN[name], dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BASELINES)
def test_a_constant_added_to_a_group_changes_nothing(name: str) -> None:
    shifted = Scores(REWARDS + torch.where(GROUPS == 9, 3.0, -2.0), GROUPS, LENGTHS)
    torch.testing.assert_close(ADVANTAGES[name].function(shifted), ADVANTAGES[name].function(SCORES))


@pytest.mark.parametrize("name", ["max_rl", "share"])
def test_the_scale_of_rewards_does_not_matter(name: str) -> None:
    scaled = Scores(REWARDS * torch.where(GROUPS == 9, 3.0, 0.5), GROUPS)
    torch.testing.assert_close(ADVANTAGES[name].function(scaled), ADVANTAGES[name].function(SCORES))


@pytest.mark.parametrize(
    ("name", "expected"), [("max_rl", [-1, 1, 0, 0, -1, 1]), ("share", [-0.5, 0.5, 0, 0, -0.75, 0.25])]
)
def test_rewards_below_0_keep_their_sign(name: str, expected: list[float]) -> None:
    """max_rl: -1 and 1 over 1; 0 and 0 over nothing; -3 + 1 and 1 + 1 over 2. Shares of 2, 0 and 4."""
    rewards = torch.tensor([-1.0, 1.0, 0.0, 0.0, -3.0, 1.0])
    assert ADVANTAGES[name].function(Scores(rewards, torch.tensor([0, 0, 1, 1, 2, 2]))).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("max_rl", [3 + 0.075, -1 + 0.075, -1 - 0.225, -1 + 0.075]), ("share", [1.075, 0.075, -0.225, 0.075])],
)
def test_only_raw_rewards_divide(name: str, expected: list[float]) -> None:
    """Raw 1, 0, 0, 0: over the mean 3 and -1, shares 1 and 0. Penalties 0, 0, -0.3, 0 minus their mean."""
    raw_rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    shaped = torch.tensor([0.0, 0.0, -0.3, 0.0], dtype=torch.float64)
    scores = Scores(raw_rewards + shaped, torch.zeros(4, dtype=torch.int64), raw=raw_rewards)
    assert ADVANTAGES[name].function(scores).tolist() == pytest.approx(expected, rel=1e-12)


bounded = st.lists(
    st.tuples(st.floats(0, 1), st.floats(-1e3, 1e3), st.integers(0, 2)), min_size=1, max_size=16
)


@given(bounded)
@settings(max_examples=60, deadline=None)
def test_penalties_cannot_blow_up_what_is_divided(rows: list[tuple[float, float, int]]) -> None:
    """n r / (sum of r) - 1 is between -1 and n - 1, a share between 0 and 1; a penalty minus the mean of the
    group's is at most their range."""
    raw_rewards = torch.tensor([r for r, _, _ in rows], dtype=torch.float64)
    shaped = torch.tensor([s for _, s, _ in rows], dtype=torch.float64)
    groups = torch.tensor([group for _, _, group in rows])
    scores = Scores(raw_rewards + shaped, groups, raw=raw_rewards)
    for group in groups.unique().tolist():
        mine = groups == group
        spread = float(shaped[mine].max() - shaped[mine].min()) + 1e-9
        for name, most in (("max_rl", max(1, int(mine.sum()) - 1)), ("share", 1)):
            assert float(ADVANTAGES[name].function(scores)[mine].abs().max()) <= most + spread


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "running"])
def test_order_does_not_matter(name: str) -> None:
    order = torch.tensor([6, 2, 0, 5, 4, 3, 1])
    advantages = ADVANTAGES[name].function(Scores(REWARDS[order], GROUPS[order], LENGTHS[order]))
    torch.testing.assert_close(advantages, ADVANTAGES[name].function(SCORES)[order])


@pytest.mark.parametrize("name", [*BASELINES, "max_rl"])
def test_equal_rewards_give_zero_also_where_their_mean_is_rounded(name: str) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3 in binary: the rounding must not be blown up to a signal."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    scores = Scores(rewards, torch.zeros(3, dtype=torch.int64), torch.tensor([3, 7, 11]))
    assert ADVANTAGES[name].function(scores).abs().max() < 1e-12


def test_misaligned_tensors_are_refused() -> None:
    with pytest.raises(RecordError, match=r"groups must align with rewards: got \(2,\) for \(7,\)"):
        Scores(REWARDS, GROUPS[:2])
    with pytest.raises(RecordError, match=r"lengths must align with rewards: got \(8,\) for \(7,\)"):
        Scores(REWARDS, GROUPS, torch.ones(8))
    with pytest.raises(RecordError, match="length_weighted advantages: got no lengths"):
        length_weighted(Scores(REWARDS, GROUPS))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_equal_rewards_give_is_as_the_entry_says(name: str) -> None:
    """Groups of equal rewards, 2 and 1.5: all advantages are 0, or not all of them."""
    scores = Scores(
        torch.tensor([2.0, 2.0, 1.5, 1.5]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, 3, 4])
    )
    zero = bool((ADVANTAGES[name].function(scores) == 0).all())
    assert zero == ADVANTAGES[name].zero_if_equal

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from silva.algorithms.advantages import ADVANTAGES, assign, leave_one_out, mean, mean_std
from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample

# Two groups, interleaved, and one of a single trajectory.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 2.0, 5.0, 0.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 9, 4, 9, 9, 4, 1])
# Group 4: rewards 1, 0, 0, mean 1/3, deviations 2/3, -1/3, -1/3,
#          variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std 0.577350
#          leave one out: 1 - 0 = 1, 0 - 1/2, 0 - 1/2
# Group 9: rewards 2, 2, 5, mean 3, deviations -1, -1, 2, variance (1 + 1 + 4) / 2 = 3, std 1.732051
#          leave one out: 2 - 7/2 = -1.5, -1.5, 5 - 2 = 3
# Group 1: a single trajectory
BY_HAND = {
    "raw": [1, 2, 0, 2, 5, 0, 7],
    "mean": [2 / 3, -1, -1 / 3, -1, 2, -1 / 3, 0],
    "mean_std": [1.154500573, -0.577316938, -0.577250287, -0.577316938, 1.154633876, -0.577250287, 0],
    "leave_one_out": [1, -1.5, -0.5, -1.5, 3, -0.5, 0],
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_by_hand(name: str) -> None:
    """mean_std with eps 1e-4: (2/3) / 0.577450269 = 1.154500573, 2 / 1.732150808 = 1.154633876, ..."""
    assert ADVANTAGES[name](REWARDS, GROUPS).tolist() == pytest.approx(BY_HAND[name], rel=1e-8, abs=1e-15)


@pytest.mark.parametrize("name", ["mean", "mean_std", "leave_one_out"])
def test_a_constant_added_to_a_group_changes_nothing(name: str) -> None:
    shifted = REWARDS + torch.where(GROUPS == 9, 3.0, -2.0)
    torch.testing.assert_close(ADVANTAGES[name](shifted, GROUPS), ADVANTAGES[name](REWARDS, GROUPS))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_does_not_matter(name: str) -> None:
    order = torch.tensor([6, 2, 0, 5, 4, 3, 1])
    advantages = ADVANTAGES[name](REWARDS[order], GROUPS[order])
    torch.testing.assert_close(advantages, ADVANTAGES[name](REWARDS, GROUPS)[order])


@pytest.mark.parametrize("name", ["mean", "mean_std", "leave_one_out"])
def test_equal_rewards_give_zero_also_where_their_mean_is_rounded(name: str) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3 in binary: the rounding must not be blown up to a signal."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert ADVANTAGES[name](rewards, torch.zeros(3, dtype=torch.int64)).abs().max() < 1e-12


def test_mean_std_without_eps_has_unit_variance() -> None:
    advantages = mean_std(REWARDS, GROUPS, eps=0.0)
    assert advantages[GROUPS == 9].var().item() == pytest.approx(1.0, rel=1e-12)


rewards_and_groups = st.lists(
    st.tuples(st.integers(-40, 40).map(lambda n: n / 8), st.integers(0, 3)), min_size=1, max_size=24
)


@given(rewards_and_groups)
@settings(max_examples=100, deadline=None)
def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1(pairs: list[tuple[float, int]]) -> None:
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    groups = torch.tensor([group for _, group in pairs])
    n = (groups[:, None] == groups[None, :]).sum(1).double()
    scale = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(
        leave_one_out(rewards, groups), scale * mean(rewards, groups), rtol=1e-12, atol=1e-12
    )


def test_misaligned_tensors_are_refused() -> None:
    with pytest.raises(RecordError, match=r"groups must align with rewards: got \(2,\) for \(7,\)"):
        mean(REWARDS, GROUPS[:2])


def test_assign_gives_every_token_its_trajectory_s_advantage(
    make_group: Callable[..., Group], make_sample: Callable[..., Sample]
) -> None:
    """Group a: 1.0 and 0.0 - 0.5 (a penalty), mean 0.25, advantages 0.75 and -0.75. Group b: 2, 4: -1, 1."""
    groups = [make_group("a", [1.0, 0.0], shaped=[0.0, -0.5]), make_group("b", [2.0, 4.0])]
    samples = [
        make_sample("b/1", [0, 1]),
        make_sample("a/0", [0, 1, 1]),
        make_sample("a/1", [0, 1]),
        make_sample("a/0", [0, 0, 0, 1]),  # its context was rewritten: a second row
    ]
    assigned = assign(samples, groups, "mean")
    assert [sample.trajectory for sample in assigned] == ["b/1", "a/0", "a/1", "a/0"]
    values = [sample.advantages for sample in assigned]
    assert [v.tolist() for v in values if v is not None] == [[1, 1], [0.75] * 3, [-0.75] * 2, [0.75] * 4]
    assert all(v is not None and v.dtype == np.float32 for v in values)
    assert all(sample.advantages is None for sample in samples)  # the input is as it was


def test_failures_enter_no_baseline_and_are_not_trained(
    make_group: Callable[..., Group], make_sample: Callable[..., Sample]
) -> None:
    """The failed one has no result, not 0: the mean of 3 and 1 is 2, with a 0 it would be 4/3."""
    group = make_group("a", [3.0, float("nan"), 1.0, 9.0], failures=[None, "redo", None, "mask"])
    assigned = assign([make_sample(f"a/{i}", [0, 1]) for i in range(4)], [group], "mean")
    assert [(s.trajectory, s.advantages.tolist()) for s in assigned] == [("a/0", [1, 1]), ("a/2", [-1, -1])]


def test_assign_of_nothing(make_group: Callable[..., Group], make_sample: Callable[..., Sample]) -> None:
    assert assign([], [], "mean_std") == []
    failed = make_group("a", [0.0], failures=["redo"])
    assert assign([make_sample("a/0", [0, 1])], [failed], "leave_one_out") == []


def test_assign_refuses_what_does_not_fit(
    make_group: Callable[..., Group], make_sample: Callable[..., Sample]
) -> None:
    groups = [make_group("a", [1.0, 0.0])]
    with pytest.raises(ConfigError, match="unknown advantage: got 'gae', expected one of mean, mean_std"):
        assign([], groups, "gae")
    with pytest.raises(RecordError, match="trajectory 'c/0' of a sample"):
        assign([make_sample("c/0", [0, 1])], groups, "mean")
    with pytest.raises(RecordError, match="got 'a/0' twice"):
        assign([], groups * 2, "mean")
    with pytest.raises(RecordError, match="reward of trajectory a/1: got nan, expected a finite number"):
        assign([], [make_group("a", [1.0, float("nan")])], "mean")


@given(st.permutations(range(6)))
@settings(max_examples=20, deadline=None)
def test_group_ids_are_only_names(names: list[int]) -> None:
    ids: Tensor = torch.tensor([0, 1, 2, 0, 1, 2])
    rewards = torch.tensor([1.0, 4.0, 2.0, 3.0, 0.0, 2.5], dtype=torch.float64)
    renamed = torch.tensor(names)[ids]
    assert torch.equal(mean_std(rewards, renamed), mean_std(rewards, ids))

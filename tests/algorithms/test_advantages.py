from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.golden.read import read

from silva.algorithms.advantages import (
    ADVANTAGES,
    Scores,
    assign,
    clip_samples,
    leave_one_out,
    length_weighted,
    mean,
    mean_std,
    raw,
    running,
    running_baselines,
    whiten,
    whiten_samples,
)
from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample

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
    "raw": [1, 2, 0, 2, 5, 0, 7],
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
    assert ADVANTAGES[name](SCORES).tolist() == pytest.approx(BY_HAND[name], rel=1e-8, abs=1e-15)


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
    ("name", "function"), [("reinforce_plus_plus", raw), ("reinforce_plus_plus_baseline", mean)]
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
    torch.testing.assert_close(ADVANTAGES[name](shifted), ADVANTAGES[name](SCORES))


@pytest.mark.parametrize("name", ["max_rl", "share"])
def test_the_scale_of_rewards_does_not_matter(name: str) -> None:
    scaled = Scores(REWARDS * torch.where(GROUPS == 9, 3.0, 0.5), GROUPS)
    torch.testing.assert_close(ADVANTAGES[name](scaled), ADVANTAGES[name](SCORES))


@pytest.mark.parametrize(
    ("name", "expected"), [("max_rl", [-1, 1, 0, 0, -1, 1]), ("share", [-0.5, 0.5, 0, 0, -0.75, 0.25])]
)
def test_rewards_below_0_keep_their_sign(name: str, expected: list[float]) -> None:
    """max_rl: -1 and 1 over 1; 0 and 0 over nothing; -3 + 1 and 1 + 1 over 2. Shares of 2, 0 and 4."""
    rewards = torch.tensor([-1.0, 1.0, 0.0, 0.0, -3.0, 1.0])
    assert ADVANTAGES[name](Scores(rewards, torch.tensor([0, 0, 1, 1, 2, 2]))).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("max_rl", [3 + 0.075, -1 + 0.075, -1 - 0.225, -1 + 0.075]), ("share", [1.075, 0.075, -0.225, 0.075])],
)
def test_only_raw_rewards_divide(name: str, expected: list[float]) -> None:
    """Raw 1, 0, 0, 0: over the mean 3 and -1, shares 1 and 0. Penalties 0, 0, -0.3, 0 minus their mean."""
    raw_rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    shaped = torch.tensor([0.0, 0.0, -0.3, 0.0], dtype=torch.float64)
    scores = Scores(raw_rewards + shaped, torch.zeros(4, dtype=torch.int64), raw=raw_rewards)
    assert ADVANTAGES[name](scores).tolist() == pytest.approx(expected, rel=1e-12)


bounded = st.lists(
    st.tuples(st.floats(0, 1), st.floats(-1e3, 1e3), st.integers(0, 2)), min_size=1, max_size=16
)


@given(bounded)
@settings(max_examples=200, deadline=None)
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
            assert float(ADVANTAGES[name](scores)[mine].abs().max()) <= most + spread


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "running"])
def test_order_does_not_matter(name: str) -> None:
    order = torch.tensor([6, 2, 0, 5, 4, 3, 1])
    advantages = ADVANTAGES[name](Scores(REWARDS[order], GROUPS[order], LENGTHS[order]))
    torch.testing.assert_close(advantages, ADVANTAGES[name](SCORES)[order])


@pytest.mark.parametrize("name", [*BASELINES, "max_rl"])
def test_equal_rewards_give_zero_also_where_their_mean_is_rounded(name: str) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3 in binary: the rounding must not be blown up to a signal."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    scores = Scores(rewards, torch.zeros(3, dtype=torch.int64), torch.tensor([3, 7, 11]))
    assert ADVANTAGES[name](scores).abs().max() < 1e-12


def test_mean_std_without_eps_has_unit_variance() -> None:
    advantages = mean_std(SCORES, eps=0.0)
    assert advantages[GROUPS == 9].var().item() == pytest.approx(1.0, rel=1e-12)


rewards_and_groups = st.lists(
    st.tuples(st.integers(-40, 40).map(lambda n: n / 8), st.integers(0, 3)), min_size=1, max_size=24
)


def scores_of(pairs: list[tuple[float, int]]) -> Scores:
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    return Scores(rewards, torch.tensor([group for _, group in pairs]))


@given(rewards_and_groups)
@settings(max_examples=100, deadline=None)
def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1(pairs: list[tuple[float, int]]) -> None:
    scores = scores_of(pairs)
    n = (scores.groups[:, None] == scores.groups[None, :]).sum(1).double()
    scale = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(leave_one_out(scores), scale * mean(scores), rtol=1e-12, atol=1e-12)


@given(rewards_and_groups, st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_equal_lengths_weigh_nothing(pairs: list[tuple[float, int]], length: int) -> None:
    scores = scores_of(pairs)
    weighted = length_weighted(dataclasses.replace(scores, lengths=torch.full_like(scores.groups, length)))
    torch.testing.assert_close(weighted, mean(scores), rtol=1e-12, atol=1e-12)


def test_running_goes_on_from_the_baselines_so_far() -> None:
    """From 2: 3 - 2, b = 1.9 + 0.15 = 2.05; 0 - 2.05, b = 1.9475; 1 - 1.9475."""
    rewards = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
    scores = Scores(rewards, torch.zeros(3, dtype=torch.int64), baselines=torch.full((3,), 2.0))
    assert running(scores).tolist() == pytest.approx([1, -2.05, -0.9475], rel=1e-12)


def test_misaligned_tensors_are_refused() -> None:
    with pytest.raises(RecordError, match=r"groups must align with rewards: got \(2,\) for \(7,\)"):
        Scores(REWARDS, GROUPS[:2])
    with pytest.raises(RecordError, match=r"lengths must align with rewards: got \(8,\) for \(7,\)"):
        Scores(REWARDS, GROUPS, torch.ones(8))
    with pytest.raises(RecordError, match="length_weighted advantages: got no lengths"):
        length_weighted(Scores(REWARDS, GROUPS))


@given(st.permutations(range(6)))
@settings(max_examples=20, deadline=None)
def test_group_ids_are_only_names(names: list[int]) -> None:
    ids = torch.tensor([0, 1, 2, 0, 1, 2])
    rewards = torch.tensor([1.0, 4.0, 2.0, 3.0, 0.0, 2.5], dtype=torch.float64)
    renamed = torch.tensor(names)[ids]
    assert torch.equal(mean_std(Scores(rewards, renamed)), mean_std(Scores(rewards, ids)))


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


@pytest.mark.parametrize(("kind", "solved", "other"), [("max_rl", 9.0, -1.0), ("share", 1.0, 0.0)])
def test_a_penalty_that_takes_the_mean_to_0_divides_nothing(
    make_group: Callable[..., Group],
    make_sample: Callable[..., Sample],
    kind: str,
    solved: float,
    other: float,
) -> None:
    """Raw 1 and nine times 0, all with a penalty of 0.1: their sum is the rounding of 0.9 - 9 * 0.1."""
    group = make_group("a", [1.0] + [0.0] * 9, shaped=[-0.1] * 10)
    assert 0 < sum(t.shaped_reward for t in group.trajectories) < 1e-15
    found = first(assign([make_sample(f"a/{i}", [0, 1]) for i in range(10)], [group], kind))
    assert found == pytest.approx([solved] + [other] * 9, abs=1e-6)


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


def in_environment(group: Group, name: str) -> Group:
    return dataclasses.replace(group, task=dataclasses.replace(group.task, environment=name))


def first(samples: list[Sample]) -> list[float]:
    return [float(s.advantages[0]) for s in samples if s.advantages is not None]


@pytest.fixture
def batch(
    make_group: Callable[..., Group], make_sample: Callable[..., Sample]
) -> tuple[list[Sample], list[Group]]:
    """a and b in one environment, c in another; 1, 2, 1, 3, 2 and 1 trained tokens."""
    groups = [
        in_environment(make_group("a", [1.0, 0.0]), "maze"),
        in_environment(make_group("b", [2.0, 4.0]), "maze"),
        in_environment(make_group("c", [10.0, 0.0]), "shop"),
    ]
    weights = {"a/0": [0, 1], "a/1": [0, 1, 1], "b/0": [0, 1], "c/0": [0, 1, 0, 1], "c/1": [0, 1]}
    samples = [make_sample(name, row) for name, row in weights.items()]
    rewritten = [make_sample("b/1", [0, 0, 1]), make_sample("b/1", [0, 1, 1])]
    return [*samples[:3], *rewritten, *samples[3:]], groups


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("group", [0.5, -0.5, -1, 1, 1, 5, -5]),
        ("environment", [-0.75, -1.75, 0.25, 2.25, 2.25, 5, -5]),  # maze: (1 + 0 + 2 + 4) / 4 = 1.75
        ("batch", [1 - 17 / 6, -17 / 6, 2 - 17 / 6, 4 - 17 / 6, 4 - 17 / 6, 10 - 17 / 6, -17 / 6]),
    ],
)
def test_what_a_baseline_is_taken_over(
    over: str, expected: list[float], batch: tuple[list[Sample], list[Group]]
) -> None:
    assert first(assign(*batch, "mean", over=over)) == pytest.approx(expected, rel=1e-6)


def test_lengths_are_trained_tokens_of_all_rows(batch: tuple[list[Sample], list[Group]]) -> None:
    """a: (1 * 1 + 2 * 0) / 3 = 1/3. b: 1 and 3 tokens, (2 + 12) / 4 = 3.5. c: 2 and 1, 20 / 3."""
    expected = [2 / 3, -1 / 3, -1.5, 0.5, 0.5, 10 / 3, -20 / 3]
    assert first(assign(*batch, "length_weighted")) == pytest.approx(expected, rel=1e-6)


def test_running_baselines_are_one_per_environment(batch: tuple[list[Sample], list[Group]]) -> None:
    """maze from 1: 1 - 1, b = 1; 0 - 1, b = 0.95; 2 - 0.95, b = 0.9025 + 0.1 = 1.0025; 4 - 1.0025,
    b = 0.952375 + 0.2 = 1.152375. shop from 0: 10 - 0, b = 0.5; 0 - 0.5, b = 0.475."""
    samples, groups = batch
    before = {"maze": 1.0, "other": 3.0}
    expected = [0, -1, 1.05, 2.9975, 2.9975, 10, -0.5]
    assert first(assign(samples, groups, "running", baselines=before)) == pytest.approx(expected, rel=1e-6)
    after = running_baselines(groups, before)
    assert after == pytest.approx({"maze": 1.152375, "other": 3.0, "shop": 0.475}, rel=1e-12)
    assert before == {"maze": 1.0, "other": 3.0}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_may_come_one_by_one(kind: str, batch: tuple[list[Sample], list[Group]]) -> None:
    samples, groups = batch
    baselines: dict[str, float] = {}
    parts: list[float] = []
    for group in groups:
        rows = [s for s in samples if s.group == group.key]
        parts += first(assign(rows, [group], kind, baselines=baselines))
        baselines = running_baselines([group], baselines)
    assert parts == first(assign(samples, groups, kind))


def test_whiten_by_hand() -> None:
    """1, 3 and 5 with 9 left out: mean 3, variance (4 + 0 + 4) / 2 = 4, plus 5 = 9, root 3."""
    values = torch.tensor([1.0, 9.0, 3.0, 5.0])
    whitened = whiten(values, torch.tensor([1.0, 0.0, 1.0, 1.0]), eps=5.0)
    assert whitened.tolist() == pytest.approx([-2 / 3, 2, 0, 2 / 3])


values_and_counts = st.lists(
    st.tuples(st.integers(-40, 40).map(lambda n: n / 8), st.integers(0, 4)), min_size=2, max_size=20
).filter(lambda pairs: len({value for value, count in pairs if count}) > 1)


@given(values_and_counts)
@settings(max_examples=100, deadline=None)
def test_whiten_is_the_unbiased_z_score_of_values_repeated(pairs: list[tuple[float, int]]) -> None:
    values, counts = np.array([value for value, _ in pairs]), np.array([count for _, count in pairs])
    ours = whiten(torch.from_numpy(values), torch.from_numpy(counts).double(), eps=0.0).numpy()
    expected = stats.zscore(np.repeat(values, counts), ddof=1)
    np.testing.assert_allclose(np.repeat(ours, counts), expected, rtol=1e-12, atol=1e-12)


def test_whiten_without_variance_is_zero() -> None:
    assert whiten(torch.full((3,), 0.1, dtype=torch.float64), torch.ones(3)).abs().max() < 1e-12
    assert whiten(torch.tensor([2.0]), torch.ones(1)).tolist() == [0.0]


@pytest.mark.parametrize(
    ("over", "mean_of_all", "variance"),
    [
        # b/0: 2 on 1 token, b/1: 4 on 1 + 2 tokens. Mean 14 / 4, variance (2.25 + 3 * 0.25) / 3.
        ("tokens", 3.5, 1.0),
        ("trajectories", 3.0, 2.0),  # variance (1 + 1) / 1
    ],
)
def test_whiten_samples(
    over: str, mean_of_all: float, variance: float, batch: tuple[list[Sample], list[Group]]
) -> None:
    samples, groups = batch
    rows = assign([s for s in samples if s.group == "b"], groups, "raw")
    expected = [(value - mean_of_all) / variance**0.5 for value in (2, 4, 4)]
    whitened = whiten_samples(rows, over)
    assert first(whitened) == pytest.approx(expected, rel=1e-6)
    assert [len(set(s.advantages.tolist())) for s in whitened if s.advantages is not None] == [1, 1, 1]


def test_whiten_samples_does_not_depend_on_their_order(batch: tuple[list[Sample], list[Group]]) -> None:
    rows = assign(*batch, "mean")
    forward, backward = whiten_samples(rows), whiten_samples(rows[::-1])
    assert first(forward) == pytest.approx(first(backward)[::-1], rel=1e-6)


def test_clip_samples(batch: tuple[list[Sample], list[Group]]) -> None:
    rows = assign(*batch, "mean")  # 0.5, -0.5, -1, 1, 1, 5, -5
    assert first(clip_samples(rows, -1, 3)) == [0.5, -0.5, -1, 1, 1, 3, -1]


def test_later_steps_refuse_what_does_not_fit(batch: tuple[list[Sample], list[Group]]) -> None:
    samples, groups = batch
    assert whiten_samples([]) == clip_samples([], -1, 1) == []
    with pytest.raises(RecordError, match="advantages of a sample of a/0: got none, expected 2"):
        whiten_samples(samples)
    with pytest.raises(ConfigError, match="unknown whitening: got over 'rows', expected one of tokens"):
        whiten_samples(assign(samples, groups, "mean"), "rows")
    with pytest.raises(ConfigError, match="advantage mean: got over 'task', expected one of group"):
        assign(samples, groups, "mean", over="task")

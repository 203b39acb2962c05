from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import rewarded, row_of

from silva.algorithms.advantages import ADVANTAGES
from silva.algorithms.assign import assign, clip_samples, next_baselines, whiten, whiten_samples
from silva.errors import ConfigError, RecordError
from silva.types import Group, Sample

Batch = tuple[list[Sample], list[Group]]


def test_assign_gives_every_token_its_trajectory_s_advantage() -> None:
    """Group a: 1.0 and 0.0 - 0.5 (a penalty), mean 0.25, advantages 0.75 and -0.75. Group b: 2, 4: -1, 1."""
    groups = [rewarded("a", [1.0, 0.0], shaped=[0.0, -0.5]), rewarded("b", [2.0, 4.0])]
    samples = [
        row_of("b/1", [0, 1]),
        row_of("a/0", [0, 1, 1]),
        row_of("a/1", [0, 1]),
        row_of("a/0", [0, 0, 0, 1]),  # its context was rewritten: a second row
    ]
    assigned = assign(samples, groups, "mean")
    assert [sample.trajectory for sample in assigned] == ["b/1", "a/0", "a/1", "a/0"]
    values = [sample.advantages for sample in assigned]
    assert [v.tolist() for v in values if v is not None] == [[1, 1], [0.75] * 3, [-0.75] * 2, [0.75] * 4]
    assert all(v is not None and v.dtype == np.float64 for v in values)
    assert all(sample.advantages is None for sample in samples)  # the input is as it was


@pytest.mark.parametrize(("kind", "solved", "other"), [("max_rl", 9.0, -1.0), ("share", 1.0, 0.0)])
def test_a_penalty_that_takes_the_mean_to_0_divides_nothing(kind: str, solved: float, other: float) -> None:
    """Raw 1 and nine times 0, all with a penalty of 0.1: their sum is the rounding of 0.9 - 9 * 0.1."""
    group = rewarded("a", [1.0] + [0.0] * 9, shaped=[-0.1] * 10)
    assert 0 < abs(sum(t.shaped_reward for t in group.trajectories)) < 1e-15  # Python 3.12 adds otherwise
    found = first(assign([row_of(f"a/{i}", [0, 1]) for i in range(10)], [group], kind))
    assert found == pytest.approx([solved] + [other] * 9, abs=1e-6)


def test_failures_enter_no_baseline_and_are_not_trained() -> None:
    """The failed one has no result, not 0: the mean of 3 and 1 is 2, with a 0 it would be 4/3."""
    group = rewarded("a", [3.0, float("nan"), 1.0, 9.0], failures=[None, "redo", None, "mask"])
    assigned = assign([row_of(f"a/{i}", [0, 1]) for i in range(4)], [group], "mean")
    assert [(s.trajectory, s.advantages.tolist()) for s in assigned] == [("a/0", [1, 1]), ("a/2", [-1, -1])]


def test_assign_of_nothing() -> None:
    assert assign([], [], "mean_std") == []
    failed = rewarded("a", [0.0], failures=["redo"])
    assert assign([row_of("a/0", [0, 1])], [failed], "leave_one_out") == []


def test_assign_refuses_what_does_not_fit() -> None:
    groups = [rewarded("a", [1.0, 0.0])]
    with pytest.raises(ConfigError, match="unknown advantage: got 'gae', expected one of mean, mean_std"):
        assign([], groups, "gae")
    with pytest.raises(RecordError, match="trajectory 'c/0' of a sample"):
        assign([row_of("c/0", [0, 1])], groups, "mean")
    with pytest.raises(RecordError, match="got 'a/0' twice"):
        assign([], groups * 2, "mean")
    with pytest.raises(RecordError, match="reward of trajectory a/1: got nan, expected a finite number"):
        assign([], [rewarded("a", [1.0, float("nan")])], "mean")


def in_environment(group: Group, name: str) -> Group:
    return dataclasses.replace(group, task=dataclasses.replace(group.task, environment=name))


def first(samples: list[Sample]) -> list[float]:
    return [float(s.advantages[0]) for s in samples if s.advantages is not None]


@pytest.fixture
def batch() -> Batch:
    """a and b in one environment, c in another; 1, 2, 1, 3, 2 and 1 trained tokens."""
    groups = [
        in_environment(rewarded("a", [1.0, 0.0]), "maze"),
        in_environment(rewarded("b", [2.0, 4.0]), "maze"),
        in_environment(rewarded("c", [10.0, 0.0]), "shop"),
    ]
    weights = {"a/0": [0, 1], "a/1": [0, 1, 1], "b/0": [0, 1], "c/0": [0, 1, 0, 1], "c/1": [0, 1]}
    samples = [row_of(name, row) for name, row in weights.items()]
    rewritten = [row_of("b/1", [0, 0, 1]), row_of("b/1", [0, 1, 1])]
    return [*samples[:3], *rewritten, *samples[3:]], groups


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("group", [0.5, -0.5, -1, 1, 1, 5, -5]),
        ("environment", [-0.75, -1.75, 0.25, 2.25, 2.25, 5, -5]),  # maze: (1 + 0 + 2 + 4) / 4 = 1.75
        ("batch", [1 - 17 / 6, -17 / 6, 2 - 17 / 6, 4 - 17 / 6, 4 - 17 / 6, 10 - 17 / 6, -17 / 6]),
    ],
)
def test_what_a_baseline_is_taken_over(over: str, expected: list[float], batch: Batch) -> None:
    assert first(assign(*batch, "mean", over=over)) == pytest.approx(expected, rel=1e-6)


def test_lengths_are_trained_tokens_of_all_rows(batch: Batch) -> None:
    """a: (1 * 1 + 2 * 0) / 3 = 1/3. b: 1 and 3 tokens, (2 + 12) / 4 = 3.5. c: 2 and 1, 20 / 3."""
    expected = [2 / 3, -1 / 3, -1.5, 0.5, 0.5, 10 / 3, -20 / 3]
    assert first(assign(*batch, "length_weighted")) == pytest.approx(expected, rel=1e-6)


def test_running_baselines_are_one_per_environment(batch: Batch) -> None:
    """maze from 1: 1 - 1, b = 1; 0 - 1, b = 0.95; 2 - 0.95, b = 0.9025 + 0.1 = 1.0025; 4 - 1.0025,
    b = 0.952375 + 0.2 = 1.152375. shop from 0: 10 - 0, b = 0.5; 0 - 0.5, b = 0.475."""
    samples, groups = batch
    before = {"maze": 1.0, "other": 3.0}
    expected = [0, -1, 1.05, 2.9975, 2.9975, 10, -0.5]
    assert first(assign(samples, groups, "running", baselines=before)) == pytest.approx(expected, rel=1e-6)
    after = next_baselines(groups, before)
    assert after == pytest.approx({"maze": 1.152375, "other": 3.0, "shop": 0.475}, rel=1e-12)
    assert before == {"maze": 1.0, "other": 3.0}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_may_come_one_by_one(kind: str, batch: Batch) -> None:
    samples, groups = batch
    baselines: dict[str, float] = {}
    parts: list[float] = []
    for group in groups:
        rows = [s for s in samples if s.group == group.key]
        parts += first(assign(rows, [group], kind, baselines=baselines))
        baselines = next_baselines([group], baselines)
    assert parts == first(assign(samples, groups, kind))


def test_whiten_by_hand() -> None:
    """1, 3 and 5 with 9 left out: mean 3, variance (4 + 0 + 4) / 2 = 4, plus 5 = 9, root 3."""
    values = torch.tensor([1.0, 9.0, 3.0, 5.0])
    whitened = whiten(values, torch.tensor([1.0, 0.0, 1.0, 1.0]), eps=5.0)
    assert whitened.tolist() == pytest.approx([-2 / 3, 2, 0, 2 / 3])


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
def test_whiten_samples(over: str, mean_of_all: float, variance: float, batch: Batch) -> None:
    samples, groups = batch
    rows = assign([s for s in samples if s.group == "b"], groups, "reward")
    expected = [(value - mean_of_all) / variance**0.5 for value in (2, 4, 4)]
    whitened = whiten_samples(rows, over)
    assert first(whitened) == pytest.approx(expected, rel=1e-6)
    assert [len(set(s.advantages.tolist())) for s in whitened if s.advantages is not None] == [1, 1, 1]


def test_clip_samples(batch: Batch) -> None:
    rows = assign(*batch, "mean")  # 0.5, -0.5, -1, 1, 1, 5, -5
    assert first(clip_samples(rows, -1, 3)) == [0.5, -0.5, -1, 1, 1, 3, -1]


def test_later_steps_refuse_what_does_not_fit(batch: Batch) -> None:
    samples, groups = batch
    assert whiten_samples([], "tokens") == clip_samples([], -1, 1) == []
    with pytest.raises(RecordError, match="advantages of a sample of a/0: got none, expected 2"):
        whiten_samples(samples, "tokens")
    with pytest.raises(ConfigError, match="unknown whitening: got over 'rows', expected one of tokens"):
        whiten_samples(assign(samples, groups, "mean"), "rows")
    with pytest.raises(ConfigError, match="advantage mean: got over 'task', expected one of group"):
        assign(samples, groups, "mean", over="task")

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.by_hand import advantages, group, recipe, trained_advantages, trajectory, turn
from tests.golden.read import read
from torch import Tensor

from silva.algorithms.advantages import ADVANTAGES
from silva.algorithms.assign import assign, whiten_samples
from silva.algorithms.compose import with_advantages
from silva.algorithms.credit import (
    TREE_CREDIT,
    assign_gae,
    assign_turns,
    hard,
    raw_returns,
    scale_by_entropy,
    turn_rewards,
)
from silva.errors import ConfigError, RecordError
from silva.rollouts.samples import to_samples
from silva.types import Group, Segment, Signals, StopReason, Trajectory, Turn

GOLDEN = read("advantages_verl")


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def test_turn_rewards_hold_what_belongs_to_no_turn() -> None:
    """Turns 1 + 0.5 and 2 - 1; the trajectory's bonus of 3 is in none: the last gets 1 + 3."""
    played = trajectory("a", [turn("a/0", 1, 1, 1.0, shaped=0.5), turn("a/1", 1, 1, 2.0, shaped=-1.0)])
    assert turn_rewards(played).tolist() == [1.5, 1]
    bonus = dataclasses.replace(played, rewards={**played.rewards, "bonus": 3.0})
    assert turn_rewards(bonus).tolist() == [1.5, 4]
    assert turn_rewards(Trajectory("b", (), "error", rewards={"score": 1.0})).tolist() == []
    with pytest.raises(RecordError, match="reward of trajectory a: got nan"):
        turn_rewards(dataclasses.replace(played, rewards={"score": float("nan")}))


def test_assign_turns_by_hand() -> None:
    """gamma 0.5. Returns: a 1 + 0.5 * 4 = 3 and 4; b 1 and 0; c 5. First turns: mean (3 + 1 + 5) / 3 = 3;
    second turns: mean 2. The failed one enters no baseline."""
    a = trajectory("a", [turn("a/0", 2, 1, 1.0), turn("a/1", 1, 2, 4.0)])
    b = trajectory("b", [turn("b/0", 2, 1, 1.0), turn("b/1", 1, 1)])
    c = trajectory("c", [turn("c/0", 2, 2, 5.0)])
    failed = dataclasses.replace(trajectory("d", [turn("d/0", 1, 1, 99.0)]), failure="mask", error="late")
    groups = [group("g", a, b, c, failed)]
    found = assign_turns(to_samples(groups), groups, "mean", gamma=0.5)
    assert advantages(found) == [[0, 0, 0, 2, 2, 2], [-2, -2, -2, -2, -2], [2, 2, 2, 2]]


@pytest.mark.parametrize(("kind", "a", "b"), [("max_rl", [1, 1], [-1, -1]), ("share", [1, 1], [0, 0])])
def test_assign_turns_divides_by_raw_returns(kind: str, a: list[float], b: list[float]) -> None:
    """Raw returns 1 and 1 against 0 and 0; penalties of 0.5 in every last turn take half of the sum away."""
    played = {"a": 1.0, "b": 0.0}
    lasts = {i: turn(f"{i}/1", 1, 1, reward, shaped=-0.5) for i, reward in played.items()}
    groups = [group("g", *(trajectory(i, [turn(f"{i}/0", 1, 1), last]) for i, last in lasts.items()))]
    assert trained_advantages(assign_turns(to_samples(groups), groups, kind, gamma=1.0)) == [a, b]


def test_assign_turns_weighs_by_the_tokens_of_the_turn() -> None:
    """First turns: 3 on 1 token, 0 on 2: baseline 1. Second turns: 2 on 3 tokens, 6 on 1: 12 / 4 = 3."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 3, 2.0)])
    b = trajectory("b", [turn("b/0", 1, 2, -6.0), turn("b/1", 1, 1, 6.0)])
    groups = [group("g", a, b)]
    found = assign_turns(to_samples(groups), groups, "length_weighted", gamma=1.0)
    assert trained_advantages(found) == [[2, -1, -1, -1], [-1, -1, 3]]


def test_assign_turns_over_an_environment() -> None:
    """maze: first turns 2, 4, 9, mean 5, second turns 1 and 3; shop's only turn is alone."""
    groups = [
        group("g", trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 1, 1.0)])),
        group("h", trajectory("b", [turn("b/0", 1, 1, 1.0), turn("b/1", 1, 1, 3.0)])),
        group("i", trajectory("c", [turn("c/0", 1, 1, 9.0)])),
        group("j", trajectory("d", [turn("d/0", 1, 1, 7.0)]), environment="shop"),
    ]
    found = assign_turns(to_samples(groups), groups, "mean", gamma=1.0, over="environment")
    assert trained_advantages(found) == [[-3, -1], [-1, 1], [4], [0]]


def test_assign_turns_of_rows_whose_context_was_rewritten() -> None:
    """Each row gets the advantages of its own turns: first turns 1 and 3, second turns 0 and 2."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 3, 2, 0.0, fresh=True)])
    b = trajectory("b", [turn("b/0", 1, 1, 1.0), turn("b/1", 1, 1, 2.0)])
    groups = [group("g", a, b)]
    samples = to_samples(groups)
    assert [s.trajectory for s in samples] == ["a", "a", "b"]
    found = assign_turns(samples, groups, "mean", gamma=1.0)
    assert advantages(found) == [[-1, -1], [-1] * 5, [1, 1, 1, 1]]


def test_raw_returns_compare_late_turns_though_some_never_come_to_them() -> None:
    """gamma 1: all first turns return 1; of the second ones b returns 1 and c 0; a ended before, d failed."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0)])
    b = trajectory("b", [turn("b/0", 1, 1, 0.0, shaped=-9.0), turn("b/1", 1, 1, 1.0)])
    c = trajectory("c", [turn("c/0", 1, 1, 1.0), turn("c/1", 1, 1, 0.0, shaped=-9.0)])
    failed = dataclasses.replace(trajectory("d", [turn("d/0", 1, 1, 5.0)]), failure="mask", error="late")
    assert raw_returns(group("g", a, b, c, failed), 1.0) == [[1, 1, 1], [1, 0]]
    assert raw_returns(group("g", a, b), 0.5) == [[1, 0.5], [1]]
    assert raw_returns(group("g", failed), 1.0) == []


def golden_groups() -> list[Group]:
    """The rows of the golden file as trajectories of one turn after another."""
    groups: dict[int, list[Trajectory]] = {}
    for b, (row, number) in enumerate(zip(GOLDEN["turns"], GOLDEN["groups"], strict=True)):
        place, turns = 0, []
        for k, (shown, said) in enumerate(row):
            place += shown + said
            turns.append(turn(f"{b}/{k}", shown, said, GOLDEN["turn_rewards"][b][place - 1]))
        groups.setdefault(number, []).append(trajectory(str(b), turns))
    return [group(str(number), *members) for number, members in groups.items()]


def test_raw_turn_credit_whitened_is_verl_s_reinforce_plus_plus() -> None:
    groups = golden_groups()
    found = whiten_samples(assign_turns(to_samples(groups), groups, "reward", gamma=1.0), "tokens")
    mask, theirs = golden("mask").bool(), golden("reinforce_plus_plus_turns")
    for sample in found:
        expected = theirs[int(sample.trajectory)][mask[int(sample.trajectory)]]
        assert sample.advantages is not None
        np.testing.assert_allclose(sample.advantages[sample.loss_weights > 0], expected, rtol=1e-6)


def test_assign_gae_is_verl_s() -> None:
    groups = golden_groups()
    samples = []
    for sample in to_samples(groups):
        row = np.array(GOLDEN["values"][int(sample.trajectory)])[: len(sample)]
        samples.append(sample.replace(values=np.where(sample.loss_weights > 0, row, np.nan)))
    mask = golden("mask").bool()
    for name, settings_ in {"gae": {}, "bi_level_gae": {"turn_gamma": 0.95, "turn_lam": 0.8}}.items():
        for sample in assign_gae(samples, groups, gamma=0.9, lam=0.8, **settings_):
            b = int(sample.trajectory)
            returns = torch.tensor(GOLDEN[name]["returns"][b], dtype=torch.float64)[mask[b]]
            assert sample.returns is not None and sample.advantages is not None
            own = sample.loss_weights > 0
            np.testing.assert_allclose(sample.returns[own], returns, rtol=1e-6, atol=1e-6)
            expected = returns - golden("values")[b][mask[b]]
            np.testing.assert_allclose(sample.advantages[own], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind != "running"])
def test_with_one_turn_each_credit_by_turn_is_credit_by_trajectory(kind: str) -> None:
    members = [trajectory(f"t/{i}", [turn(f"t/{i}/0", 1, 1 + i, float(i * i))]) for i in range(4)]
    groups = [group("g", *members[:3]), group("h", members[3])]
    samples = to_samples(groups)
    by_turn = assign_turns(samples, groups, kind, gamma=0.5)
    assert advantages(by_turn) == advantages(assign(samples, groups, kind))


eighths = st.integers(-16, 16).map(lambda n: n / 8)


@st.composite
def played_groups(draw: st.DrawFn) -> list[Group]:
    shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), eighths), min_size=2, max_size=2)
    groups = []
    for g in range(draw(st.integers(1, 2))):
        members = []
        for i, row in enumerate(draw(st.lists(shapes, min_size=2, max_size=4))):
            turns = [turn(f"{g}/{i}/{k}", shown, said, r) for k, (shown, said, r) in enumerate(row)]
            members.append(trajectory(f"{g}/{i}", turns))
        groups.append(group(str(g), *members))
    return groups


@given(played_groups(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_cut_matters_to_credit_by_turn(groups: list[Group], random: Any) -> None:
    whole = {s.trajectory: s for s in assign_turns(to_samples(groups), groups, "mean", gamma=1.0)}
    for g in groups:
        members = list(g.trajectories)
        random.shuffle(members)
        alone = [dataclasses.replace(g, trajectories=tuple(members))]
        for sample in assign_turns(to_samples(alone), alone, "mean", gamma=1.0):
            expected = whole[sample.trajectory].advantages
            np.testing.assert_allclose(sample.advantages, expected, rtol=1e-6, atol=1e-6)


def test_assign_turns_refuses_what_does_not_fit() -> None:
    groups = [group("g", trajectory("a", [turn("a/0", 1, 1), turn("a/1", 1, 1)]))]
    (sample,) = to_samples(groups)
    assert assign_turns([], [], "mean", gamma=1.0) == []
    with pytest.raises(ConfigError, match="advantage running: got credit by turn"):
        assign_turns([sample], groups, "running", gamma=1.0)
    with pytest.raises(ConfigError, match="unknown advantage: got 'gae'"):
        assign_turns([sample], groups, "gae", gamma=1.0)
    with pytest.raises(
        RecordError, match=r"turns of a sample of a: got 4 tokens in turns, and the turns \['b/1'\]"
    ):
        assign_turns([sample.replace(turn_ids=("a/0", "b/1"))], groups, "mean", gamma=1.0)
    with pytest.raises(RecordError, match=r"got 2 tokens in turns.*expected all 4 tokens"):
        assign_turns([sample.replace(turn_ids=("a/0",), turn_spans=((0, 2),))], groups, "mean", gamma=1.0)


def test_assign_gae_where_a_context_was_rewritten_by_hand() -> None:
    """Rows of 1 and 2 trained tokens are one sequence, also in the wrong order. gamma 0.5, lam 1.

    values 1, 2, 4; rewards 3, 0, 8: returns 8; 0.5 * 8 = 4; 3 + 0.5 * 4 = 5; advantages 4, 2, 4.
    """
    played = trajectory("a", [turn("a/0", 2, 1, 3.0), turn("a/1", 3, 2, 8.0, fresh=True)])
    nan = float("nan")
    first, second = to_samples([group("g", played)])
    rows_ = [
        second.replace(values=np.array([nan, nan, nan, 2, 4])),
        first.replace(values=np.array([nan, nan, 1])),
    ]
    found = assign_gae(rows_, [group("g", played)], gamma=0.5, lam=1.0)
    assert advantages(found) == [[0, 0, 0, 2, 4], [0, 0, 4]]
    assert [s.returns.tolist() for s in found if s.returns is not None] == [[0, 0, 0, 4, 8], [0, 0, 5]]


@pytest.mark.parametrize(
    ("stop", "expected"),
    # value 1, reward 2, value of the last observation 8: 2 - 1, and 2 + 0.5 * 8 - 1 where it was cut short
    [("terminated", 1.0), ("truncated", 5.0), ("max_turns", 5.0), ("max_tokens", 5.0)],
)
def test_assign_gae_bootstraps_only_what_did_not_end(stop: StopReason, expected: float) -> None:
    groups = [group("g", trajectory("a", [turn("a/0", 1, 1, 2.0)], stop=stop))]
    samples = [s.replace(values=np.array([np.nan, 1.0])) for s in to_samples(groups)]
    found = assign_gae(samples, groups, gamma=0.5, lam=1.0, bootstrap={"a": 8.0})
    assert advantages(found) == [[0, expected]]
    assert advantages(assign_gae(samples, groups, gamma=0.5, lam=1.0)) == [[0, 1]]


def test_assign_gae_adds_extra_rewards_of_tokens() -> None:
    """gamma 0.5, lam 1, values 0: 4 + 1 = 5 last, then 2 + 0.5 * 5 = 4.5. The failed one keeps its place."""
    failed = dataclasses.replace(trajectory("b", [turn("b/0", 1, 1)]), failure="mask", error="late")
    groups = [group("g", failed, trajectory("a", [turn("a/0", 1, 2, 4.0)]))]
    (sample,) = to_samples(groups)
    rows_ = [sample.replace(trajectory="b"), sample.replace(values=np.zeros(3))]
    extra = [np.full(3, 9.0), np.array([0.0, 2.0, 1.0])]
    assert advantages(assign_gae(rows_, groups, gamma=0.5, lam=1.0, extra=extra)) == [[0, 4.5, 5]]


def test_assign_gae_needs_values() -> None:
    groups = [group("g", trajectory("a", [turn("a/0", 1, 1)]))]
    with pytest.raises(RecordError, match="values of a sample of a: got none, expected 2"):
        assign_gae(to_samples(groups), groups, gamma=1.0, lam=1.0)


def tree() -> list[Group]:
    """Three leaves: all share turn 0, b and c share turn 1."""
    root, fork = turn("t/0", 2, 1), turn("t/1", 1, 2)
    a = trajectory("a", [root, turn("a/1", 1, 1, 3.0)])
    b = trajectory("b", [root, fork, turn("b/2", 1, 1, 6.0)])
    c = trajectory("c", [root, fork, turn("c/2", 1, 1)])
    return [group("g", a, b, c), group("h", trajectory("d", [turn("d/0", 1, 1, 1.0)]))]


def test_tree_credit_by_hand() -> None:
    """Leaves 3, 6 and 0: the root gets 3, the turn of b and c (6 + 0) / 2 = 3, the rest its own."""
    samples = assign(to_samples(tree()), tree(), "reward")
    assert trained_advantages(TREE_CREDIT["soft"](samples)) == [[3, 3], [6, 6, 6, 6], [0, 0, 0, 0], [1]]
    assert trained_advantages(TREE_CREDIT["hard"](samples)) == [[3, 3], [3, 3, 3, 6], [3, 3, 3, 0], [1]]


def test_tree_credit_of_advantages_that_differ_by_token() -> None:
    samples = assign(to_samples(tree()), tree(), "reward")
    b, c = samples[1], samples[2]  # both 3 + 3 + 2 tokens, the first 6 of them shared
    rows_ = [s.replace(advantages=np.arange(len(s), dtype=np.float32) * f) for s, f in ((b, 1), (c, 3))]
    expected = [[0, 2, 4, 6, 8, 10, 6, 7], [0, 2, 4, 6, 8, 10, 18, 21]]
    assert advantages(hard(rows_)) == expected


@given(played_groups())
@settings(max_examples=30, deadline=None)
def test_without_a_fork_hard_changes_nothing(groups: list[Group]) -> None:
    samples = assign(to_samples(groups), groups, "mean_std")
    assert advantages(hard(samples)) == advantages(samples)


def test_the_same_turn_in_another_group_is_another_turn() -> None:
    root = turn("t/0", 1, 1)
    groups = [
        group("g", trajectory("a", [root, turn("a/1", 1, 1, 2.0)])),
        group("h", trajectory("b", [root, turn("b/1", 1, 1, 4.0)])),
    ]
    samples = assign(to_samples(groups), groups, "reward")
    assert trained_advantages(hard(samples)) == [[2, 2], [4, 4]]


def test_hard_refuses_what_does_not_fit() -> None:
    samples = assign(to_samples(tree()), tree(), "reward")
    assert hard([]) == []
    with pytest.raises(RecordError, match="advantages of a sample of a: got none"):
        hard(to_samples(tree()))
    shorter = samples[0].replace(turn_spans=((0, 2), (2, 5)))
    with pytest.raises(RecordError, match=r"turn 't/0' of group 'g': got copies of \[2, 3\] tokens"):
        hard([shorter, *samples[1:]])


def test_scale_by_entropy_is_over_the_whole_batch() -> None:
    """The same tokens in one row or in three: mean and std are those of the batch."""
    together = [group("g", trajectory("a", [turn(f"a/{i}", 1, 2, 1.0) for i in range(3)]))]
    apart = [group("g", *(trajectory(f"a{i}", [turn(f"a/{i}", 1, 2, 3.0)]) for i in range(3)))]
    entropies = np.array([np.nan, 1.0, 4.0, np.nan, 0.5, 2.0, np.nan, 0.0, 3.0])

    def scaled(groups: list[Group]) -> list[list[float]]:
        rows_ = assign(to_samples(groups), groups, "reward")
        parts = np.split(entropies, len(rows_))
        return advantages(
            scale_by_entropy([r.replace(entropies=e) for r, e in zip(rows_, parts, strict=True)], 0.2)
        )

    (one,), three = scaled(together), scaled(apart)
    assert sum(three, []) == one  # noqa: RUF017
    own = entropies[np.isfinite(entropies)]
    expected = 3 * (1 + 0.2 * (own - own.mean()) / own.std(ddof=1))
    assert np.array(one)[np.isfinite(entropies)] == pytest.approx(expected, rel=1e-6)
    assert scale_by_entropy([], 0.2) == []


def test_tokens_that_nobody_sampled_have_no_entropy_to_compare() -> None:
    """An expert's tokens are trained and have none: they keep their advantage, the others are compared."""
    thought = Segment("policy", (1, 1), logprobs=(-1.0,) * 2, versions=(0, 0), entropies=(1.0, 3.0))
    given = Segment("expert", (1, 1), logprobs=(-1.0,) * 2, versions=(0, 0))
    played = Turn("a/0", (Segment("environment", (0,)), thought, given), rewards={"score": 2.0}, fresh=True)
    groups = [group("g", Trajectory("a", (played,), "terminated", rewards={"score": 2.0}))]
    (sample,) = with_advantages(
        recipe("reinforce_pp", whiten=None, entropy_advantage=0.5), to_samples(groups), groups, Signals(), {}
    )
    z = 1 / math.sqrt(2)
    (found,) = trained_advantages([sample])
    assert found == pytest.approx([2 - z, 2 + z, 2, 2], rel=1e-6)

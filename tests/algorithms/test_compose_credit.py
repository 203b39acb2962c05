"""The advantages that a recipe gives a batch: of trajectories, turns and trees, whitened; their limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.by_hand import (
    advantages,
    assigned,
    batch,
    failed,
    group,
    of_trained,
    one_turn,
    recipe,
    trained_advantages,
    trajectory,
    turn,
)

from silva.algorithms.compose import next_state, with_advantages
from silva.errors import CapabilityError
from silva.rollouts.samples import to_samples
from silva.types import Group, Signals


def test_one_advantage_a_trajectory_by_hand() -> None:
    """Rewards 3, 1, 2: mean 2, standard deviation 1 (+ 1e-4). Every token has it, the prompt's too."""
    given = group("g", one_turn("a", 2, 3), one_turn("b", 1, 1), failed("c"), one_turn("d", 3, 2))
    a = 1 / 1.0001
    found = with_advantages(recipe("grpo"), to_samples([given]), [given], Signals(), {})
    assert advantages(found) == [pytest.approx([value] * n) for value, n in ((a, 4), (-a, 3), (0, 5))]
    assert all(s.old_logprobs is s.values is s.returns is None for s in found)


def test_advantages_over_the_batch_by_hand() -> None:
    """Over each group 1, -1 and 2, -2; over both: mean 4."""
    groups = batch(2, 0, key="g"), batch(9, 5, key="h")
    assert assigned(recipe("reinforce"), *groups) == [[1], [-1], [2], [-2]]
    assert assigned(recipe("gpg"), *groups) == [[-2], [-4], [5], [1]]


def test_credit_by_turn_by_hand() -> None:
    """gamma 0.5. Returns 1 + 0.5 * 4 = 3 and 4; 1 and 0: means 2 and 2."""
    a = trajectory("a", [turn("a/0", 1, 1, 1.0), turn("a/1", 1, 2, 4.0)])
    b = trajectory("b", [turn("b/0", 1, 1, 1.0), turn("b/1", 1, 1)])
    made = recipe("reinforce", credit="turn", gamma=0.5)
    assert assigned(made, group("g", a, b)) == [[1, 2, 2], [-1, -2]]


def test_a_running_baseline_by_hand() -> None:
    """From 0.5: 1 - 0.5, then 0.525: 0 - 0.525, then 0.49875. The other world begins at 0."""
    groups = (
        batch(1, 0, key="g"),
        dataclasses.replace(batch(2, key="h"), task=group("h", environment="shop").task),
    )
    made = recipe("reinforce", advantage="running", drop_zero_variance=False)
    state = {"baseline/maze": 0.5, "temperature": 0.7}
    found = assigned(made, *groups, **state)
    assert found == [[pytest.approx(0.5)], [pytest.approx(-0.525)], [2]]
    after = next_state(made, state, groups, {}, 1.0)
    assert after == {
        "baseline/maze": pytest.approx(0.49875),
        "baseline/shop": pytest.approx(0.1),
        "temperature": 0.7,
    }


def branches() -> Group:
    """Two leaves with the first turn in common, of rewards 3 and 1, and a third trajectory of reward 2."""
    stem = turn("stem", 2, 2)
    leaves = (trajectory(id, [stem, turn(f"{id}/1", 1, 1, r)]) for id, r in (("a", 3), ("b", 1)))
    return group("g", *leaves, one_turn("c", 1, 2))


def test_a_shared_turn_gets_each_leaf_s_advantage_or_their_mean() -> None:
    """Advantages 1, -1, 0 (over 1.0001): the stem has both, or 0."""
    a = pytest.approx(1 / 1.0001)
    b = pytest.approx(-1 / 1.0001)
    assert assigned(recipe("arpo"), branches()) == [[a, a, a], [b, b, b], [0]]
    assert assigned(recipe("arpo", tree_credit="hard"), branches()) == [[0, 0, a], [0, 0, b], [0]]


def test_whitening_comes_before_clipping() -> None:
    """Mean 1, variance (1 + 1 + 1 + 9) / 3 = 4; the other way round the last would be 1.5."""
    made = recipe("reinforce_pp", advantage_clip=(-1, 1))
    assert assigned(made, batch(0, 0, 0, 4)) == [[pytest.approx(a)] for a in (-0.5, -0.5, -0.5, 1)]


def test_whitening_by_tokens_or_by_trajectories() -> None:
    """Reward 0 on 3 tokens and 4 on 1. By tokens: mean 1, std 2. By trajectories: mean 2, variance 8."""
    given = group("g", one_turn("a", 3, 0), one_turn("b", 1, 4))
    for over, low, high in (("tokens", -0.5, 1.5), ("trajectories", -(0.5**0.5), 0.5**0.5)):
        found = assigned(recipe("reinforce_pp", whiten=over), given)
        assert found == [[pytest.approx(low)] * 3, [pytest.approx(high)]]


def test_shared_turns_are_averaged_before_the_batch_is_whitened() -> None:
    """Hard: 2, 2, 3; 2, 2, 1; 2. Mean 2, variance (1 + 1) / 6."""
    made = recipe("reinforce_pp", tree_credit="hard")
    a = 3**0.5
    expected = [[0, 0, a], [0, 0, -a], [0]]
    assert assigned(made, branches()) == [pytest.approx(row, abs=1e-6) for row in expected]


def test_uncertain_tokens_count_more_and_then_the_batch_is_whitened() -> None:
    """Entropies 1 and 3: z = -+1 / sqrt 2, A = 1 -+ 0.2 z; whitened: -+1 / sqrt 2 again."""
    given = group("g", one_turn("a", 2, 1.0))
    (sample,) = to_samples([given])
    sample = sample.replace(entropies=of_trained([sample], (1.0, 3.0))[0])
    z = 1 / math.sqrt(2)
    for whiten, expected in ((None, [1 - 0.2 * z, 1 + 0.2 * z]), ("tokens", [-z, z])):
        made = recipe("reinforce_pp", entropy_advantage=0.2, whiten=whiten)
        (found,) = trained_advantages(with_advantages(made, [sample], [given], Signals(), {}))
        assert found == pytest.approx(expected, rel=1e-6)


def test_an_engine_without_entropies_is_refused_where_they_count() -> None:
    given = batch(1, 0)
    samples = [s.replace(entropies=None) for s in to_samples([given])]
    with pytest.raises(CapabilityError, match=r"algorithm\.entropy_advantage: got samples without entropies"):
        with_advantages(recipe("aepo"), samples, [given], Signals(), {})


# Limits by construction.


eighths = st.integers(-16, 16).map(lambda n: n / 8)
played_turns = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), eighths), min_size=1, max_size=3)
played_groups = st.lists(st.lists(played_turns, min_size=1, max_size=4), min_size=1, max_size=3)


def build(shapes: list[list[list[tuple[int, int, float]]]], added: Sequence[float] = ()) -> list[Group]:
    """Groups of trajectories of turns (shown, said, reward); `added` goes to the last turns of a group."""
    groups = []
    for g, trajectories in enumerate(shapes):
        more = added[g] if added else 0.0
        groups.append(group(f"g{g}", *(
            trajectory(f"{g}/{i}", [turn(f"{g}/{i}/{k}", shown, said, reward + more * (k == len(turns) - 1))
                                    for k, (shown, said, reward) in enumerate(turns)])
            for i, turns in enumerate(trajectories))))  # fmt: skip
    return groups


@given(played_groups, st.sampled_from(["soft", "hard"]))
@settings(max_examples=50, deadline=None)
def test_arpo_without_a_fork_is_grpo(shapes: Any, tree_credit: str) -> None:
    groups = build(shapes)
    assert assigned(recipe("arpo", tree_credit=tree_credit), *groups) == assigned(recipe("grpo"), *groups)


@given(st.integers(1, 6), eighths, st.data())
@settings(max_examples=50, deadline=None)
def test_bi_level_gae_of_one_turn_is_gae(said: int, reward: float, data: st.DataObject) -> None:
    """Whatever the discounts of turns: there is none to come."""
    rates = [data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])) for _ in range(4)]
    given = group("g", one_turn("a", said, reward), one_turn("b", said, 0))
    samples = to_samples([given])
    values = data.draw(st.lists(eighths, min_size=said, max_size=said))
    signals = Signals(values=of_trained(samples, values, values))
    of_tokens = {"gamma": rates[0], "lam": rates[1]}
    bi_level = recipe("bi_level_gae", **of_tokens, turn_gamma=rates[2], turn_lam=rates[3])
    for made, other in zip(
        with_advantages(bi_level, samples, [given], signals, {}),
        with_advantages(recipe("ppo", **of_tokens), samples, [given], signals, {}),
        strict=True,
    ):
        np.testing.assert_array_equal(made.advantages, other.advantages)
        np.testing.assert_array_equal(made.returns, other.returns)


@given(played_groups, st.data())
@settings(max_examples=50, deadline=None)
def test_what_all_of_a_group_get_changes_nothing(shapes: Any, data: st.DataObject) -> None:
    added = data.draw(st.lists(eighths, min_size=len(shapes), max_size=len(shapes)))
    for name in ("reinforce", "grpo", "rloo"):
        before, after = (assigned(recipe(name), *build(shapes, more)) for more in ((), added))
        for row, other in zip(before, after, strict=True):
            np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-9)


@given(played_groups)
@settings(max_examples=50, deadline=None)
def test_reinforce_pp_has_mean_0_and_std_1_over_tokens(shapes: Any) -> None:
    """But for the 1e-8 that is added to the variance of the rewards, each as often as it has tokens."""
    groups = build(shapes)
    joined = np.concatenate(assigned(recipe("reinforce_pp"), *groups))
    everyone = [t for g in groups for t in g.trajectories]
    rewards = np.concatenate([np.full(t.tokens("policy"), t.raw_reward) for t in everyone])
    variance = rewards.var(ddof=1) if len(rewards) > 1 else 0.0
    assert joined.mean() == pytest.approx(0, abs=1e-6)
    if variance:
        assert joined.std(ddof=1) == pytest.approx((variance / (variance + 1e-8)) ** 0.5, rel=1e-6)

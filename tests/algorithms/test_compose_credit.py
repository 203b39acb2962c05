"""The advantages that a recipe gives a batch: of trajectories, turns and trees, whitened; their limits."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.algorithms.by_hand import (
    assigned,
    batch,
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


def test_whitening_comes_before_clipping() -> None:
    """Mean 1, variance (1 + 1 + 1 + 9) / 3 = 4; the other way round the last would be 1.5."""
    made = recipe("reinforce_pp", advantage_clip=(-1, 1))
    assert assigned(made, batch(0, 0, 0, 4)) == [[pytest.approx(a)] for a in (-0.5, -0.5, -0.5, 1)]


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

"""Weighted sums: numbers by hand, and that no partial credit reaches a solution."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.attempts import grade

from silva.config.load import load
from silva.errors import ConfigError, RewardError
from silva.protocols import Score
from silva.registries import REGISTRIES
from silva.rewards.exact_match import ExactMatch
from silva.rewards.token_f1 import TokenF1
from silva.rewards.weighted import Weighted, WeightedPart, WeightedReward


class Fixed:
    def __init__(self, score: Score) -> None:
        self._score = score

    async def score(self, attempt) -> Score:
        return self._score


def total(scores: list[Score], weights: list[float], *, decides: int | None = None, partial=0.9) -> Score:
    parts = tuple(
        WeightedPart(reward=ExactMatch(), weight=weight, name=str(i), decides=i == decides)
        for i, weight in enumerate(weights)
    )
    return grade(WeightedReward(Weighted(parts=parts, partial=partial), list(map(Fixed, scores))), "x")


def test_numbers_by_hand() -> None:
    right, wrong, half = Score(1, True), Score(0, False), Score(0.5, False, {"words": 3.0})
    metrics = {"0": 1.0, "1": 0.5, "1.words": 3.0}
    assert total([right, half], [0.8, 0.2]) == Score(0.8 + 0.1, True, metrics)
    assert total([wrong, half], [0.8, 0.2]).value == pytest.approx(0.1)
    assert total([half, right], [0.8, 0.2]).value == pytest.approx(0.4 + 0.2)  # at most 0.72
    assert total([half, right], [0.8, 1.0]) == Score(0.9 * 0.8, False, {"0": 0.5, "0.words": 3.0, "1": 1.0})
    assert total([half, right], [0.8, 0.2], decides=1) == Score(
        0.4 + 0.2, True, {"0": 0.5, "0.words": 3.0, "1": 1.0}
    )
    assert total([half, wrong], [3.0, 0.2], decides=1, partial=0.5).value == pytest.approx(0.1)


def test_a_solution_counts_in_full() -> None:
    """A deciding F1 of 0.6 that is enough must not be worth less than a format without an answer."""
    assert total([Score(0.6, True), Score(0, False)], [1.0, 1.0]).value == 1.0


def test_real_parts() -> None:
    settings = Weighted(
        parts=(WeightedPart(reward=ExactMatch(), weight=0.7), WeightedPart(reward=TokenF1(), weight=0.3))
    )
    reward = settings.build()
    assert grade(reward, "the Eiffel Tower", "Eiffel Tower").value == pytest.approx(0.3)
    assert grade(reward, "Eiffel Tower", "Eiffel Tower").value == pytest.approx(1.0)
    score = grade(reward, "Tower", "Eiffel Tower")  # F1 = 2 * 1 / (1 + 2)
    assert (score.value, score.solved) == (pytest.approx(0.2), False)
    assert score.metrics["token_f1.f1"] == pytest.approx(2 / 3)


unit = st.floats(0, 1)
scores = st.lists(st.tuples(unit, st.floats(0.01, 10)), min_size=2, max_size=4)


@pytest.mark.slow
@given(solved=scores, failed=scores, partial=st.floats(0, 0.99), weight=st.floats(0.01, 10))
def test_no_partial_credit_reaches_a_solution(solved, failed, partial, weight) -> None:
    """Any solution, with the same weights and any values of the other parts, is worth more."""
    weights = [weight, *(each for _, each in failed[1:])]
    values = [value for value, _ in failed]
    others = [solved[i][0] if i < len(solved) else 0.0 for i in range(1, len(values))]
    best_failure = total([Score(v, i > 0) for i, v in enumerate(values)], weights, partial=partial)
    solution = total(
        [Score(solved[0][0], True), *(Score(v, False) for v in others)], weights, partial=partial
    )
    assert solution.solved and not best_failure.solved
    assert best_failure.value < solution.value


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_values_outside_0_and_1_are_errors(value: float) -> None:
    with pytest.raises(RewardError, match=r"part 1: got .*, expected a value from 0 to 1"):
        total([Score(1, True), Score(value, False)], [1, 1])


def test_from_a_file_with_short_forms(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def brief(reply):\n    return float(len(reply) < 5)\n")
    (tmp_path / "a.toml").write_text(
        """
        [[environments]]
        type = "dataset"
        rows = [{question = "a?", answer = "b"}]
        [environments.reward]
        type = "weighted"
        parts = [{reward = "exact_match"}, {reward = "mine.py:brief", weight = 0.25}]
        """
    )
    (environment,) = load([f"@{tmp_path / 'a.toml'}"], REGISTRIES, env={}).config.environments
    assert [part.label for part in environment.reward.parts] == ["exact_match", "brief"]
    reward = environment.reward.build()
    assert [grade(reward, reply, "b").value for reply in ("b", "c", "cccccc")] == [1.25, 0.25, 0.0]
    nested = tmp_path / "nested.toml"
    nested.write_text((tmp_path / "a.toml").read_text().replace('"exact_match"', '"weighted"'))
    with pytest.raises(ConfigError, match="unknown"):
        load([f"@{nested}"], REGISTRIES, env={})

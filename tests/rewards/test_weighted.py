"""Weighted sums of rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.rewards.attempts import grade

from silva.config.load import load
from silva.errors import RewardError
from silva.protocols import Attempt, Reward, Score
from silva.registries import REGISTRIES
from silva.rewards.settings import RewardSettings
from silva.rewards.weighted import Part, Weighted


class Given(RewardSettings):
    """Gives what the task says."""

    key: str

    def build(self) -> Reward:
        return _GivenReward(self.key)


class _GivenReward:
    def __init__(self, key: str) -> None:
        self.key = key

    async def score(self, attempt: Attempt) -> Score:
        value, solved = attempt.data[self.key]
        return Score(value, solved, {"seen": 1.0})


def part(key: str, weight: float, required: bool = True) -> Part:
    settings: Any = Given(key=key, type=key)
    return Part.model_construct(reward=settings, weight=weight, required=required, name=key)


def total(parts: tuple[Part, ...], **scores: tuple[float, bool]) -> Score:
    return grade(Weighted.model_construct(parts=parts).build(), "x", **scores)


FORM = (part("format", 0.2, required=False), part("right", 0.8))


@pytest.mark.parametrize(
    ("form", "right", "value", "solved"),
    [
        ((1.0, True), (1.0, True), 1.0, True),
        ((0.0, False), (1.0, True), 0.8, True),
        ((1.0, True), (0.0, False), 0.2, False),
        ((1.0, True), (0.5, False), 0.6, False),
        ((1.0, True), (0.99, False), 0.72, False),  # 0.992, and at most 0.9 * 0.8
        ((-3.0, False), (7.0, False), 0.72, False),  # cut to 0 and 1
        ((0.0, False), (0.9, True), 0.8, True),  # solved by 0.9: counts in full
    ],
)
def test_numbers_by_hand(form, right, value: float, solved: bool) -> None:
    score = total(FORM, format=form, right=right)
    assert score.value == pytest.approx(value, abs=1e-12)
    assert score.solved is solved
    assert score.metrics == {
        "format": form[0], "format_solved": form[1], "format_seen": 1,
        "right": right[0], "right_solved": right[1], "right_seen": 1,
    }  # fmt: skip


def test_a_heavy_bonus_does_not_make_up_for_the_solution() -> None:
    parts = (part("bonus", 10.0, required=False), part("right", 1.0))
    assert total(parts, bonus=(1.0, True), right=(0.0, False)).value == 0.9
    assert total(parts, bonus=(0.0, False), right=(1.0, True)).value == 1.0


VALUES = st.tuples(st.floats(-1e6, 1e6), st.booleans())


@given(
    weights=st.lists(st.tuples(st.floats(1e-3, 1e3), st.booleans()), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_solved_attempt_is_worth_more_than_every_other_one(weights, data) -> None:
    weights[0] = (weights[0][0], True)
    parts = tuple(part(f"p{i}", weight, required) for i, (weight, required) in enumerate(weights))
    scores = [total(parts, **{p.name: data.draw(VALUES) for p in parts}) for _ in range(4)]
    solved = [score.value for score in scores if score.solved]
    failed = [score.value for score in scores if not score.solved]
    assert not solved or not failed or max(failed) < min(solved)


def test_an_attempt_that_a_part_cannot_grade_has_no_result() -> None:
    class Broken(Given):
        def build(self) -> Reward:
            return self  # type: ignore[return-value]

        async def score(self, attempt: Attempt) -> Score:
            raise RewardError("the judge is away")

    broken = Part.model_construct(reward=Broken(key="x", type="x"), weight=1.0, required=False, name="x")
    with pytest.raises(RewardError, match="away"):
        total((broken, part("right", 1.0)), right=(1.0, True))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"reward": {"type": "letter"}, "required": False}], "expected a part with required = true"),
        ([{"reward": {"type": "letter"}}] * 2, "two parts are called letter; give one a `name`"),
        ([{"reward": {"type": "letter"}, "weight": 0.0}], "greater than 0"),
        ([], "at least 1 item"),
        ([{"reward": {"type": "weighted", "parts": []}}], "does not match any of the expected tags"),
    ],
)
def test_sums_without_a_meaning_are_refused(parts, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Weighted.model_validate_json(json.dumps({"parts": parts}))


def test_parts_in_a_configuration_file(tmp_path: Path) -> None:
    """Names are short for tables, and files are looked for beside the configuration."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/format.py").write_text("def tidy(reply):\n    return reply.islower()\n")
    (tmp_path / "own/run.toml").write_text(
        '[[environments]]\ntype = "dataset"\nrows = [{prompt = "q", answer = "yes"}]\n'
        '[environments.reward]\ntype = "weighted"\nparts = [\n'
        '  {reward = "exact_match", weight = 0.8},\n'
        '  {reward = "format.py:tidy", weight = 0.2, required = false},\n]\n'
    )
    reward = load(["@own/run.toml"], REGISTRIES, env={}, cwd=tmp_path).config.environments[0].reward
    built = reward.build()
    assert grade(built, "yes", "yes").value == pytest.approx(1.0)
    score = grade(built, "Yes", "yes")
    assert (score.value, score.metrics["tidy"]) == (0.8, 0.0)

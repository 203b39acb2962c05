from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from pydantic import ValidationError
from tests.algorithms.by_hand import rewarded

from silva.algorithms.filters import (
    SELECTIONS,
    DifficultyPools,
    VarianceFilter,
    difficulty,
    drop_reasons,
    out_of_range,
    reward_std,
    zero_variance,
)
from silva.types import Group


@pytest.mark.parametrize(
    ("rewards", "shaped", "failures", "expected"),
    [
        ([1.0, 1.0, 1.0], None, None, True),
        ([1.0, 0.0, 1.0], None, None, False),
        ([0.1 + 0.2, 0.3], None, None, True),  # equal but for the last bit
        ([0.0, 0.0], [0.0, -0.5], None, True),  # only the penalty differs: raw rewards decide
        ([1.0, 0.5], [0.0, 0.5], None, False),  # equal only after shaping
        ([1.0, 0.0, 1.0], None, [None, "redo", None], True),  # the failure's 0 is no result
        ([1.0, 0.0], None, [None, "mask"], True),  # one is left: nothing to compare
        ([1.0], None, None, True),
        ([1.0, float("nan")], None, None, False),  # goes on to where it is reported
    ],
)
def test_zero_variance(rewards: list, shaped: list | None, failures: list | None, expected: bool) -> None:
    assert zero_variance(rewarded("a", rewards, shaped, failures)) is expected


@pytest.mark.parametrize(
    ("rewards", "shaped", "failures", "expected"),
    [
        ([2.0, 2.0, 5.0], None, None, math.sqrt(3)),  # deviations -1, -1, 2: (1 + 1 + 4) / 2
        ([1.0, 0.0, 1.0, 0.0], None, None, math.sqrt(1 / 3)),  # 4 * 0.25 / 3
        ([1.0, 0.0], [0.0, 9.0], None, math.sqrt(0.5)),  # penalties do not count
        ([1.0, 9.0, 3.0], None, [None, "mask", None], math.sqrt(2)),  # of 1 and 3
        ([0.1 + 0.2, 0.3], None, None, 0.0),
        ([7.0], None, None, 0.0),
    ],
)
def test_reward_std_by_hand(
    rewards: list, shaped: list | None, failures: list | None, expected: float
) -> None:
    assert reward_std(rewarded("a", rewards, shaped, failures)) == pytest.approx(expected, rel=1e-15)


def test_reward_std_is_numpy_s_and_blind_to_order() -> None:
    rewards = np.random.default_rng(0).normal(size=7).tolist()
    std = reward_std(rewarded("a", rewards))
    assert std == pytest.approx(np.std(rewards, ddof=1), rel=1e-14)
    assert {reward_std(rewarded("a", list(p))) for p in itertools.permutations(rewards[:5])} == {
        reward_std(rewarded("a", rewards[:5]))
    }


# A group of two rewards 0 and d has std d / sqrt(2): the stds stand as 4 : 1 : 0 : 3 : 1 : 1, sum 10.
SPREADS = [4.0, 1.0, 0.0, 3.0, 1.0, 1.0]


def spread(differences: list[float]) -> list[Group]:
    return [rewarded(f"g{i}", [0.0, d]) for i, d in enumerate(differences)]


def kept(reasons: list) -> list[int]:
    return [index for index, reason in enumerate(reasons) if reason is None]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("top_fraction", 0.25, [0]),  # 1.5 groups, rounded down
        ("top_fraction", 0.5, [0, 1, 3]),  # of the three ones the first
        ("top_fraction", 0.01, [0]),  # at least one
        ("top_fraction", 1.0, [0, 1, 2, 3, 4, 5]),  # off
        ("top_k", 1, [0]),
        ("top_k", 4, [0, 1, 3, 4]),
        ("top_k", 99, [0, 1, 2, 3, 4, 5]),
        ("min_p", 1.0, [0]),
        ("min_p", 0.75, [0, 3]),  # 3 >= 0.75 * 4
        ("min_p", 0.26, [0, 3]),  # 1 < 1.04
        ("min_p", 0.25, [0, 1, 3, 4, 5]),
        ("min_p", 1e-6, [0, 1, 3, 4, 5]),  # no zeros
        ("nucleus", 0.4, [0]),  # 4 >= 4
        ("nucleus", 0.41, [0, 3]),  # 4 < 4.1
        ("nucleus", 0.7, [0, 3]),  # 7 >= 7
        ("nucleus", 0.8, [0, 1, 3]),  # 8 >= 8
        ("nucleus", 0.9, [0, 1, 3, 4]),  # 9 >= 9
        ("nucleus", 1.0, [0, 1, 3, 4, 5]),  # no zeros
    ],
)
def test_drop_reasons_by_hand(kind: str, value: float, expected: list[int]) -> None:
    reasons = drop_reasons(spread(SPREADS), VarianceFilter(keep=kind, value=value))
    assert kept(reasons) == expected
    assert [r for i, r in enumerate(reasons) if i not in expected] == [
        "zero_variance" if d == 0 else "low_variance" for i, d in enumerate(SPREADS) if i not in expected
    ]


@pytest.mark.parametrize(
    ("kind", "expected"), [("top_fraction", [0]), ("top_k", [0]), ("min_p", []), ("nucleus", [])]
)
def test_where_no_group_varies(kind: str, expected: list[int]) -> None:
    settings_ = VarianceFilter(keep=kind, value=1 if kind == "top_k" else 0.5)
    reasons = drop_reasons(spread([0.0, 0.0]), settings_)
    assert kept(reasons) == expected
    assert set(reasons) - {None} == {"zero_variance"}


@pytest.mark.parametrize("kind", SELECTIONS)
def test_failed_groups_are_none_of_the_groups(kind: str) -> None:
    """Half of the two others is one; with the failed ones it would be two."""
    failed = [rewarded(f"f{i}", [0.0, 1.0], failures=["redo", "mask"]) for i in range(2)]
    low, high = spread([1.0, 2.0])
    settings_ = VarianceFilter(keep=kind, value=1 if kind == "top_k" else 0.51)
    reasons = drop_reasons([failed[0], low, failed[1], high], settings_)
    assert reasons == ["failed", "low_variance", "failed", None]
    assert drop_reasons(failed, settings_) == ["failed", "failed"]
    assert drop_reasons([], settings_) == []


def test_shares_do_not_lose_a_group_to_rounding() -> None:
    """0.29 * 100 is 28.999999999999996; nine times 0.3 falls short of 0.9 * 3; 0.1 * 3 exceeds 0.3."""

    def chosen(differences: list[float], keep: str, value: float) -> list[int]:
        return kept(drop_reasons(spread(differences), VarianceFilter(keep=keep, value=value)))

    assert len(chosen([1.0] * 100, "top_fraction", 0.29)) == 29
    assert chosen([0.3 * math.sqrt(2)] * 10, "nucleus", 0.9) == list(range(9))
    assert chosen([3.0, 0.3], "min_p", 0.1) == [0, 1]


@pytest.mark.parametrize(
    ("keep", "value", "message"),
    [
        ("std", 1, "'top_fraction', 'top_k', 'min_p' or 'nucleus'"),
        ("top_k", 2.5, "got 2.5 with top_k, expected a whole number"),
        ("top_k", 0.5, "got 0.5 with top_k, expected a whole number"),
        ("min_p", 1.01, "got 1.01 with min_p, expected at most 1"),
        *((keep, 0, "greater than 0") for keep in SELECTIONS),
        *((keep, value, "finite number") for keep in SELECTIONS for value in (math.inf, math.nan)),
    ],
)
def test_a_filter_out_of_range_is_refused(keep: str, value: float, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VarianceFilter(keep=keep, value=value)


@pytest.mark.parametrize(
    ("rewards", "shaped", "failures", "expected"),
    [
        ([0.0, 0.0, 0.0, 1.0], None, None, None),  # the mean is 0.25, a bound
        ([1.0, 1.0, 1.0, 0.0], None, None, None),  # 0.75, the other one
        ([0.0, 0.0, 0.0, 0.0, 1.0], None, None, "too_hard"),  # 0.2
        ([1.0, 1.0, 1.0, 1.0, 0.0], None, None, "too_easy"),  # 0.8
        ([0.0, 1.0], [9.0, 9.0], None, None),  # raw rewards decide
        ([1.0, 0.0, 0.0], None, [None, "redo", "mask"], "too_easy"),  # of one result, 1
        ([7 * 0.05, 17 * 0.05, 17 * 0.05, 19 * 0.05], None, None, None),  # 0.75 but for the last bit
        ([0.25 - 1e-12], None, None, None),
    ],
)
def test_out_of_range(
    rewards: list, shaped: list | None, failures: list | None, expected: str | None
) -> None:
    assert out_of_range(rewarded("a", rewards, shaped, failures), 0.25, 0.75) == expected


def test_difficulty() -> None:
    middle, usual = DifficultyPools(easy_threshold=0.7, hard_threshold=0.3), DifficultyPools()
    pools = [difficulty(middle, n / 10) for n in range(11)]
    assert pools == ["hard"] * 4 + ["normal"] * 3 + ["easy"] * 4  # 0 to 0.3, 0.4 to 0.6, 0.7 to 1
    assert [difficulty(usual, n / 8) for n in (0, 1, 7, 8)] == ["hard", "normal", "normal", "easy"]
    assert difficulty(middle, 0.1 * 3) == "hard"  # 0.30000000000000004
    assert difficulty(middle, 0.7 - 1e-12) == "easy"
    with pytest.raises(ValidationError, match=r"got 0\.5 with hard_threshold = 0\.5, expected more"):
        DifficultyPools(easy_threshold=0.5, hard_threshold=0.5)

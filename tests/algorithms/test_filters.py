from __future__ import annotations

from collections.abc import Callable

import pytest

from silva.algorithms.filters import zero_variance
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
def test_zero_variance(
    make_group: Callable[..., Group],
    rewards: list,
    shaped: list | None,
    failures: list | None,
    expected: bool,
) -> None:
    assert zero_variance(make_group("a", rewards, shaped, failures)) is expected

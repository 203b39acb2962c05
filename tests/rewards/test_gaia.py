"""GAIA's comparison, case by case, as its scorer answers them."""

import pytest
from tests.rewards.attempts import grade

from silva.rewards.exact_match import ExactMatch
from silva.rewards.gaia import same


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("34689", "34689", True), ("$1,234.50", "1234.5", True), ("17 %", "17", True), ("17.0", "17", True),
        ("17 thousand", "17", False), ("", "17", False), ("1.2.3", "1", False), ("inf", "17", False),
        ("Right", "right", True), ("  St. Petersburg", "Saint Petersburg", False), ("e-x", "e x", True),
        ("sea gull", "seagull", True), ("the seagull", "seagull", False), ("no", "yes", False),
        ("b, e", "b,e", True), ("e, b", "b, e", False), ("b", "b, e", False), ("b; e", "b, e", True),
        ("132, $133.0", "132, 133", True), ("132, 134", "132, 133", False), ("St. A, a", "St A, a", False),
        ("...", "?!", False), ("a", "?!", False), ("NaN", "nan", True),
    ],
)  # fmt: skip
def test_the_reference_decides_how_answers_are_compared(answer: str, reference: str, right: bool) -> None:
    assert same(answer, reference) is right


def test_it_is_a_rule_of_exact_match() -> None:
    reward = ExactMatch(rules="gaia").build()
    assert grade(reward, "So it is\nFINAL ANSWER: $1,000", "1000").solved
    assert not grade(reward, "FINAL ANSWER: 1001", "1000").solved

"""Multiple choice: which letter an answer names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.attempts import grade

from silva.protocols import Score
from silva.rewards.letter import Letter, named_letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("**B**", "B"), ("[b]", "B"), ("\\text{B}", "B"),
        ("\\textbf{(B)}", "B"), ("B. Paris", "B"), ("B: a river", "B"), ("B. A river", "B"),
        ("It is B", "B"),
        ("I think it is B.", "B"), ("option B", "B"), ("B, because of the law", "B"), ("B and B again", "B"),
        ("D. Vitamin C", "D"), ("(D) Plan B from outer space", "D"), ("It is B, not A", "B"),
        ("B (not A or C)", "B"), ("B is right; A, C and D are wrong", "B"), ("A is wrong; B is right.", "B"),
        # None, or more than one.
        ("D. Vitamin C or A", None), ("D. Vitamin, C", None), ("B. Paris C. Rome", None),
        ("A is wrong", None), ("B. Paris (A)", None), ("It is not B, not A", None), ("B, A is wrong", None),
        ("A or B, not C", None),
        ("A B C D", None), ("A, B", None), ("A or B", None), ("B or A", None), ("A/B", None),
        ("B and A", None), ("either A or else B", None), ("I or B", None), ("ABCD", None), ("", None),
        ("Paris", None), ("2", None), ("not B", None), ("It isn't B", None),
        ("all but B, never B", None),
        ("а", None), ("В", None), ("Ｂ", None), ("Ⓑ", None),  # Cyrillic, full width, circled
    ],
)  # fmt: skip
def test_the_letter_of_an_answer(answer: str, letter: str | None) -> None:
    assert named_letter(answer) == letter


def test_scores() -> None:
    reward = Letter().build()
    assert grade(reward, "<think>A? C?</think><answer>B</answer>", "B") == Score(1.0, True, {"answered": 1.0})
    assert grade(reward, "\\boxed{C}", "(b)") == Score(0.0, False, {"answered": 1.0})
    assert grade(reward, "A B C D", "B") == Score(0.0, False, {"answered": 0.0})
    assert grade(reward, "B <answer></answer>", "B") == Score(0.0, False, {"answered": 0.0})


@given(
    st.permutations("ABCD"),
    st.integers(2, 4),
    st.sampled_from([" ", ", ", " or ", "/", "\n", " and ", "; ", ") "]),
)
def test_several_letters_are_never_one(letters, count: int, joint: str) -> None:
    assert named_letter(joint.join(letters[:count])) is None

"""SQuAD's comparison: its rules, pairs with numbers worked by hand, and the two rewards that use it."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.rewards.attempts import grade

from silva.protocols import Score
from silva.rewards import squad
from silva.rewards.exact_match import ExactMatch
from silva.rewards.token_f1 import TokenF1

# (answer, reference, F1, exact): the first six are pairs of published tests of the metric.
PAIRS = [
    ("1976", "1976", 1.0, True),
    ("rock", "rock n roll", 2 * 1 * (1 / 3) / (1 + 1 / 3), False),
    ("   Rock    n  Roll.", "rock n roll", 1.0, True),
    ("2 時間 21 分", "2 時間", 2 / 3, False),
    ("The Cat", "cat", 1.0, True),
    ("cat!", "the cat", 1.0, True),
    ("Beyonce and Bruno Mars", "Beyonce", 2 * 1 / (4 + 1), False),
    ("Santa Clara, California", "Levi's Stadium in Santa Clara, California", 2 * 3 / (3 + 6), False),
    ("an apple a day", "apple day", 1.0, True),
    ("Denver Denver", "Denver", 2 / 3, False),
    ("day apple", "apple day", 1.0, False),
    ("King George's War", "king georges war", 1.0, True),
    ("well-known", "wellknown", 1.0, True),
    ("Rome", "Paris", 0.0, False),
    ("", "Paris", 0.0, False),
    ("the", "Paris", 0.0, False),
    ("...", "Paris", 0.0, False),
    # HotpotQA: yes, no and noanswer only equal themselves.
    ("yes", "yes", 1.0, True),
    ("yes it is", "yes", 0.0, False),
    ("no", "no way", 0.0, False),
    ("no", "yes", 0.0, False),
    # A reference without words.
    ("The", "The", 1.0, True),
    ("", "The", 0.0, False),
    ("a", "The", 0.0, False),
    # Numbers, where SQuAD would say yes.
    ("7", "-7", 0.0, False),
    ("−7", "-7", 1.0, True),
    ("15", "1.5", 0.0, False),
    ("1,500", "1500", 1.0, True),
    ("$1.5", "1.5", 1.0, True),
    ("3.14.", "3.14", 1.0, True),
    # The dress of LaTeX and of typography.
    ("\\text{Paris}", "Paris", 1.0, True),
    ("\\textbf{New York} City", "new york", 2 * 2 / (3 + 2), False),
    ("“Paris”", "Paris", 1.0, True),
    ("cafe\u0301", "café", 1.0, True),
]


@pytest.mark.parametrize(("answer", "reference", "f1", "exact"), PAIRS)
def test_pairs(answer: str, reference: str, f1: float, exact: bool) -> None:
    assert squad.f1(answer, reference) == pytest.approx(f1, abs=1e-12)
    assert squad.same(answer, reference) is exact


def official(answer: str, reference: str) -> tuple[float, bool]:
    """The paper's definition, step by step."""

    def read(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    given_, expected = read(answer), read(reference)
    common = sum((Counter(given_) & Counter(expected)).values())
    if not common:
        return 0.0, given_ == expected
    precision, recall = common / len(given_), common / len(expected)
    return 2 * precision * recall / (precision + recall), given_ == expected


WORDS = st.lists(
    st.sampled_from(["the", "A", "an", "Nile,", "river", "(big)", "it's", "1,000", "42", "cat.", "co-op"]),
    min_size=1, max_size=6,
).map(" ".join)  # fmt: skip


@given(WORDS, WORDS)
def test_it_is_the_definition(answer: str, reference: str) -> None:
    assume(squad.words(reference))
    f1, exact = official(answer, reference)
    assert squad.f1(answer, reference) == pytest.approx(f1, abs=1e-12)
    assert squad.same(answer, reference) is exact


def f1_of(reply: str, answer, **keys) -> Score:
    return grade(TokenF1(**keys).build(), reply, answer)


def test_token_f1_by_hand() -> None:
    near, some = pytest.approx(2 / 3), {"f1": pytest.approx(2 / 3), "exact_match": 0, "answered": 1}
    assert f1_of("<answer>the big Nile</answer>", ["Amazon", "Nile"]) == Score(near, False, some)
    assert f1_of("big Nile", "Nile", solved_at=0.6) == Score(near, True, some)
    assert f1_of("big Nile", "Nile", least=0.7) == Score(0.0, False, some)
    assert f1_of("big Nile", "Nile", least=0.7, solved_at=0.6) == Score(near, True, some)
    none = {"f1": 0, "exact_match": 0, "answered": 0}
    assert f1_of("<answer></answer>", "Nile") == Score(0, False, none)
    assert f1_of("Nile", "Nile") == Score(1, True, {"f1": 1, "exact_match": 1, "answered": 1})


@given(WORDS, WORDS, st.floats(0.1, 1), st.floats(0, 1))
def test_no_partial_credit_reaches_a_solution(
    answer: str, other: str, solved_at: float, least: float
) -> None:
    reward = TokenF1(solved_at=solved_at, least=least).build()
    scores = [grade(reward, f"<answer>{text}</answer>", "big Nile river") for text in (answer, other)]
    solved = [score.value for score in scores if score.solved]
    failed = [score.value for score in scores if not score.solved]
    assert not solved or not failed or max(failed) < min(solved)


@pytest.mark.parametrize(
    ("reply", "answer", "plain", "loose"),
    [
        ("Paris", "paris", 1, 1),
        ("The answer is **Paris**.", "Paris", 1, 1),
        ("<answer>the Nile</answer>", "Nile", 0, 1),
        ("\\boxed{5.0}", 5, 1, 0),
        ("1,000", "1000", 1, 1),
        ("Nile or Amazon", "Nile", 0, 0),
        ("-5", "5", 0, 0),
        ("C++", "C", 0, 1),
        ("Austen", ["Jane Austen", "Austen"], 1, 1),
        ("", "x", 0, 0),
    ],
)
def test_exact_match(reply: str, answer, plain: int, loose: int) -> None:
    for rules, value in (("plain", plain), ("squad", loose)):
        score = grade(ExactMatch(rules=rules).build(), reply, answer)
        assert (score.value, score.solved) == (float(value), bool(value))
        assert score.metrics == {"answered": float(bool(reply))}

"""Numbers and texts read from replies."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.rewards.text import (
    as_number,
    exact_match,
    extract_answer,
    integers,
    is_right,
    last_number,
    lone_number,
    normalise,
    similarity,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 10.", 10),
        ("3 + 7 = 10", 10),
        ("3 + 7 = 10\n\nThis simple sum", 10),
        ("It is 10. That is even.", 10),
        ("10. No, eleven", None),
        ("10\nWait, that was wrong.", None),
        ("12-5", None),
        ("14 - 7", None),
        ("1 * 7", None),
        ("Multiply your result by 7.", None),
        ("Subtract 5 from your result.", None),
        ("What is 3 + 7?", None),
        ("We add 3 and 7, so the answer is 10.", 10),
        ("3 and 7.\n10", 10),
        ("= -5", -5),
        ("−5", -5),
        ("1,234,567", 1234567),
        ("1,2", None),
        ("0.5", Fraction(1, 2)),
        ("it is 3.25 m", Fraction(13, 4)),
        ("**42**", 42),
        ("\\boxed{7}", 7),
        ("6/3", None),
        ("10km", 10),
        ("007", None),
        ("x2", None),
        ("none", None),
        (".5", Fraction(1, 2)),
        ("it is -.5", Fraction(-1, 2)),
        ("No.5", None),
        ("5%", None),
        ("5 %", None),
        ("1e5", None),
        ("2 or 1e-10", None),
        ("1.5E3", None),
        ("9" * 61, None),
        ("9" * 10_000, None),
    ],
)
def test_last_number(text: str, number: int | Fraction | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "given",
    ["10", "10.0", "It is 10.", "x = 10", "10 km", "10 apples", "$10", "**10**", "$10$", "\\boxed{10}",
     "= 10", "so the answer is 10", "10 dollars"],
)  # fmt: skip
def test_a_tag_holds_a_number_alone(given: str) -> None:
    assert lone_number(given) == 10
    assert is_right(f"41 <answer>{given}</answer>", "10") and not is_right(f"<answer>{given}</answer>", "11")


@pytest.mark.parametrize(
    "given",
    ["1/10", "x^10", "10^10", "10!", "sqrt 10", "5 - 10", "20 - 10", "not 10", "10 is wrong", "10 thousand",
     "10 or 11", "11 10", "9, 10", "3 + 7 = 10",
     "half of 10", "-10", "-x = 10", "x^2 = 10", "10%", "10?",
     "ten", "at least 10", "10 + x", "10x = 10", "1e10", "(10, 11)", "10 squared", "minus 10", "10.10",
     "10. So it is", "10\nor so",
     "10:10", "", "010"],
)  # fmt: skip
def test_other_things_in_a_tag_are_no_number(given: str) -> None:
    assert lone_number(given) != 10
    assert not is_right(f"<answer>{given}</answer>", "10")


def test_without_a_tag_a_reply_ends_with_the_number() -> None:
    assert is_right("<think>9</think>3 + 7 = 10.", "10") and is_right("it is 0.50", "0.5")
    assert not is_right("0.5000001", "0.5") and not is_right("no number", "0.5") and not is_right("5", "five")
    assert not is_right("10 <answer></answer>", "10") and is_right("five", "Five")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(number=st.integers(-(10**20), 10**20), before=st.text("ab 1-,.=", max_size=10))
def test_a_number_written_last_is_read_back(number: int, before: str) -> None:
    assert last_number(f"{before} = {number}") == number
    assert last_number(f"{number:,}") == number


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=80) | st.text("0123456789.,-−/ ", max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    assert last_number(text) is None or isinstance(last_number(text), Fraction)
    assert all(isinstance(number, int) for number in integers(text))


def test_texts() -> None:
    assert integers("from -3 to 12") == [-3, 12]
    assert extract_answer("<think>no <answer>1</answer></think> so <answer> 2 </answer> 3") == "2"
    assert extract_answer("<answer>2") == "2"
    assert extract_answer(" plain ") == "plain"
    assert normalise('  "The  Cat." ') == "the cat"
    assert exact_match("PARIS!", "Paris") and not exact_match("not Paris", "Paris")
    assert similarity("abcd", "abcd") == 1.0 and similarity("abcd", "abce") == 0.75


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("5", "5"),
        ("5.", "5"),
        ("5.0", "5"),
        ("5", "5.00"),
        ("+5", "5"),
        ("−5", "-5"),
        ("-5", "−5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1,234", "1234"),
        ("1234.5", "1,234.50"),
        ('"5"', "5"),
        ("**5**.", "5"),
        ("-0", "0"),
        ("PARIS!", "Paris"),
        ("“Paris.”", "Paris"),
        ("'Paris'.", "Paris."),
        ("`x == 1`", "x == 1"),
        ("c++.", "C++"),
        ("C#", "c#"),
        ("5 %", "5 %"),
        ("1/2", "1/2"),
        ("007", "007"),
        ("", ""),
        (" ", ""),
        ("???", "???"),
        ("The  Nile", "the nile"),
        ("\\text{Paris}", "Paris"),
        ("Paris", "\\textbf{Paris}."),
        ("$\\mathrm{Paris}$.", "Paris"),
        ("\\text{New } \\text{York}", "New York"),
        ("\\boxed{Paris}", "Paris"),
        ("$1990$", "1990"),
        ("\\(1990\\)", "1990"),
        ("5\\%", "5%"),
        ("\\$5", "$5"),
        ("cafe\u0301", "café"),
        ("“It’s” so", '"It\'s" so'),
        ("1990–1995", "1990-1995"),
    ],
)
def test_the_same_answer_in_another_dress(reply: str, answer: str) -> None:
    assert exact_match(reply, answer) and exact_match(answer, answer)


NEAR_MISSES = [
    ("-5", "5"),
    ("−5", "5"),
    ("5", "-5"),
    ("--5", "5"),
    ("--5", "-5"),
    (".5", "5"),
    ("5", ".5"),
    ("0.5", "5"),
    ("5%", "5"),
    ("5", "5%"),
    ("50%", "0.5"),
    ("$5", "5"),
    ("~5", "5"),
    ("<5", "5"),
    ("#5", "5"),
    ("5!", "5"),
    ("n!", "n"),
    ("5?", "5"),
    ("(5)", "5"),
    ("[5]", "5"),
    ("5,", "5"),
    ("5e0", "5"),
    ("5/1", "5"),
    ("10/2", "5"),
    ("2/4", "1/2"),
    ("0.5", "1/2"),
    ("0.333", "1/3"),
    ("5 6", "5"),
    ("5 or 6", "5"),
    ("1,23", "123"),
    ("1,2345", "12345"),
    ("1.234", "1234"),
    ("1 234", "1234"),
    ("7", "007"),
    ("007", "7"),
    ("\\$5", "5"),
    ("5\\%", "5"),
    ("$5$6$", "5"),
    ("cafe", "café"),
    ("1234", "01234"),
    ("2020-05-12", "12"),
    ("12", "2020-05-12"),
    ("5.0.0", "5"),
    ("five", "5"),
    ("5 km", "5"),
    ("5", "5 km"),
    ("C++", "C"),
    ("C", "C++"),
    ("C#", "C"),
    ("C+", "C++"),
    ("C++", "C#"),
    (".NET", "NET"),
    ("_x_", "x"),
    ("@x", "x"),
    ("-x", "x"),
    ("x-", "x"),
    ("(a)", "a"),
    ("a", "(a)"),
    ("?", ""),
    ("???", ""),
    (".", ""),
    ('""', ""),
    ("", "5"),
    ("", "???"),
    ("the Nile", "Nile"),
    ("Nile, Amazon", "Nile"),
    ("not Paris", "Paris"),
    ("Par is", "Paris"),
    ("9" * 61, "9" * 62),
]


@pytest.mark.parametrize(("reply", "answer"), NEAR_MISSES)
def test_a_near_miss_never_passes(reply: str, answer: str) -> None:
    assert not exact_match(reply, answer)


numerals = st.from_regex(
    r"[-+−]?(0|[1-9][0-9]{0,5}|[1-9][0-9]{0,2},[0-9]{3})?(\.[0-9]{1,4})?", fullmatch=True
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    reply=numerals.filter(lambda text: text[-1:].isdigit()),
    answer=st.fractions(-2000, 2000, max_denominator=1),
)
def test_numbers_pass_exactly_if_they_are_equal(reply: str, answer: Fraction) -> None:
    value = Fraction(reply.replace(",", "").replace("−", "-"))
    assert exact_match(reply, str(answer)) == (value == answer)
    assert exact_match(reply, str(value.numerator)) == (value.denominator == 1)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    answer=st.text("aC5.-+−#%!? '\"*,/0", max_size=5),
    before=st.text("-+−.#%$~<(*_@!?5", max_size=2),
    after=st.text("-+#%)/_@?5", max_size=2),
)
def test_what_is_added_changes_the_answer_unless_it_is_dress(answer: str, before: str, after: str) -> None:
    """Neither a sign nor a symbol is lost: only a number that stays the same, or bold, may pass."""
    reply = f"{before}{answer}{after}"
    if exact_match(reply, answer) and normalise(reply) != normalise(answer):
        assert as_number(answer) is not None and Fraction(normalise(reply).replace(",", "")) == as_number(
            answer
        )
    assert exact_match(answer, answer)
    assert bool(normalise(answer)) == bool(answer.strip())

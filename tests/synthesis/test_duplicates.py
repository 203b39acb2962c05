"""Near duplicates against the exact index of all pairs, and contamination by hand."""

import random
import sys
import unicodedata

import pytest

from silva.errors import CapabilityError
from silva.synthesis.duplicates import EvaluationSets, NearDuplicates, jaccard, shingles


def test_jaccard_by_hand():
    # a..g has 3 sequences of 5 words, a..f + x has 3, and 2 are shared
    assert jaccard(shingles("a b c d e f g"), shingles("A, b c d e f x")) == 2 / 4
    assert shingles("a b") == {("a", "b")}


def test_near_duplicates_are_those_of_all_pairs():
    pytest.importorskip("datasketch")
    draw, texts = random.Random(3), []
    for _ in range(40):
        base = [f"w{draw.randrange(500)}" for _ in range(60)]
        for changes in (0, 1, 3, 8):
            changed = list(base)
            for _ in range(changes):
                changed[draw.randrange(60)] = f"w{draw.randrange(500)}"
            texts.append(" ".join(changed))
    kept: list[str] = []
    expected = []
    for text in texts:
        near = any(jaccard(shingles(text), shingles(other)) >= 0.7 for other in kept)
        expected.append(near)
        kept += [] if near else [text]
    found, near = NearDuplicates(0.7), list[bool]()
    for text in texts:
        near.append(found.find(text) is not None)
        if not near[-1]:
            found.add(text)
    assert near == expected
    assert 40 <= sum(expected) <= 110


def test_an_overlap_at_the_bound_is_near():
    """8 words have 4 sequences of 5; the last word of two texts differs, so 3 of 5 sequences are shared."""
    pytest.importorskip("datasketch")
    texts = NearDuplicates(3 / 5)
    texts.add("a b c d e f g h")
    assert texts.find("a b c d e f g i") == 0
    assert texts.find("a b c d e f x i") is None  # 2 of 6


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(CapabilityError, match=r"pip install 'silva\[synth\]'"):
        NearDuplicates(0.8)


LONG = "If Ann has 3 apples and Bob has 5 apples, how many apples do they have in all?"


def test_thirteen_words_in_a_row_are_contamination_and_twelve_are_not():
    sets = EvaluationSets.of({"math": [LONG], "other": ["one two three four five six seven eight", "a b c"]})
    assert (sets.texts, sets.too_short) == ({"math": 1, "other": 1}, {"math": 0, "other": 1})
    thirteen = "So: IF ann has 3 apples, and Bob has 5 apples how many pears?"
    assert sets.found_in([thirteen.replace("pears", "apples")]) == {"math"}
    assert sets.found_in([thirteen]) == set()
    assert sets.found_in(["if ann has 3 apples and bob has 5", "apples how many apples do they"]) == set()
    assert sets.found_in(["zero one two three four five six seven eight nine"]) == {"other"}
    assert sets.found_in(["a b c"]) == set()
    few = EvaluationSets.of({"few": ["one two three four five", "one two three"]}, 5)
    assert few.too_short == {"few": 1} and few.found_in(["zero one two three four five six"]) == {"few"}


@pytest.mark.parametrize(
    "written",
    [
        '{"q": "If Ann has\\n3 apples\\r\\n\\tand Bob has 5 apples, how many apples do they have in\\tall?"}',
        LONG.replace("apples", "_apples_").replace("Bob", "__Bob__"),
        LONG.replace("Ann", "\\u0041nn").replace("3", "３"),
    ],
)
def test_a_question_is_found_in_json_with_emphasis_and_in_other_forms_of_unicode(written):
    assert LONG not in written and EvaluationSets.of({"math": [LONG]}).found_in([written]) == {"math"}


def test_accents_are_compared_as_they_look():
    french = "Le café était fermé à l'époque où les élèves étaient là pour la fête"
    decomposed = unicodedata.normalize("NFD", french)
    assert decomposed != french and EvaluationSets.of({"fr": [french]}).found_in([decomposed]) == {"fr"}

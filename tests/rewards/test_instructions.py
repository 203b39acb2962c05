"""Instructions of IFEval and IFBench, with the package's checkers: verdicts that are plain to see."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rewards.attempts import grade

from silva.errors import RecordError, RewardError
from silva.rewards.instructions import NLTK, Instructions

pytest.importorskip("if_verifiable", reason="needs if-verifiable: pip install if-verifiable")

NO_COMMA, TITLE = "punctuation:no_comma", "detectable_format:title"
WORDS = "keywords:frequency"
TWICE = {"keyword": "river", "frequency": 2, "relation": "at least"}


def row(*pairs: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The columns; data sets on the hub give every argument, most of them as null."""
    return {
        "instruction_id_list": [name for name, _ in pairs],
        "kwargs": [{"num_words": None, **arguments} for _, arguments in pairs],
    }


@pytest.mark.parametrize(
    ("reply", "strict", "loose", "share"),
    [
        ("<<Rivers>> The river meets a river.", 1, 1, 1.0),
        ("<<Rivers>> The river, a river.", 0, 0, 2 / 3),
        ("The river.", 0, 0, 1 / 3),
        ("Sure, here:\n<<Rivers>> The river meets a river.", 0, 1, 2 / 3),  # without its first line
        ("<think>So, a river</think><<Rivers>> The river meets a river.", 1, 1, 1.0),
        ("", 0, 0, 0.0),
    ],
)
def test_a_reply_must_follow_all_of_them(reply: str, strict: int, loose: int, share: float) -> None:
    columns = row((NO_COMMA, {}), (TITLE, {}), (WORDS, TWICE))
    score = grade(Instructions().build(), reply, **columns)
    assert (score.value, score.solved) == (strict, bool(strict))
    assert score.metrics["instructions_strict"] == pytest.approx(share)
    assert (score.metrics["strict"], score.metrics["loose"]) == (strict, loose)
    assert grade(Instructions(loose=True).build(), reply, **columns).value == loose


def test_ifbench_has_instructions_of_its_own() -> None:
    reward = Instructions(benchmark="ifbench").build()
    words = {f"keyword{i}": word for i, word in enumerate(["a1", "b2", "c3", "d4", "e5"], 1)}
    columns = row(("count:keywords_multiple", words))
    reply = "a1 " + "b2 " * 2 + "c3 " * 3 + "d4 " * 5 + "e5 " * 7
    assert grade(reward, reply, **columns).solved and not grade(reward, reply + "e5", **columns).solved


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "got None, expected lists instruction_id_list and kwargs .* instructions of ifeval"),
        ({"instruction_id_list": [NO_COMMA], "kwargs": []}, "got None, expected lists"),
        ({"instruction_id_list": [], "kwargs": []}, "got None, expected lists"),
        (row((NO_COMMA, {}), ("count:keywords_multiple", {})), "got count:keywords_multiple, expected"),
    ],
)
def test_rows_without_known_instructions_are_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        Instructions().build().check(None, columns)  # type: ignore[attr-defined]


def test_missing_data_of_nltk_are_no_result() -> None:
    reward: Any = Instructions().build()

    def missing(*given: Any) -> None:
        raise LookupError("Resource punkt not found. Please use the NLTK Downloader")

    reward.evaluate = missing
    with pytest.raises(RewardError, match=NLTK):
        grade(reward, "a", **row((NO_COMMA, {})))

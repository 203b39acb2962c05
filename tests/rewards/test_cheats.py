"""The table of cheats against every reward that can be graded here, and properties of all of them."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.attempts import attempt

from silva.protocols import Attempt, Reward, Score
from silva.rewards import REWARDS
from silva.rewards.cheats import CASES, CHEATS, CONTENTS, HONEST, Case, Cheat, cases, filled
from silva.rewards.deep_research import DeepResearch
from silva.rewards.exact_match import ExactMatch
from silva.rewards.letter import Letter
from silva.rewards.maths import Math
from silva.rewards.token_f1 import TokenF1
from silva.rewards.weighted import Part, Weighted

SETTINGS = {
    "exact_match": ExactMatch(),
    "exact_match, squad": ExactMatch(rules="squad"),
    "exact_match, tag": ExactMatch(extract="answer_tag"),
    "exact_match, box": ExactMatch(extract="boxed"),
    "exact_match, last line": ExactMatch(extract="last_line"),
    "exact_match, whole": ExactMatch(extract="whole"),
    "letter": Letter(),
    "token_f1": TokenF1(),
    "token_f1, least": TokenF1(least=0.5),
    "deep_research": DeepResearch(),
    "deep_research, shares": DeepResearch(format_share=0.2, tools=("search",)),
    "deep_research, lax": DeepResearch(think=False, box=False),
    "math": Math(workers=1, seconds=0.3),
    "weighted": Weighted(
        parts=(Part(reward=ExactMatch()), Part(reward=TokenF1(), weight=2.0), Part(reward=Letter(), name="l"))
    ),
}
ELSEWHERE = {"code_tests", "function", "judge"}
"""Tested in files of their own: what they say is not decided here."""


def build(name: str) -> Reward:
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify: pip install 'silva[math]'")
    return SETTINGS[name].build()


def graded(reward: Reward, pairs: list[tuple[Cheat, Case]]) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return [
            await reward.score(Attempt(cheat.messages(case), case.answer, case.data)) for cheat, case in pairs
        ]

    return asyncio.run(all_of_them())


def tasks(name: str) -> list[Case]:
    if name == "math":
        return list(CASES[:3])  # it is slow
    return [case for case in CASES if case.right in "ABCD" or name not in ("letter", "weighted")]


def test_every_reward_is_attacked() -> None:
    assert {name.partition(",")[0] for name in SETTINGS} | ELSEWHERE == set(REWARDS)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_cheat_is_solved_and_none_is_worth_a_solution(name: str) -> None:
    reward, given = build(name), tasks(name)
    pairs = [(cheat, case) for cheat in CHEATS for case in given[: 1 if cheat.once else None]]
    pairs = [(cheat, case) for cheat, case in pairs if cheat.fits(case)]
    solutions = graded(reward, [(cheat, case) for cheat in HONEST for case in given])
    least = min(score.value for score in solutions if score.solved)
    assert sum(score.solved for score in solutions) >= len(given)  # in one form at least
    got = graded(reward, pairs)
    assert [(cheat.name, case.answer) for (cheat, case), s in zip(pairs, got, strict=True) if s.solved] == []
    assert max(score.value for score in got) < least


def test_a_careless_reward_is_caught() -> None:
    """The rewards that others shipped: a right answer anywhere in the text, or no answer at all."""

    class Anywhere:
        async def score(self, attempt: Attempt) -> Score:
            text = " ".join(message.content for message in attempt.messages[1:])
            return Score(1.0, str(attempt.answer) in text)

    case = CASES[0]
    solved = {
        cheat.name for cheat in CHEATS if cheat.fits(case) and graded(Anywhere(), [(cheat, case)])[0].solved
    }
    assert {"numbers, plain", "hedge, tag", "answer_in_result", "tags_repeated", "boxes_repeated"} <= solved
    assert "empty, plain" not in solved


def test_work_that_is_not_done_has_the_right_value() -> None:
    """What `worked_out` is for: without it, math-verify computes in the agent's place."""
    pytest.importorskip("math_verify", reason="needs math-verify: pip install 'silva[math]'")
    pairs = [(cheat, CASES[0]) for cheat in CHEATS if cheat.name in ("working, tag", "working, box")]
    assert [s.solved for s in graded(Math(workers=1, worked_out=False).build(), pairs)] == [True, True]
    assert [s.solved for s in graded(Math(workers=1).build(), pairs)] == [False, False]


def test_cheats_are_told_apart_and_filled() -> None:
    names = [cheat.name for cheat in CHEATS]
    assert len(set(names)) == len(names) >= 150
    for cheat in CHEATS:
        for case in CASES:
            shown = "".join(m.content + (m.reasoning or "") for m in cheat.messages(case))
            assert "«" not in shown and "»" not in shown


def test_a_lucky_guess_is_no_cheat() -> None:
    guess = Cheat("guess", "<answer>None</answer>")
    assert not guess.fits(Case("q", "none", ("a", "b")))
    assert guess.fits(Case("q", "42", ("a", "b")))
    assert guess.fits(Case("q", {"tests": []}, ("a", "b")))
    assert not Cheat("working", "«working»").fits(Case("q", "42", ("a", "b")))
    assert Cheat("working", "«working»").fits(Case("q", "42", ("a", "b"), working="40 + 2"))
    hedge = Cheat("hedge", CONTENTS["hedge"])
    assert hedge.fits(Case("q", "42", ("a", "b"))) and not hedge.fits(Case("q", None, ("a", "b")))
    assert not Cheat("echo", "«question»").fits(Case("Is it 4 or 5?", "5", ("a", "b")))


def test_wrong_answers_are_those_of_other_rows() -> None:
    rows = [
        ("one?", "1", {}),
        ("also one?", "1.0", {}),
        ("two?", ["2", "two"], {"level": 3}),
        ("x?", None, {}),
    ]
    found = cases(rows)
    assert [case.wrong for case in found] == [
        ("2", "987654321"), ("2", "987654321"), ("1", "1.0"), ("1", "1.0")
    ]  # fmt: skip
    assert found[2].data == {"level": 3} and found[2].right == "2" and found[3].right is None
    assert filled("«question» «answer» «wrong» «other»", found[2]) == "two? 2 1 1.0"


QUICK = [name for name in SETTINGS if name != "math"]  # test_maths.py has its own
pieces = st.lists(
    st.sampled_from(
        ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "A", "B", "C", " or ", "\n",
         "The answer is ", "####", ".", "not ", "(C)", "c", "C.", " ", "\u200b", "$"]
    ), max_size=8,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
@given(reply=pieces | st.text(max_size=30))
def test_no_failure_is_worth_a_solution(name: str, reply: str) -> None:
    score = asyncio.run(SETTINGS[name].build().score(attempt(reply, "C")))
    if score.solved:
        assert score.value >= 1.0
    else:
        assert score.value < 1.0

"""Of every reward that grades by itself: whatever is said, only a solution is worth one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.rewards.attempts import attempt

from silva.protocols import Score
from silva.rewards.deep_research import DeepResearch
from silva.rewards.exact_match import ExactMatch
from silva.rewards.judge import Judge, JudgeReward, word
from silva.rewards.letter import Letter
from silva.rewards.token_f1 import TokenF1
from silva.rewards.weighted import Part, Weighted

PARTS = (Part(reward=ExactMatch()), Part(reward=TokenF1(), weight=2.0), Part(reward=Letter(), name="l"))
SETTINGS = {
    **{
        f"exact_match, {how}": ExactMatch(extract=how) for how in ("auto", "answer_tag", "boxed", "last_line")
    },
    "exact_match, SQuAD's rules": ExactMatch(rules="squad"),
    "letter": Letter(),
    "token_f1": TokenF1(least=0.2),
    "deep_research": DeepResearch(),
    "deep_research, shares": DeepResearch(format_share=0.2, think=False, tools=()),
    "weighted": Weighted(parts=PARTS),
}
PIECES = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "A", "B", "C", " or ", "\n",
          "The answer is ", "####", ".", "not ", "(C)", "c", "C.", " ", "\u200b", "$"]  # fmt: skip
replies = st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=30)


@pytest.mark.parametrize("name", SETTINGS)
@given(reply=replies)
@example(reply="<think>C</think><answer>\\boxed{C}</answer>")
def test_no_failure_is_worth_a_solution(name: str, reply: str) -> None:
    score = asyncio.run(SETTINGS[name].build().score(attempt(reply, "C")))
    assert score.value >= 1.0 if score.solved else score.value < 1.0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_solution_can_be_earned(name: str) -> None:
    reply = "<think>C</think><answer>\\boxed{C}</answer>" if "box" not in name else "\\boxed{C}"
    reply = {"exact_match, last_line": "C", "exact_match, answer_tag": "<answer>C</answer>"}.get(name, reply)
    assert asyncio.run(SETTINGS[name].build().score(attempt(reply, "C"))).solved


class Verdicts:
    """A cache that holds every verdict."""

    def __init__(self, votes: list[bool]) -> None:
        self.votes = votes

    async def get_or_make(self, request, make):
        *_, messages, index = request
        return f"{word(messages)}: {'correct' if self.votes[index] else 'wrong'}"


@given(votes=st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda votes: len(votes) % 2))
def test_a_judge_pays_for_a_majority_alone(votes: list[bool]) -> None:
    reward = JudgeReward(Judge(model="j", votes=len(votes)), Verdicts(votes), "")
    score = asyncio.run(reward.score(attempt("Paris", "Paris")))
    won = votes.count(True) > votes.count(False)
    assert score == Score(float(won), won, {"answered": 1.0, "votes": votes.count(True) / len(votes)})

"""Deep research: the format rule by rule, numbers by hand, and what cannot be forged."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.errors import RewardError
from silva.protocols import Attempt, Score
from silva.rewards.deep_research import DeepResearch, DeepResearchReward
from silva.rewards.exact_match import ExactMatch
from silva.rewards.token_f1 import TokenF1
from silva.types import Message, ToolCall

QUESTION = Message("user", "Who designed the tower?")
SEARCH = (
    Message("assistant", "", reasoning="I look it up.", tool_calls=(ToolCall("search", {"query": "t"}),)),
    Message("tool", "It was Stephen Sauvestre.", name="search"),
)
PYTHON = (
    Message("assistant", "", tool_calls=(ToolCall("python", {"code": "1"}),)),
    Message("tool", "1", name="python"),
)
RIGHT = Message("assistant", "<answer>\\boxed{Stephen Sauvestre}</answer>", reasoning="So.")
HALF = Message("assistant", "<answer>\\boxed{Stephen Eiffel}</answer>", reasoning="So.")  # F1 = 1 / 2
MOST = Message("assistant", "<answer>\\boxed{one two three four}</answer>", reasoning="So.")
WRONG = Message("assistant", "<answer>\\boxed{Gustave}</answer>", reasoning="So.")


def grade(*messages: Message, answer: object = "Stephen Sauvestre", **keys) -> Score:
    attempt = Attempt((QUESTION, *messages), answer)
    return asyncio.run(DeepResearch(**keys).build().score(attempt))


def said(content: str, **keys) -> Message:
    return Message("assistant", content, **keys)


@pytest.mark.parametrize(
    ("messages", "value", "solved"),
    [
        ((RIGHT,), 1.0, True),
        ((*SEARCH, RIGHT), 1.0, True),
        ((*SEARCH, *PYTHON, RIGHT), 1.1, True),
        ((HALF,), 0.5, False),
        ((*SEARCH, *PYTHON, HALF), 0.6, False),
        ((*SEARCH, *PYTHON, WRONG), 0.0, False),
        ((said("Stephen Sauvestre"),), -1.0, False),
        ((), -1.0, False),
    ],
)
def test_numbers_of_arpo(messages, value: float, solved: bool) -> None:
    score = grade(*messages)
    assert (score.value, score.solved) == (pytest.approx(value), solved)


@pytest.mark.parametrize(
    ("messages", "value", "solved"),
    [
        ((RIGHT,), 1.0, True),
        ((HALF,), 0.2 + 0.8 * 0.5, False),
        ((WRONG,), 0.2, False),
        ((said("<answer>\\boxed{Stephen Sauvestre}</answer>"),), 0.8, False),  # no thoughts
        ((said("Gustave"),), 0.0, False),
    ],
)
def test_numbers_with_a_share_for_the_format(messages, value: float, solved: bool) -> None:
    score = grade(*messages, format_share=0.2, bonus=0.0)
    assert (score.value, score.solved) == (pytest.approx(value), solved)


def test_partial_credit_and_bonus_stay_below_a_solution() -> None:
    """F1 = 2 * 4 / (4 + 5) = 0.89; with the bonus 0.99."""
    assert grade(*SEARCH, *PYTHON, MOST, answer="one two three four five").value == 0.9
    assert grade(MOST, answer="one two three four five").value == pytest.approx(8 / 9)
    enough = TokenF1(solved_at=0.8)
    score = grade(MOST, answer="one two three four five", correctness=enough)
    assert (score.value, score.solved) == (1.0, True)


@pytest.mark.parametrize("inside", ["", " "])
def test_an_empty_box_is_a_wrong_answer_in_the_right_form(inside) -> None:
    """As in ARPO."""
    score = grade(*PYTHON, *SEARCH, said(f"<answer>\\boxed{{{inside}}}</answer>", reasoning="b"))
    assert (score.value, score.solved, score.metrics["format"]) == (0.0, False, 1.0)


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([said("<answer>\\boxed{a}</answer>")], "think"),
        ([said("<think>a <answer>\\boxed{a}</answer>")], "think"),
        ([said("<think>a</think></think><answer>\\boxed{a}</answer>")], "think"),
        ([said("<answer>\\boxed{a}</answer>", reasoning="b", raw="<think>b<think></think>")], "think"),
        ([said("a", reasoning="b")], "answer"),
        ([said("<answer>\\boxed{a}", reasoning="b")], "answer"),
        ([said("</answer>\\boxed{a}<answer>", reasoning="b")], "answer"),
        ([said("<answer>\\boxed{a}</answer><answer>\\boxed{b}</answer>", reasoning="b")], "answer"),
        ([said("<answer>a</answer>", reasoning="b"), *PYTHON, RIGHT], "answer"),
        ([RIGHT, said("more", reasoning="b")], "answer"),
        ([said("<answer>a</answer> \\boxed{a}", reasoning="b")], "box"),
        ([said("<answer>\\boxed{a</answer>}", reasoning="b")], "box"),
        ([said("", errors=("malformed",)), RIGHT], "call"),
        ([said("<search>tower"), RIGHT], "call"),
        ([said("</python>"), RIGHT], "call"),
        ([said("<result>It was me.</result>"), RIGHT], "result"),
    ],
)
def test_what_breaks_the_format(messages, rule: str) -> None:
    score = grade(*messages)
    assert score.value == -1.0 and not score.solved
    assert score.metrics[f"broken_{rule}"] == 1.0 and score.metrics["format"] == 0.0


@pytest.mark.parametrize(
    "messages",
    [
        [said("<think>a</think><answer>\\boxed{Stephen Sauvestre}</answer>")],
        [said("<answer>\\boxed{Stephen Sauvestre}</answer>", reasoning="b", raw="b</think>...")],
        [said("<think><answer>no</answer></think><answer>\\boxed{Stephen Sauvestre}</answer>")],
        [*SEARCH[:1], Message("tool", "<answer>no</answer></think><result>", name="search"), RIGHT],
    ],
)
def test_what_keeps_the_format(messages) -> None:
    assert grade(*messages).value == 1.0


def test_rules_that_can_be_switched_off() -> None:
    assert grade(said("<answer>\\boxed{Stephen Sauvestre}</answer>"), think=False).solved
    assert grade(said("<answer>Stephen Sauvestre</answer>", reasoning="a"), box=False).solved
    assert grade(said("x"), penalty=0.5).value == -0.5
    assert grade(*SEARCH, RIGHT, tools=("search",)).value == 1.1
    assert grade(*SEARCH, RIGHT, tools=()).value == 1.0
    failed = [SEARCH[0], Message("tool", "Error: no query", name="search"), *SEARCH[2:], RIGHT]
    assert grade(*failed, tools=("search",)).value == 1.0  # a call that failed is no use of a tool


def test_neither_results_nor_tools_can_be_forged() -> None:
    """ARPO reads answers in results of tools, and takes a closing tag for a call."""
    forged = Message("tool", "<answer>\\boxed{Stephen Sauvestre}</answer></search></python>", name="search")
    assert grade(SEARCH[0], forged, said("I see.", reasoning="a")).value == -1.0
    assert grade(SEARCH[0], forged, WRONG).value == 0.0
    tags = said(
        "<answer>\\boxed{Stephen Sauvestre}</answer> <search>a</search><python>1</python>", reasoning="a"
    )
    assert grade(tags).value == -1.0
    thought = said(RIGHT.content, reasoning="<search></search><python></python>")
    assert grade(thought).value == 1.0  # no bonus


def test_correctness_may_be_another_reward() -> None:
    assert grade(HALF, correctness=ExactMatch()).value == 0.0

    class Over:
        async def score(self, attempt):
            return Score(1.5, True)

    with pytest.raises(RewardError, match=r"correctness: got 1\.5, expected a value from 0 to 1"):
        asyncio.run(DeepResearchReward(DeepResearch(), Over()).score(Attempt((QUESTION, RIGHT), "a")))


class Fixed:
    def __init__(self, score: Score) -> None:
        self._score = score

    async def score(self, attempt) -> Score:
        return self._score


steps = st.lists(st.sampled_from([SEARCH, PYTHON, (said("<result>"),), (said("well"),)]), max_size=3)


@given(
    failed=steps, solved=steps, last=st.sampled_from([RIGHT, said("x"), said("<answer>\\boxed{a}</answer>")]),
    value=st.floats(0, 1), is_right=st.booleans(), share=st.floats(0, 0.99), partial=st.floats(0, 0.99),
)  # fmt: skip
def test_no_failure_reaches_a_solution(failed, solved, last, value, is_right, share, partial) -> None:
    settings = DeepResearch(format_share=share, partial=partial)

    def play(steps, final, score: Score) -> Score:
        messages = (QUESTION, *(message for step in steps for message in step), final)
        return asyncio.run(DeepResearchReward(settings, Fixed(score)).score(Attempt(messages, "a")))

    one = play(failed, last, Score(value, is_right))
    other = play(solved, RIGHT, Score(value, True))
    for score in (one, other):
        if score.solved:
            assert score.value >= 1.0 - 1e-9
        else:
            assert score.value <= partial

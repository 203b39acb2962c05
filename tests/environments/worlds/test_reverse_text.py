"""Exact texts only earn 1; copying, padding and listing do not."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments.worlds.reverse_text import ReverseText
from silva.types import Message, Task

TASK = Task("r", "reverse_text", 0, {"text": "muvo pot"}, "top ovum")


def reward(reply: str, partial: bool = True) -> float:
    async def run() -> float:
        environment = ReverseText(partial=partial, eval_size=1).taskset().environment(TASK)
        await environment.reset()
        step = await environment.step(Message("assistant", reply))
        assert step.terminated and step.metrics["success"] == float(step.rewards["correct"] == 1.0)
        return step.rewards["correct"]

    return asyncio.run(run())


@pytest.mark.parametrize("reply", ["top ovum", " top ovum\n", "<answer>top ovum</answer>", '"top ovum".'])
def test_the_exact_text_earns_one(reply: str) -> None:
    assert reward(reply) == 1.0


def test_partial_credit_is_half_the_similarity() -> None:
    assert reward("top ovun") == 0.5 * 7 / 8
    assert reward("top ovun", partial=False) == 0.0
    assert reward("") == 0.0
    assert reward("muvo pot") < 0.3
    assert reward("top ovum muvo pot") < 0.5
    assert reward("Top Ovum") < 0.5


@settings(max_examples=150, deadline=None, derandomize=True)
@given(reply=st.text("topvum ", max_size=24) | st.text(max_size=12))
def test_partial_credit_never_reaches_the_reward_of_the_solution(reply: str) -> None:
    assert reward(reply) <= 0.5 or reply.strip().strip("\"'`.") == "top ovum"


def test_texts_are_made_as_asked_and_never_read_the_same_both_ways() -> None:
    tasks = ReverseText(words=2, min_letters=2, max_letters=3, eval_size=200).taskset().tasks("eval")
    for task in tasks:
        words = task.data["text"].split()
        assert len(words) == 2 and all(2 <= len(word) <= 3 for word in words)
        assert task.answer == task.data["text"][::-1] != task.data["text"]


def test_the_compact_prompt_is_the_text_alone() -> None:
    compact = ReverseText(style="compact")
    environment = compact.taskset().environment(TASK)
    assert asyncio.run(environment.reset()).messages[0].content == "muvo pot"

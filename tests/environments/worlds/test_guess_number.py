"""Hints, turns and rewards of guessing a number."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.guess_number import GuessEpisode, GuessNumber
from silva.types import Message, Task

TASK = Task("g", "guess_number", 0, {"low": 1, "high": 7}, 6)


def test_an_episode_word_by_word(replies_to) -> None:
    game = GuessEpisode(GuessNumber(), TASK)
    prompt = asyncio.run(game.reset()).messages[0].content
    assert prompt == "Guess my number from 1 to 7. Reply with the number only."
    steps = replies_to(GuessNumber(), TASK, ["Is it 4?", "I say 7", "6"])
    assert [step.observation.messages[0].content for step in steps] == [
        "It is higher than 4.",
        "It is lower than 7.",
        "Right.",
    ]
    assert [step.rewards["found"] for step in steps] == [0, 0, 1]
    assert steps[-1].terminated and steps[-1].metrics == {"action_is_valid": 1, "success": 1, "guesses": 3}


def test_the_last_guess_ends_it_and_a_reply_without_a_number_is_a_guess_too(replies_to) -> None:
    steps = replies_to(GuessNumber(style="compact"), TASK, ["hello", "3", "3", "6"])
    assert [step.observation.messages[0].content for step in steps] == ["?", "higher", "higher"]
    assert [step.shaped["format"] for step in steps] == [-0.1, 0, 0]
    assert steps[-1].truncated and not steps[-1].terminated and steps[-1].metrics["success"] == 0


def test_one_number_of_a_reply_counts_so_listing_all_of_them_gains_nothing(replies_to) -> None:
    everything = "1 2 3 4 5 6 7"
    assert replies_to(GuessNumber(), TASK, [everything])[0].rewards == {"found": 0}
    assert replies_to(GuessNumber(), TASK, ["not 3 but 6"])[0].rewards == {"found": 1}
    assert replies_to(GuessNumber(read="first"), TASK, ["6, not 3"])[0].rewards == {"found": 1}
    assert replies_to(GuessNumber(read="first"), TASK, ["not 3 but 6"])[0].rewards == {"found": 0}


def test_the_expert_halves_the_range(expert_rate) -> None:
    assert expert_rate(GuessNumber(), 256) == (1.0, 1.0)
    assert expert_rate(GuessNumber(numbers=31, guesses=5, ranges=20), 200) == (1.0, 1.0)
    success, reward = expert_rate(GuessNumber(discount=0.1, eval_size=287), 287)  # all of 41 ranges
    assert success == 1.0 and reward == pytest.approx(1 - 0.1 * (0 + 2 * 1 + 4 * 2) / 7)


def test_a_discount_leaves_every_found_number_worth_more_than_none() -> None:
    with pytest.raises(ValidationError, match="the last of 3 guesses would earn nothing"):
        GuessNumber(discount=0.5)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    replies=st.lists(st.text("0123456789 -,.", max_size=12), min_size=3, max_size=3), number=st.integers(1, 7)
)
def test_only_the_number_earns_the_reward(replies: list[str], number: int) -> None:
    game = GuessEpisode(GuessNumber(), Task("g", "guess_number", 0, {"low": 1, "high": 7}, number))

    async def run() -> tuple[float, bool]:
        await game.reset()
        for reply in replies:
            step = await game.step(Message("assistant", reply))
            if step.terminated or step.truncated:
                return step.rewards["found"], reply.rstrip(" -,.").endswith(str(number))
        raise AssertionError("three guesses end the episode")

    reward, named_last = asyncio.run(run())
    assert reward in (0.0, 1.0)
    assert reward == 0.0 or named_last

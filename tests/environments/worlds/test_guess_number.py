"""Hints, turns and rewards of guessing a number."""

from __future__ import annotations

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.guess_number import GuessNumber
from silva.types import Task

TASK = Task("g", "guess_number", 0, {"low": 1, "high": 7}, 6)


def test_an_episode_word_by_word(first, replies_to) -> None:
    assert first(GuessNumber(), TASK) == "Guess my number from 1 to 7. Reply with the number only."
    steps = replies_to(GuessNumber(), TASK, ["Is it 4?", "I say 7", "6"])
    assert list(map(said, steps)) == ["It is higher than 4.", "It is lower than 7.", "Right."]
    assert [step.rewards["found"] for step in steps] == [0, 0, 1]
    assert steps[-1].terminated and steps[-1].metrics == {"action_is_valid": 1, "success": 1, "guesses": 3}


def test_the_last_guess_ends_it_and_a_reply_without_a_number_is_a_guess_too(replies_to) -> None:
    steps = replies_to(GuessNumber(style="compact"), TASK, ["hello", "3", "3", "6"])
    assert list(map(said, steps)) == ["?", "higher", "higher"]
    assert [step.shaped["format"] for step in steps] == [-0.1, 0, 0]
    assert steps[-1].truncated and not steps[-1].terminated and steps[-1].metrics["success"] == 0


def test_one_number_of_a_reply_counts_so_listing_all_of_them_gains_nothing(replies_to) -> None:
    for read, reply, reward in [
        ("last", "1 2 3 4 5 6 7", 0),
        ("last", "not 3 but 6", 1),
        ("first", "6, not 3", 1),
        ("first", "not 3 but 6", 0),
    ]:
        assert replies_to(GuessNumber(read=read), TASK, [reply])[0].rewards == {"found": reward}


def test_later_guesses_earn_less(expert_rate) -> None:
    """The expert halves the range: one number of 7 takes it one guess, two take two, four take three."""
    success, reward = expert_rate(GuessNumber(discount=0.1, eval_size=287), 287)  # all of 41 ranges
    assert success == 1.0 and reward == pytest.approx(1 - 0.1 * (0 + 2 * 1 + 4 * 2) / 7)

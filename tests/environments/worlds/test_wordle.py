"""Marks worked by hand, guesses that cannot cheat, an expert that finds every word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.environments.conftest import said

from silva.environments.worlds.wordle import WORDS, Lexicon, Wordle, mark
from silva.errors import ConfigError
from silva.types import Task

SHIPPED = WORDS.read_text().split()
TINY: dict[str, Any] = {"alphabet": "abc", "length": 3, "style": "compact", "eval_size": 4, "eval_share": 0.4}
TASK = Task("wordle/0", "wordle", 0, {"length": 5}, "crepe")


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("speed", "abide", "--Y-Y"),  # the secret has one e: the first of two is marked
        ("speed", "erase", "Y-YY-"),
        ("speed", "steal", "G-G--"),
        ("speed", "crepe", "-YGY-"),
        ("eerie", "there", "Y-Y-G"),  # the last e is in its place, one more is elsewhere
        ("llama", "allow", "YGY--"),
        ("geese", "eagle", "YY--G"),
        ("sassy", "grass", "YY-G-"),
        ("abc", "abc", "GGG"),
    ],
)
def test_marks_with_repeated_letters(guess: str, secret: str, marks: str) -> None:
    assert mark(guess, secret) == marks


@settings(max_examples=150, deadline=None, derandomize=True)
@given(guess=st.text("abc", min_size=5, max_size=5), secret=st.text("abc", min_size=5, max_size=5))
def test_marks_follow_from_how_often_a_letter_occurs(guess: str, secret: str) -> None:
    marks = mark(guess, secret)
    for i, letter in enumerate(guess):
        assert (marks[i] == "G") == (letter == secret[i])
        places = [j for j in range(5) if guess[j] == letter and marks[j] != "G"]
        found = sum(guess[j] == letter and marks[j] != "-" for j in range(5))
        assert found == min(guess.count(letter), secret.count(letter))
        order = [marks[j] for j in places]
        assert order == sorted(order, reverse=True)  # Y before -


def test_a_game_in_words(first, replies_to) -> None:
    made = Wordle(guesses=3)
    rules = first(made, TASK)
    assert rules.startswith("Guess the secret word of 5 letters.") and rules.endswith("Guesses left: 3.")
    steps = replies_to(made, TASK, ["<think>hm</think><answer>Speed</answer>", "I give up", "<answer>CREPE."])
    assert said(steps[0]) == "s p e e d\n- Y G Y -\nGuesses left: 2."
    assert said(steps[1]).startswith("No guess was read: one word of 5 letters is expected.")
    assert said(steps[2]) == "Right."
    assert [step.rewards["guessed"] for step in steps] == [0, 0, 1]
    assert [step.shaped["format"] for step in steps] == [0, -0.1, 0]
    assert steps[-1].terminated and steps[-1].metrics == {
        "action_is_valid": 1.0, "success": 1.0, "guesses": 3.0
    }  # fmt: skip


def test_what_is_no_guess(replies_to) -> None:
    for reply in ("crepe speed", "<answer>crep</answer>", "crêpe", "cre pe", "", "12345", "crepe, I think"):
        assert replies_to(Wordle(), TASK, [reply])[0].metrics["action_is_valid"] == 0.0
    for reply in ("crepe", " [CREPE] ", "<think>speed</think>crepe!", "<answer>speed</answer><answer>crepe"):
        assert replies_to(Wordle(), TASK, [reply])[0].metrics["success"] == 1.0
    listed = Wordle(only_listed=True)
    steps = replies_to(listed, TASK, ["aaaaa", "speed"])
    assert said(steps[0]).startswith("aaaaa is not in the list of words.") and said(steps[1])[0] == "s"
    assert said(replies_to(Wordle(**TINY), Task("w", "wordle", 0, {"length": 3}, "abc"), ["abd"])[0]) == "?"


def test_the_last_guess_in_vain_earns_a_part(replies_to) -> None:
    """speed against crepe: one letter in place and two elsewhere, (1 + 2 * 0.5) / 5 of 0.2."""
    steps = replies_to(Wordle(guesses=2), TASK, ["creep", "speed"])
    assert [step.rewards["guessed"] for step in steps] == [0, pytest.approx(0.08)]
    assert steps[-1].truncated and steps[-1].metrics["success"] == 0.0
    steps = replies_to(Wordle(guesses=3, discount=0.25), TASK, ["speed", "speed", "crepe"])
    assert [step.rewards["guessed"] for step in steps] == [0, 0, 0.5]
    assert replies_to(Wordle(guesses=1, partial=0), TASK, ["speed"])[0].rewards["guessed"] == 0


def test_the_compact_style_shows_marks_alone(first, replies_to) -> None:
    task = Task("w", "wordle", 0, {"length": 3}, "abc")
    assert first(Wordle(**TINY), task) == "___"
    steps = replies_to(Wordle(**TINY), task, ["cab", "aac", "abc"])
    assert list(map(said, steps)) == ["YYY", "G-G", "GGG"]


@pytest.mark.slow
def test_the_expert_finds_every_word() -> None:
    """In the five guesses that its entropy needs at most; it knows the list, never the secret."""
    made = Wordle()
    lexicon = Lexicon(tuple(sorted(SHIPPED)), "")
    needed = []
    for secret in lexicon.words[::40]:
        told: tuple[tuple[str, str], ...] = ()
        while not told or told[-1][0] != secret:
            guess = lexicon.best(told)
            told = (*told, (guess, mark(guess, secret)))
        needed.append(len(told))
    assert max(needed) < made.guesses and sum(needed) / len(needed) < 3.5


def test_the_expert_knows_only_what_it_was_told(play_out) -> None:
    """Secrets with the same answers get the same guesses, first the first of those that tell most."""
    tasks = Wordle(**TINY).taskset()
    told: dict[tuple, str] = {}
    for secret in ("abc", "aab", "bcc", "cab", "ccc", "bbb"):
        game = tasks.environment(Task("w", "wordle", 0, {"length": 3}, secret))

        def reply(_: int, game=game) -> str:
            guess = game.expert_reply()
            assert told.setdefault(game.told, guess) == guess
            return guess

        play_out(game, reply)
    assert told[()] == "abc"


def test_the_shipped_list() -> None:
    assert len(SHIPPED) == len({*SHIPPED}) > 900
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in SHIPPED)


def test_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("Wien Rom Köln Bern Oslo bern Prag Paris Lodz Nice Cork Bari\n")
    tasks = Wordle(words=str(file), length=4, eval_size=1).taskset()
    known = {task.answer for split in ("train", "eval") for task in tasks.tasks(split)[:20]}
    assert known <= {"wien", "bern", "oslo", "prag", "lodz", "nice", "cork", "bari"} and len(known) >= 5
    with pytest.raises(ConfigError, match="has 0 words of 7 letters from a to z: expected 2 to 10000"):
        Wordle(words=str(file), length=7).taskset()
    with pytest.raises(ConfigError, match=r"words = .*nowhere.* cannot be read"):
        Wordle(words=str(tmp_path / "nowhere")).taskset()

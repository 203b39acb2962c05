"""Growing lists of names: what is asked, what is exact, and what the rest earns."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.alphabet_sort import AlphabetSort, SortEpisode
from silva.environments.worlds.names import FIRST_NAMES, LAST_NAMES
from silva.types import Message, Task

DATA = {"names": [["Mia Vargas", "Omar Lindt"], ["Ines Moreau"]], "by": "last"}
TASK = Task("a", "alphabet_sort", 0, DATA)
FIRST = "<answer>\nOmar Lindt\nMia Vargas\n</answer>"
SECOND = "<answer>\nOmar Lindt\nInes Moreau // new name!\nMia Vargas\n</answer>"


def test_an_episode_word_by_word(replies_to) -> None:
    episode = SortEpisode(AlphabetSort(), TASK)
    assert asyncio.run(episode.reset()).messages[0].content == (
        "Sort these names by last name, in alphabetical order: Mia Vargas, Omar Lindt.\n"
        "Write one name a line, and nothing else, between <answer> and </answer>."
    )
    steps = replies_to(AlphabetSort(), TASK, [f"<think>L, V</think>{FIRST}", SECOND])
    assert steps[0].observation.messages[0].content == (
        "Here are more names: Ines Moreau.\nNow sort all names, old and new, again. "
        'Write "// new name!" after each of the new ones.'
    )
    assert [step.rewards["sorted"] for step in steps] == [0.5, 0.5]
    assert steps[-1].terminated and steps[-1].metrics == {"action_is_valid": 1, "success": 1, "exact": 1}


def test_by_first_name_and_without_marks(replies_to) -> None:
    task = Task("a", "alphabet_sort", 0, {**DATA, "by": "first"})
    replies = ["Mia Vargas\nOmar Lindt", "Ines Moreau\nMia Vargas\nOmar Lindt"]
    assert replies_to(AlphabetSort(mark_new=False), task, replies)[-1].metrics["success"] == 1
    in_one_line = [", ".join(reply.splitlines()) for reply in replies]
    assert replies_to(AlphabetSort(mark_new=False), task, in_one_line)[-1].metrics["success"] == 1
    marked = replies_to(AlphabetSort(), task, replies)
    assert marked[-1].metrics == {"action_is_valid": 1, "success": 0, "exact": 0.5}


def test_the_compact_style(replies_to) -> None:
    task = Task("a", "alphabet_sort", 0, {"names": [["Mia", "Eva"], ["Ida"]], "by": "first"})
    world = AlphabetSort(style="compact")
    assert asyncio.run(SortEpisode(world, task).reset()).messages[0].content == "Mia Eva"
    steps = replies_to(world, task, ["Eva Mia", "Eva Ida* Mia"])
    assert steps[0].observation.messages[0].content == "Ida"
    assert sum(step.rewards["sorted"] for step in steps) == 1.0


def test_partial_credit_is_half_the_power_of_the_similarity(replies_to) -> None:
    swapped = "<answer>Mia Vargas\nOmar Lindt</answer>"  # one of two names in order: 2 * 1 / 4
    for power in (1, 4):
        step = replies_to(AlphabetSort(similarity_power=power), TASK, [swapped])[0]
        assert step.rewards["sorted"] == pytest.approx(0.5 * 0.5 * 0.5**power)
    more = replies_to(AlphabetSort(similarity_power=1), TASK, ["Omar Lindt\nx\nMia Vargas"])[0]
    assert more.rewards["sorted"] == pytest.approx(0.5 * 0.5 * 4 / 5)
    assert replies_to(AlphabetSort(partial=False), TASK, [swapped])[0].rewards["sorted"] == 0.0
    empty = replies_to(AlphabetSort(), TASK, [""])[0]
    assert empty.rewards["sorted"] == 0.0 and empty.shaped == {"format": -0.1}


@pytest.mark.parametrize(
    "reply",
    [
        "Omar Lindt\nMia Vargas\nMia Vargas",
        "Omar, Lindt, Mia Vargas",
        "Omar Lindt\nMia Vargas\n\nMia Vargas\nOmar Lindt",
        "Omar Lindt\nmia vargas",
        "Omar Lindt\nMia Vargas\n" * 5000,
        "Omar Lindt\nMia Vargas\u200b",
    ],
)
def test_lists_that_are_not_exact_earn_at_most_half(reply: str, replies_to) -> None:
    step = replies_to(AlphabetSort(similarity_power=0.01), TASK, [reply])[0]
    assert 0 < step.rewards["sorted"] < 0.25


def test_names_are_distinct_and_simple() -> None:
    for names in (FIRST_NAMES, LAST_NAMES):
        assert len(names) == len(set(names)) >= 150
        assert all(name.isascii() and name.isalpha() and name.istitle() for name in names)


def test_tasks_fit_the_settings() -> None:
    world = AlphabetSort(min_turns=2, max_turns=4, min_names=1, max_names=3, eval_size=100)
    for task in world.taskset().tasks("eval"):
        come = task.data["names"]
        assert 2 <= len(come) <= 4 and all(1 <= len(names) <= 3 for names in come) and len(come[0]) >= 2
        parts = [name.split() for names in come for name in names]
        assert len({a for a, _ in parts}) == len({b for _, b in parts}) == len(parts)
    kinds = {task.data["by"] for task in AlphabetSort().taskset().tasks("eval")}
    assert kinds == {"first", "last"}
    assert {t.data["by"] for t in AlphabetSort(by="first").taskset().tasks("eval")} == {"first"}


def test_no_first_question_is_in_both_splits() -> None:
    taskset = AlphabetSort(max_turns=1, max_names=2, style="compact", train_size=3000).taskset()
    parts = [{frozenset(task.data["names"][0]) for task in taskset.tasks(s)} for s in ("train", "eval")]
    assert parts[0] and parts[1] and not parts[0] & parts[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": 1, "min_turns": 2}, "max_turns = 1: expected min_turns = 2 or more"),
        ({"max_names": 2, "min_names": 3}, "max_names = 2: expected min_names = 3 or more"),
        ({"max_names": 30}, "expected a product of 60 or less"),
        ({"max_names": 1}, "one name needs no sorting"),
    ],
)
def test_impossible_settings_are_named(changes, message) -> None:
    with pytest.raises(ValidationError, match=message):
        AlphabetSort(**changes)


LINES = st.lists(
    st.sampled_from(["Omar Lindt", "Mia Vargas", "Ines Moreau", "Ines Moreau // new name!", "x"])
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(first=LINES, second=LINES, power=st.sampled_from([0.001, 1.0, 4.0]))
def test_no_partial_credit_reaches_the_reward_of_exact_lists(first, second, power) -> None:
    async def run() -> tuple[float, float]:
        episode = SortEpisode(AlphabetSort(similarity_power=power), TASK)
        await episode.reset()
        steps = [await episode.step(Message("assistant", "\n".join(lines))) for lines in (first, second)]
        return sum(step.rewards["sorted"] for step in steps), steps[-1].metrics["success"]

    reward, success = asyncio.run(run())
    exact = (first == ["Omar Lindt", "Mia Vargas"]) + (
        second == ["Omar Lindt", "Ines Moreau // new name!", "Mia Vargas"]
    )
    assert success == (exact == 2)
    assert reward == 1.0 if exact == 2 else reward <= 0.5 * exact + 0.25 * (2 - exact)

"""Growing lists of names: what is asked, what is exact, and what the rest earns."""

from __future__ import annotations

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.alphabet_sort import AlphabetSort
from silva.environments.worlds.names import FIRST_NAMES, LAST_NAMES
from silva.types import Task

DATA = {"names": [["Mia Vargas", "Omar Lindt"], ["Ines Moreau"]], "by": "last"}
TASK = Task("a", "alphabet_sort", 0, DATA)
FIRST = "<answer>\nOmar Lindt\nMia Vargas\n</answer>"
SECOND = "<answer>\nOmar Lindt\nInes Moreau // new name!\nMia Vargas\n</answer>"


def test_an_episode_word_by_word(first, replies_to) -> None:
    assert first(AlphabetSort(), TASK) == (
        "Sort these names by last name, in alphabetical order: Mia Vargas, Omar Lindt.\n"
        "Write one name a line, and nothing else, between <answer> and </answer>."
    )
    steps = replies_to(AlphabetSort(), TASK, [f"<think>L, V</think>{FIRST}", SECOND])
    assert said(steps[0]) == (
        "Here are more names: Ines Moreau.\nNow sort all names, old and new, again. "
        'Write "// new name!" after each of the new ones.'
    )
    assert [step.rewards["sorted"] for step in steps] == [0.5, 0.5]
    assert steps[-1].terminated and steps[-1].metrics == {"action_is_valid": 1, "success": 1, "exact": 1}


def test_by_first_name_and_without_marks(replies_to) -> None:
    task = Task("a", "alphabet_sort", 0, {**DATA, "by": "first"})
    replies = ["Mia Vargas\nOmar Lindt", "Ines Moreau, Mia Vargas, Omar Lindt"]
    assert replies_to(AlphabetSort(mark_new=False), task, replies)[-1].metrics["success"] == 1
    marked = replies_to(AlphabetSort(), task, replies)
    assert marked[-1].metrics == {"action_is_valid": 1, "success": 0, "exact": 0.5}


def test_the_compact_style(first, replies_to) -> None:
    task = Task("a", "alphabet_sort", 0, {"names": [["Mia", "Eva"], ["Ida"]], "by": "first"})
    world = AlphabetSort(style="compact")
    assert first(world, task) == "Mia Eva"
    steps = replies_to(world, task, ["Eva Mia", "Eva Ida* Mia"])
    assert said(steps[0]) == "Ida" and sum(step.rewards["sorted"] for step in steps) == 1.0


def test_partial_credit_is_half_the_power_of_the_similarity(replies_to) -> None:
    swapped = "<answer>Mia Vargas\nOmar Lindt</answer>"  # one of two names in order: 2 * 1 / 4
    for keys, reply, similarity in [
        ({"similarity_power": 1}, swapped, 0.5),
        ({}, swapped, 0.5**4),
        ({"similarity_power": 1}, "Omar Lindt\nx\nMia Vargas", 4 / 5),
        ({"partial": False}, swapped, 0.0),
        ({}, "", 0.0),
    ]:
        step = replies_to(AlphabetSort(**keys), TASK, [reply])[0]
        assert step.rewards["sorted"] == pytest.approx(0.5 * 0.5 * similarity)
        assert step.shaped == {"format": 0.0 if reply else -0.1}


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
    world = AlphabetSort(min_turns=2, max_turns=4, min_names=1, max_names=3, eval_size=60)
    tasks = world.taskset().tasks("eval")
    for task in tasks:
        come = task.data["names"]
        assert 2 <= len(come) <= 4 and all(1 <= len(names) <= 3 for names in come) and len(come[0]) >= 2
        parts = [name.split() for names in come for name in names]
        assert len({a for a, _ in parts}) == len({b for _, b in parts}) == len(parts)
    assert {task.data["by"] for task in tasks} == {"first", "last"}
    assert {task.data["by"] for task in AlphabetSort(by="first").taskset().tasks("eval")} == {"first"}

"""Boards of words: the groups are clear, and neither listing nor repeating nor padding earns anything."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.connections import Connections
from silva.environments.worlds.word_groups import WORD_GROUPS
from silva.errors import ConfigError
from silva.types import Task

SOLUTION = {
    "colours": ["blue", "grey", "red"],
    "fish": ["cod", "trout", "tuna"],
    "tools": ["drill", "saw", "wrench"],
}
WORDS = ["saw", "red", "cod", "grey", "tuna", "drill", "blue", "wrench", "trout"]
TASK = Task("c", "connections", 0, {"words": WORDS}, SOLUTION)
SMALL = Connections(groups=3, size=3)
TURNS = Connections(groups=3, size=3, form="turns")
COLOURS, FISH, TOOLS = (f"<group>{', '.join(group)}</group>" for group in SOLUTION.values())


def test_words_of_groups_are_clear() -> None:
    groups = {name: words.split() for name, words in WORD_GROUPS.items()}
    words = list(itertools.chain(*groups.values()))
    assert len(groups) >= 60 and all(len(words) >= 6 for words in groups.values())
    assert len(words) == len({*words})
    named = {part.removesuffix("s") for name in groups for part in name.casefold().split()}
    assert not named & {*words}  # no word is the name of a group
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_the_question(first) -> None:
    assert first(SMALL, TASK) == (
        "These words form 3 groups of 3 that belong together: saw, red, cod, grey, tuna, drill, blue, "
        "wrench, trout.\nGive all groups in this form: <answer><group>word1, word2, word3</group>...</answer>"
    )


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (f"<answer>{COLOURS}{FISH}{TOOLS}</answer>", 1),
        (f"<think>hm</think><answer>\n{TOOLS}\n{COLOURS} {FISH}", 1),
        ("<group>RED, grey,blue</group><group>tuna, cod, trout</group><group>saw,drill,wrench</group>", 1),
        (f"<answer>{COLOURS}</answer>", 0.5 / 3),
        (f"<answer>{COLOURS}{FISH}</answer>", 1 / 3),
        # One word in the wrong group makes two groups wrong.
        (f"{COLOURS}<group>cod, tuna, saw</group><group>trout, drill, wrench</group>", 0.5 / 3),
        ("", 0),
        ("red, grey, blue", 0),
        (f"{COLOURS}{COLOURS}", 0),  # the same group twice
        (f"{COLOURS}{COLOURS}{COLOURS}", 0),
        (f"{COLOURS}<group>blue, red, grey</group>{FISH}", 0),
        (f"{COLOURS}{FISH}{TOOLS}{FISH}", 0),
        (f"{COLOURS}{FISH}{TOOLS}<group></group>", 0),
        (f"{COLOURS}{FISH}<group>saw, drill, wrench, hammer</group>", 0),  # a word that is not there
        (f"{COLOURS}{FISH}<group>saw, drill, wrench, saw</group>", 0),
        (f"{COLOURS}{FISH}<group>saw, drill, wrench, red</group>", 0),
        (f"{COLOURS} and {FISH} and {TOOLS}", 0),  # text between the groups
        (f"<group>{', '.join(WORDS)}</group>", 0),
        (f"<group>{', '.join(WORDS)}</group>" * 3, 0),
        ("".join(f"<group>{', '.join(three)}</group>" for three in itertools.combinations(WORDS, 3)), 0),
        ("".join(f"<group>{word}</group>" for word in WORDS[:3]), 0),
        ("<group>red, grey</group><group>cod, tuna</group>", 0),
        (f"<group>{COLOURS}</group>", 0),
    ],
)
def test_only_all_groups_earn_one(reply: str, reward: float, replies_to) -> None:
    (step,) = replies_to(SMALL, TASK, [reply])
    assert step.rewards["correct"] == pytest.approx(reward)
    assert step.terminated and step.metrics["success"] == float(reward == 1)
    (step,) = replies_to(SMALL.model_copy(update={"partial": False}), TASK, [reply])
    assert step.rewards["correct"] == float(reward == 1)


def test_an_episode_of_turns_word_by_word(first, replies_to) -> None:
    assert first(TURNS, TASK) == (
        "These words form 3 groups of 3 that belong together. Name one group a turn, in this form: "
        "<answer>word1, word2, word3</answer>\nWords: saw, red, cod, grey, tuna, drill, blue, wrench, trout. "
        "4 mistakes left."
    )
    wrong = ["red, blue, saw", "red, cod, saw", "red"]
    replies = [*wrong, "<answer>Red, Blue, Grey</answer>", "saw,drill,wrench", "cod, tuna, trout"]
    board = "Words: saw, red, cod, grey, tuna, drill, blue, wrench, trout."
    steps = replies_to(TURNS, TASK, replies)
    assert list(map(said, steps[:-1])) == [
        f"Wrong, but one word away.\n{board} 3 mistakes left.",
        f"Wrong.\n{board} 2 mistakes left.",
        f"Name 3 different words of the board.\n{board} 1 mistake left.",
        "Right: colours.\nWords: saw, cod, tuna, drill, wrench, trout. 1 mistake left.",
        "Right: tools.\nWords: cod, tuna, trout. 1 mistake left.",
    ]
    assert [step.rewards["correct"] for step in steps] == pytest.approx([0, 0, 0, 1 / 6, 1 / 6, 2 / 3])
    assert [step.shaped["format"] for step in steps] == [0, 0, -0.1, 0, 0, 0]
    assert steps[-1].terminated
    assert steps[-1].metrics == {"action_is_valid": 1, "success": 1, "found": 1, "turns": 6}


def test_a_found_group_pays_once_and_mistakes_end_the_episode(replies_to) -> None:
    steps = replies_to(TURNS, TASK, ["red, blue, grey"] * 9)
    assert [step.rewards["correct"] for step in steps] == [0.5 / 3, 0, 0, 0, 0]
    assert steps[-1].metrics["success"] == 0 and steps[-1].metrics["found"] == pytest.approx(1 / 3)
    nothing = replies_to(TURNS.model_copy(update={"partial": False}), TASK, ["red, blue, grey"])
    assert nothing[0].rewards == {"correct": 0.0}


@pytest.mark.parametrize("keys", [{"groups": 3, "size": 5}, {"held_out": "boards", "size": 6}])
def test_boards_fit_the_settings_and_say_nothing_by_their_order(keys: dict) -> None:
    """Neighbours are of one group as often as chance has it."""
    world = Connections(**keys)
    together = total = 0
    for task in world.taskset().tasks("eval"):
        assert len(task.answer) == world.groups
        assert all(len(group) == world.size for group in task.answer.values())
        assert sorted(task.data["words"]) == sorted(itertools.chain(*task.answer.values()))
        assert all({*group} <= {*WORD_GROUPS[name].split()} for name, group in task.answer.items())
        group = {word: name for name, words in task.answer.items() for word in words}
        together += sum(group[a] == group[b] for a, b in itertools.pairwise(task.data["words"]))
        total += len(task.data["words"]) - 1
    assert together / total == pytest.approx((world.size - 1) / (world.groups * world.size - 1), abs=0.03)


def test_boards_or_groups_are_held_out() -> None:
    """With `boards` their groups are in both splits."""
    boards = Connections(held_out="boards", size=6).taskset()
    used = [
        Counter(name for task in boards.tasks(s)[:256] for name in task.answer) for s in ("train", "eval")
    ]
    drawn = [{str(sorted(t.answer.values())) for t in boards.tasks(s)[:256]} for s in ("train", "eval")]
    assert not drawn[0] & drawn[1] and {*used[0]} == {*used[1]}
    with pytest.raises(ConfigError, match=r"eval_share = 0\.01 leaves \d groups for evaluation, expected"):
        Connections(eval_share=0.01).taskset()

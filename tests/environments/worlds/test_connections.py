"""Boards of words: the groups are clear, and neither listing nor repeating nor padding earns anything."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.connections import Connections, ConnectionsAnswer, ConnectionsGame
from silva.environments.worlds.word_groups import WORD_GROUPS
from silva.errors import ConfigError
from silva.types import Message, Task

SOLUTION = {
    "colours": ["blue", "grey", "red"],
    "fish": ["cod", "trout", "tuna"],
    "tools": ["drill", "saw", "wrench"],
}
WORDS = ["saw", "red", "cod", "grey", "tuna", "drill", "blue", "wrench", "trout"]
TASK = Task("c", "connections", 0, {"words": WORDS}, SOLUTION)
SMALL = {"groups": 3, "size": 3}
COLOURS, FISH, TOOLS = (f"<group>{', '.join(group)}</group>" for group in SOLUTION.values())


def reward(reply: str, **changes) -> float:
    async def run() -> float:
        episode = ConnectionsAnswer(Connections(**SMALL, **changes), TASK)
        await episode.reset()
        step = await episode.step(Message("assistant", reply))
        assert step.terminated and step.metrics["success"] == float(step.rewards["correct"] == 1.0)
        return step.rewards["correct"]

    return asyncio.run(run())


def test_words_of_groups_are_clear() -> None:
    groups = {name: words.split() for name, words in WORD_GROUPS.items()}
    assert len(groups) >= 60 and all(len(words) >= 6 for words in groups.values())
    assert max(Counter(itertools.chain(*groups.values())).values()) == 1
    named = {part.removesuffix("s") for name in groups for part in name.casefold().split()}
    assert not named & set(itertools.chain(*groups.values()))  # no word is the name of a group
    assert all(
        word.isascii() and word.isalpha() and word.islower() for words in groups.values() for word in words
    )


def test_the_question_and_its_answers() -> None:
    prompt = asyncio.run(ConnectionsAnswer(Connections(**SMALL), TASK).reset()).messages[0].content
    assert prompt == (
        "These words form 3 groups of 3 that belong together: saw, red, cod, grey, tuna, drill, blue, "
        "wrench, trout.\nGive all groups in this form: <answer><group>word1, word2, word3</group>...</answer>"
    )
    assert reward(f"<answer>{COLOURS}{FISH}{TOOLS}</answer>") == 1.0
    assert reward(f"<think>hm</think><answer>\n{TOOLS}\n{COLOURS} {FISH}") == 1.0
    assert (
        reward("<group>RED, grey,blue</group><group>tuna, cod, trout</group><group>saw,drill,wrench</group>")
        == 1
    )
    assert reward(f"<answer>{COLOURS}</answer>") == 0.5 / 3
    assert reward(f"<answer>{COLOURS}{FISH}</answer>") == 1 / 3
    assert reward(f"<answer>{COLOURS}{FISH}</answer>", partial=False) == 0.0
    # One word in the wrong group makes two groups wrong.
    assert reward(f"{COLOURS}<group>cod, tuna, saw</group><group>trout, drill, wrench</group>") == 0.5 / 3


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "red, grey, blue",
        f"{COLOURS}{COLOURS}",  # the same group twice
        f"{COLOURS}{COLOURS}{COLOURS}",
        f"{COLOURS}<group>blue, red, grey</group>{FISH}",
        f"{COLOURS}{FISH}{TOOLS}{FISH}",
        f"{COLOURS}{FISH}{TOOLS}<group></group>",
        f"{COLOURS}{FISH}<group>saw, drill, wrench, hammer</group>",  # a word that is not there
        f"{COLOURS}{FISH}<group>saw, drill, wrench, saw</group>",
        f"{COLOURS}{FISH}<group>saw, drill, wrench, red</group>",
        f"{COLOURS} and {FISH} and {TOOLS}",  # text between the groups
        f"<group>{', '.join(WORDS)}</group>" * 3,
        "".join(f"<group>{', '.join(three)}</group>" for three in itertools.combinations(WORDS, 3)),
        f"<group>{COLOURS}</group>",
    ],
)
def test_what_used_to_pay_earns_nothing(reply: str) -> None:
    assert reward(reply) == 0.0


def test_all_words_in_one_group_or_groups_of_other_sizes_earn_nothing() -> None:
    assert reward(f"<group>{', '.join(WORDS)}</group>") == 0.0
    assert reward("".join(f"<group>{word}</group>" for word in WORDS[:3])) == 0.0
    assert reward("<group>red, grey</group><group>cod, tuna</group>") == 0.0


def test_an_episode_of_turns_word_by_word(replies_to) -> None:
    world = Connections(**SMALL, form="turns")
    first = asyncio.run(ConnectionsGame(world, TASK).reset()).messages[0].content
    assert first == (
        "These words form 3 groups of 3 that belong together. Name one group a turn, in this form: "
        "<answer>word1, word2, word3</answer>\nWords: saw, red, cod, grey, tuna, drill, blue, wrench, trout. "
        "4 mistakes left."
    )
    wrong = ["red, blue, saw", "red, cod, saw", "red"]
    replies = [*wrong, "<answer>Red, Blue, Grey</answer>", "saw,drill,wrench", "cod, tuna, trout"]
    board = "Words: saw, red, cod, grey, tuna, drill, blue, wrench, trout."
    steps = replies_to(world, TASK, replies)
    assert [step.observation.messages[0].content for step in steps[:-1]] == [
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
    steps = replies_to(Connections(**SMALL, form="turns"), TASK, ["red, blue, grey"] * 9)
    assert [step.rewards["correct"] for step in steps] == [0.5 / 3, 0, 0, 0, 0]
    assert steps[-1].metrics["success"] == 0 and steps[-1].metrics["found"] == pytest.approx(1 / 3)
    nothing = replies_to(Connections(**SMALL, form="turns", partial=False), TASK, ["red, blue, grey"])
    assert nothing[0].rewards == {"correct": 0.0}


def test_boards_fit_the_settings_and_groups_are_held_out() -> None:
    taskset = Connections(groups=3, size=5).taskset()
    parts = []
    for split in ("train", "eval"):
        names = set()
        for task in taskset.tasks(split)[:256]:
            assert len(task.answer) == 3 and all(len(group) == 5 for group in task.answer.values())
            assert sorted(task.data["words"]) == sorted(itertools.chain(*task.answer.values()))
            assert all(set(group) <= set(WORD_GROUPS[name].split()) for name, group in task.answer.items())
            names |= set(task.answer)
        parts.append(names)
    assert not parts[0] & parts[1] and len(parts[0]) > 60 and len(parts[1]) > 15
    boards = Connections(held_out="boards", size=6).taskset()
    drawn = [{json_key(task) for task in boards.tasks(split)[:256]} for split in ("train", "eval")]
    assert not drawn[0] & drawn[1]


def json_key(task: Task) -> tuple:
    return tuple(sorted(map(tuple, task.answer.values())))


def test_words_are_shuffled() -> None:
    """The order of the board says nothing: neighbours are of one group as often as chance has it."""
    together = total = 0
    for task in Connections().taskset().tasks("eval"):
        group = {word: name for name, words in task.answer.items() for word in words}
        pairs = itertools.pairwise(task.data["words"])
        together += sum(group[a] == group[b] for a, b in pairs)
        total += 15
    assert together / total == pytest.approx(3 / 15, abs=0.03)


def test_impossible_settings_are_named() -> None:
    with pytest.raises(
        ValidationError, match="mistakes = 4: expected 2 or less, since on a board of 2 groups"
    ):
        Connections(form="turns", groups=2, size=2)
    assert Connections(form="turns", groups=2, size=2, mistakes=2).mistakes == 2
    with pytest.raises(ConfigError, match=r"eval_share = 0\.01 leaves \d groups for evaluation, expected"):
        Connections(eval_share=0.01).taskset()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(groups=st.lists(st.lists(st.sampled_from([*WORDS, "hammer"]), min_size=1, max_size=4), max_size=5))
def test_no_partial_credit_reaches_the_solution_in_one_answer(groups) -> None:
    got = reward("<answer>" + "".join(f"<group>{', '.join(group)}</group>" for group in groups) + "</answer>")
    right = {frozenset(group) for group in SOLUTION.values()}
    if (
        {frozenset(group) for group in groups} == right
        and len(groups) == 3
        and all(len(g) == 3 for g in groups)
    ):
        assert got == 1.0
    else:
        assert got <= 1 / 3


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_partial_credit_reaches_the_solution_in_turns(data) -> None:
    guess = st.sampled_from([*map(list, SOLUTION.values()), ["red", "cod", "saw"], ["red", "red", "red"]])

    async def run() -> tuple[float, float]:
        episode = ConnectionsGame(Connections(**SMALL, form="turns"), TASK)
        await episode.reset()
        total = 0.0
        while True:
            step = await episode.step(Message("assistant", ", ".join(data.draw(guess))))
            total += step.rewards["correct"]
            if step.terminated:
                return total, step.metrics["success"]

    total, success = asyncio.run(run())
    assert total == pytest.approx(1.0) if success else total <= 1 / 3 + 1e-9

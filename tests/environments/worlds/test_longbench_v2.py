"""A long text is searched and scrolled; rows of LongBench-v2; what journals say is what is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from tests.environments.conftest import call, said

from silva.environments.worlds.longbench_v2 import DividedText, LongBench, LongBenchEpisode, journal
from silva.errors import ConfigError
from silva.types import Message, Task

TEXT = "the cat sat here the dog ran away a bird sang loud"
TASK = Task(
    "l",
    "longbench_v2",
    0,
    {"question": "What sang?", "choices": ["cat", "dog", "bird", "frog"], "document": "d"},
    "C",
)


def episode(text: str = TEXT, **keys: Any) -> LongBenchEpisode:
    world = LongBench(part_words=4, overlap=0, **keys)
    return LongBenchEpisode(world, TASK, lambda key: DividedText(text, world.part_words, world.overlap))


def search(query: str) -> Message:
    return call("search", query=query)


DOWN, UP = call("scroll_down"), call("scroll_up")
ONE, TWO, THREE = (
    "[part 1 of 3]\nthe cat sat here",
    "[part 2 of 3]\nthe dog ran away",
    "[part 3 of 3]\na bird sang loud",
)


def test_an_episode_word_by_word(play_out) -> None:
    first = asyncio.run(episode().reset())
    assert said(first) == (
        "Answer the question about a long text. `search` shows the part of it that fits some words best; "
        "`scroll_down` and `scroll_up` show the parts after and before.\nQuestion: What sang?\n"
        "A. cat\nB. dog\nC. bird\nD. frog\n"
        "End with the letter of the right choice, in this form: Final Answer: B"
    )
    assert [tool.name for tool in first.tools] == ["search", "scroll_down", "scroll_up"]
    replies = [UP, DOWN, search("who sang loud"), DOWN, UP, UP, UP, search("fish"), DOWN, "Final Answer: C"]
    *steps, last = play_out(episode(), replies.__getitem__)
    before, after = "Error: there is nothing before it", "Error: there is nothing after it"
    none = "Error: no part of the text has any of these words"
    # Reading begins before the first part, and failed calls do not move.
    assert list(map(said, steps)) == [before, ONE, THREE, after, TWO, ONE, before, none, TWO]
    assert last.rewards == {"correct": 1.0} and last.terminated


def test_calls_of_one_reply_run_in_their_order(play_out) -> None:
    several = [each.tool_calls[0] for each in (search("dog"), DOWN, UP, search("cat"), DOWN)]
    replies = [Message("assistant", "", tool_calls=tuple(several)), "Final Answer: A"]
    step, _ = play_out(episode(), replies.__getitem__)
    assert [message.content for message in step.observation.messages] == [TWO, THREE, TWO, ONE, TWO]


def test_a_fork_reads_on_from_the_same_place() -> None:
    async def run() -> tuple[str, str]:
        played = episode()
        await played.reset()
        await played.step(search("dog"))
        twin = await played.fork(5)
        assert twin.document is played.document
        return said(await played.step(DOWN)), said(await twin.step(UP))

    assert asyncio.run(run()) == (THREE, ONE)


def rows(count: int) -> list[dict]:
    return [
        {
            "question": f"Question {i}?",
            **{f"choice_{letter}": f"{letter} of {i}" for letter in "ABCD"},
            "answer": "ABCD"[i % 4],
            "context": f"Text {i // 2} about a thing. " * 50,
        }
        for i in range(count)
    ]


def test_rows_of_longbench_and_questions_about_one_text_stay_together(rows_file, play_out) -> None:
    taskset = LongBench(path=rows_file(rows(80)), eval_size=8, train_size=300).taskset()
    parts = []
    for split in ("train", "eval"):
        tasks = taskset.tasks(split)
        numbers = [int(task.data["question"].split()[1][:-1]) for task in tasks]
        for task, number in zip(tasks, numbers, strict=True):
            assert task.answer == "ABCD"[number % 4]
            assert task.data["choices"] == [f"{letter} of {number}" for letter in "ABCD"]
            assert len(json.dumps(task.data)) < 300  # the text is not in it
        parts.append({number // 2 for number in numbers})
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    steps = play_out(taskset.environment(tasks[0]), [search("thing"), "Final Answer: A"].__getitem__)
    assert f"Text {numbers[0] // 2} about a thing." in said(steps[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "E"}, r"rows\.jsonl:2: answer: got 'E', expected one of A, B, C, D"),
        ({"choice_C": None}, r"rows\.jsonl:2: choice_C: got 'None', expected text, as in LongBench-v2"),
        ({"context": " "}, r"rows\.jsonl:2: context: got ' ', expected text"),
    ],
)
def test_wrong_rows_are_named(changes, message, rows_file) -> None:
    first, second = rows(2)
    with pytest.raises(ConfigError, match=message):
        LongBench(path=rows_file([first, {**second, **changes}])).taskset()


def test_what_is_asked_stands_in_the_journal_once() -> None:
    world = LongBench(words=1000, eval_size=30)
    for task in world.taskset().tasks("eval"):
        text, _ = journal(int(task.data["document"]), 1000)
        name, town = task.data["question"].removeprefix("What did ").removesuffix("?").split(" bring to ")
        (line,) = (line for line in text.splitlines() if f" {name} came to {town} " in line)
        assert f"brought {task.data['choices']['ABCD'.index(task.answer)]}. " in line
        assert len(set(task.data["choices"])) == 4
        assert all(f"brought {choice}. " in text for choice in task.data["choices"])
        assert 1000 <= len(text.split()) < 1030


def test_no_letter_is_a_good_guess() -> None:
    letters = Counter(task.answer for task in LongBench(words=300, train_size=400).taskset().tasks("train"))
    assert min(letters.values()) > 70

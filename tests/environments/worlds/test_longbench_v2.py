"""A long text is searched and scrolled; rows of LongBench-v2; what journals say is what is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from silva.environments.worlds.longbench_v2 import Document, LongBench, LongBenchEpisode, journal
from silva.errors import ConfigError
from silva.types import Message, Task, ToolCall

TEXT = "the cat sat here the dog ran away a bird sang loud"
TASK = Task(
    "l",
    "longbench_v2",
    0,
    {"question": "What sang?", "choices": ["cat", "dog", "bird", "frog"], "document": "d"},
    "C",
)
SMALL = LongBench(part_words=4, overlap=0)


def call(*names: str | tuple[str, str]) -> Message:
    calls = [ToolCall(n, {}) if isinstance(n, str) else ToolCall(n[0], {"query": n[1]}) for n in names]
    return Message("assistant", "", tool_calls=tuple(calls))


def episode(world: LongBench = SMALL, text: str = TEXT) -> LongBenchEpisode:
    return LongBenchEpisode(world, TASK, lambda key: Document(text, world.part_words, world.overlap))


def texts_of(step) -> list[str]:
    return [message.content for message in step.observation.messages]


async def walk(played, *replies: Message | str):
    steps = []
    for reply in replies:
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        steps.append(await played.step(message))
    return steps


def test_an_episode_word_by_word() -> None:
    async def run():
        played = episode()
        first = await played.reset()
        return first, await walk(
            played,
            call(("search", "who sang loud")),
            call("scroll_down"),
            call("scroll_up"),
            call("scroll_up"),
            call("scroll_up"),
            call(("search", "fish")),
            call("scroll_down"),
            "Final Answer: C",
        )

    first, steps = asyncio.run(run())
    assert first.messages[0].content == (
        "Answer the question about a long text. `search` shows the part of it that fits some words best; "
        "`scroll_down` and `scroll_up` show the parts after and before.\nQuestion: What sang?\n"
        "A. cat\nB. dog\nC. bird\nD. frog\n"
        "End with the letter of the right choice, in this form: Final Answer: B"
    )
    assert [tool.name for tool in first.tools] == ["search", "scroll_down", "scroll_up"]
    assert [texts_of(step) for step in steps[:-1]] == [
        ["[part 3 of 3]\na bird sang loud"],
        ["Error: there is nothing after it"],
        ["[part 2 of 3]\nthe dog ran away"],
        ["[part 1 of 3]\nthe cat sat here"],
        ["Error: there is nothing before it"],
        ["Error: no part of the text has any of these words"],
        ["[part 2 of 3]\nthe dog ran away"],  # failed calls do not move
    ]
    assert steps[-1].rewards == {"correct": 1.0} and steps[-1].terminated


def test_reading_begins_before_the_first_part() -> None:
    async def run():
        played = episode()
        await played.reset()
        return await walk(played, call("scroll_up"), call("scroll_down"))

    before, first = asyncio.run(run())
    assert texts_of(before) == ["Error: there is nothing before it"]
    assert texts_of(first) == ["[part 1 of 3]\nthe cat sat here"]


def test_calls_of_one_reply_run_in_their_order() -> None:
    async def run():
        played = episode()
        await played.reset()
        return await walk(
            played, call(("search", "dog"), "scroll_down", "scroll_up", ("search", "cat"), "scroll_down")
        )

    (step,) = asyncio.run(run())
    assert [text[6] for text in texts_of(step)] == ["2", "3", "2", "1", "2"]


def test_a_fork_reads_on_from_the_same_place() -> None:
    async def run():
        played = episode()
        await played.reset()
        await walk(played, call(("search", "dog")))
        twin = await played.fork(5)
        down = await walk(played, call("scroll_down"))
        up = await walk(twin, call("scroll_up"))
        return texts_of(down[0]), texts_of(up[0])

    assert asyncio.run(run()) == (["[part 3 of 3]\na bird sang loud"], ["[part 1 of 3]\nthe cat sat here"])


def test_calls_run_out_and_nothing_is_earned() -> None:
    async def run():
        played = episode(SMALL.model_copy(update={"max_tool_calls": 1}))
        await played.reset()
        return await walk(played, call("scroll_down"), call("scroll_down"))

    last = asyncio.run(run())[-1]
    assert last.truncated and last.rewards == {"correct": 0.0} and last.metrics["success"] == 0


def rows(count: int) -> list[dict]:
    return [
        {
            "_id": str(i),
            "domain": "Single-Document QA",
            "question": f"Question {i}?",
            **{f"choice_{letter}": f"{letter} of {i}" for letter in "ABCD"},
            "answer": "ABCD"[i % 4],
            "context": f"Text {i // 2} about a thing. " * 50,
        }
        for i in range(count)
    ]


def test_rows_of_longbench_and_questions_about_one_text_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "longbench.json"
    path.write_text(json.dumps(rows(80)))
    taskset = LongBench(path=str(path), eval_size=8, train_size=300).taskset()
    parts = []
    for split in ("train", "eval"):
        tasks = taskset.tasks(split)
        for task in tasks:
            number = int(task.data["question"].split()[1][:-1])
            assert task.answer == "ABCD"[number % 4]
            assert task.data["choices"] == [f"{letter} of {number}" for letter in "ABCD"]
            assert len(json.dumps(task.data)) < 300  # the text is not in it
        parts.append({int(task.data["question"].split()[1][:-1]) // 2 for task in tasks})
    assert parts[0] and parts[1] and not parts[0] & parts[1]

    async def run():
        played = taskset.environment(taskset.tasks("eval")[0])
        await played.reset()
        return await walk(played, call(("search", "thing")))

    number = int(taskset.tasks("eval")[0].data["question"].split()[1][:-1]) // 2
    assert f"Text {number} about a thing." in texts_of(asyncio.run(run())[0])[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "E"}, r"bad\.jsonl:2: answer: got 'E', expected one of A, B, C, D"),
        ({"choice_C": None}, r"bad\.jsonl:2: choice_C: got 'None', expected text, as in LongBench-v2"),
        ({"context": " "}, r"bad\.jsonl:2: context: got ' ', expected text"),
    ],
)
def test_wrong_rows_are_named(changes, message, tmp_path: Path) -> None:
    first, second = rows(2)
    (tmp_path / "bad.jsonl").write_text(json.dumps(first) + "\n" + json.dumps({**second, **changes}))
    with pytest.raises(ConfigError, match=message):
        LongBench(path=str(tmp_path / "bad.jsonl")).taskset()


def test_what_is_asked_stands_in_the_journal_once() -> None:
    world = LongBench(words=1000, eval_size=60)
    for task in world.taskset().tasks("eval"):
        text, _ = journal(int(task.data["document"]), 1000)
        name, town = task.data["question"].removeprefix("What did ").removesuffix("?").split(" bring to ")
        (line,) = (line for line in text.splitlines() if f" {name} came to {town} " in line)
        assert f"brought {task.data['choices']['ABCD'.index(task.answer)]}. " in line
        assert len(set(task.data["choices"])) == 4
        assert all(f"brought {choice}. " in text for choice in task.data["choices"])
        assert 1000 <= len(text.split()) < 1030


def test_no_letter_is_a_good_guess_and_texts_are_in_one_split() -> None:
    taskset = LongBench(words=300, train_size=800).taskset()
    letters = Counter(task.answer for task in taskset.tasks("train"))
    assert min(letters.values()) > 150
    parts = [{task.data["document"] for task in taskset.tasks(s)} for s in ("train", "eval")]
    assert not parts[0] & parts[1]


def test_parts_that_do_not_go_on_are_refused() -> None:
    with pytest.raises(ValidationError, match="overlap = 190: expected less than part_words = 100"):
        LongBench(part_words=100)

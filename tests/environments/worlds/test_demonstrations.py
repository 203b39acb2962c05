"""Recorded dialogues: the shapes that are read, what they show, what counts as the same action."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.environments.conftest import call, said

from silva.environments.worlds.demonstrations import Demonstrations, action_of
from silva.errors import ConfigError
from silva.types import Message

CALL = '<tool_call>{"name": "visit", "arguments": {"title": "Rome"}}</tool_call>'
FILE = str(Path(__file__).parent / "demonstrations.jsonl")


def dialogue(number: int) -> dict[str, Any]:
    return {"conversations": [
        {"from": "human", "value": f"Where is {number}?"},
        {"from": "gpt", "value": f"<think>Look.</think>{CALL}"},
        {"from": "tool", "value": "In Italy."}, {"from": "gpt", "value": f"Italy {number}"},
    ]}  # fmt: skip


@pytest.fixture
def expert(first, play_out):
    """What is shown and said in each training demonstration, in turns, if the expert plays."""

    def run(path: str, **keys: Any) -> list[list[str]]:
        world = Demonstrations(path=path, eval_size=2, train_size=60, **keys)
        taskset, played = world.taskset(), []
        for task in taskset.tasks("train"):
            episode, told = taskset.environment(task), [first(world, task)]
            replies: list[str] = []
            steps = play_out(episode, lambda _, e=episode, r=replies: r.append(e.expert_reply()) or r[-1])
            for reply, step in zip(replies, steps, strict=True):
                told += [reply, *(message.content for message in step.observation.messages)]
            played.append(told)
        return played

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (dialogue, ["Where is 7?", CALL, "In Italy.", "Italy 7"]),
        (
            lambda n: {"prompt": f"What is {n}?", "answer": f"<think>Hm.</think> It is {n}"},
            ["What is 7?", "It is 7"],
        ),
        (
            lambda n: {"messages": [
                {"role": "user", "content": f"Q{n}"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"type": "function", "function": {"name": "visit", "arguments": '{"title": "Rome"}'}}]},
                {"role": "tool", "content": "R"}, {"role": "assistant", "content": "A"}]},
            ["Q7", CALL.replace("{", "\n{", 1).replace("}}<", "}}\n<"), "R", "A"],
        ),
        (
            lambda n: {
                "system_prompt": {"role": "system", "content": ""}, "done": True, "return_": 1.0, "tools": [],
                "state": [{"role": "user", "content": f"Q{n}"},
                          {"role": "assistant", "content": f"I look.\n{CALL}"},
                          {"role": "tool", "content": "R"}],
                "action": {"role": "assistant", "content": "So it is.\n\nFinal Answer: A"},
                "next_obs": {"role": "user", "content": "RESULT"}},
            ["Q7", CALL, "R", "Final Answer: A"],
        ),
    ],
)  # fmt: skip
def test_shapes_of_rows_give_the_same_dialogue(rows_file, expert, row: Any, expected: list[str]) -> None:
    played = expert(rows_file(map(row, range(40))))
    assert played and all([re.sub(r"\d+", "7", text) for text in each] == expected for each in played)


def test_thoughts_are_kept_if_asked_for(rows_file, expert) -> None:
    played = expert(rows_file(map(dialogue, range(40))), thoughts=True)
    assert all(each[1] == f"<think>Look.</think>{CALL}" for each in played)


def test_steps_of_act_prm_count_once_they_are_done_and_won(rows_file, expert) -> None:
    action = {"role": "assistant", "content": "A"}
    rows = [
        {"done": done, "return_": value, "action": action,
         "state": [{"role": "user", "content": f"{n} {done} {value}"}]}
        for n in range(40) for done in (True, False) for value in (1.0, -1.0)
    ]  # fmt: skip
    shown = [each[0] for each in expert(rows_file(rows))]
    assert shown and all(text.endswith("True 1.0") for text in shown)


@pytest.mark.slow
def test_a_reply_matches_if_it_does_the_same_whatever_it_thinks(replies_to) -> None:
    world = Demonstrations(path=FILE, eval_size=8)
    task = world.taskset().tasks("train")[0]
    recorded = [task.data["messages"][i]["content"] for i in (1, 3, 5)]
    asked = json.loads(recorded[0].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    right = [call(asked["name"], **asked["arguments"]),
             *(Message("assistant", text, reasoning="my own") for text in recorded[1:])]  # fmt: skip
    steps = replies_to(world, task, right)
    assert [step.rewards["match"] for step in steps[::2]] == [1 / 3, 1 / 3]
    assert steps[0].observation.messages[0].role == "tool"
    wrong = replies_to(world, task, ["nonsense", *right[1:]])
    assert [step.rewards["match"] > 0 for step in wrong] == [False, False, True]
    assert said(wrong[0]) == said(steps[0])
    assert wrong[-1].terminated and wrong[-1].metrics["success"] == 0.0


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think>a</think>\n\nup", "up"),
        ("I go up.\n<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
        ("So.\nFinal Answer: 4", "Final Answer: 4"),
        ("up", "up"),
    ],
)
def test_an_action_is_a_reply_without_its_thoughts(reply: str, action: str) -> None:
    assert action_of(reply) == action


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "rows.jsonl:1: messages: got a dialogue that begins with a reply"),
        ({"prompt": "q", "answer": 4}, "rows.jsonl:1: answer: got 4, expected text"),
        ({"messages": [{"role": "user", "content": "q"}]},
         "messages: got no reply, expected a dialogue with one"),
        ({"state": "q", "action": "a", "done": True}, "rows.jsonl:1: state, action: expected a list of"),
        ({"state": [], "action": {}, "done": False}, "holds no demonstration"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(rows_file, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Demonstrations(path=rows_file([row])).taskset()


def test_a_worked_solution_is_imitated_whole_and_how_rows_were_read_is_told(rows_file, expert) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(40)]
    path = rows_file(rows)
    assert all("\n#### " in each[1] for each in expert(path))
    (note, *_) = Demonstrations(path=path).taskset().notes
    assert note == "demonstrations: 40 rows, read as table: prompt in `question`, answer in `answer`"
    given = Demonstrations(rows=tuple(rows)).taskset().tasks("train")
    assert list(given) == list(Demonstrations(path=path).taskset().tasks("train")) and len(given) > 20

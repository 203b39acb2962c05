"""Tool worlds: a user's own in 15 lines, tool errors, limits, hidden observations."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from silva.environments.tool_qa import Question, ToolQA
from silva.errors import RecordError
from silva.protocols import Forkable
from silva.tools.function import ToolError, tool
from silva.types import Message, Task, ToolCall

OWN_WORLD = '''\
from typing import Literal
from silva.environments.tool_qa import Question, ToolQA

PRICES = {"tea": 3, "coffee": 4, "water": 1}

def price(drink: str) -> int:
    """Price of a drink."""
    return PRICES[drink]

class Drinks(ToolQA):
    type: Literal["drinks"] = "drinks"
    eval_size: int = 1
    questions = lambda self: [Question(f"What does {name} cost?", str(cost)) for name, cost in PRICES.items()]
    tools = lambda self: [price]
'''


def ask_twice(word: str) -> str:
    """The word, twice."""
    if not word.isalpha():
        raise ToolError("only letters")
    return word * 2


class Twice(ToolQA):
    type: str = "twice"
    eval_size: int = 1

    def questions(self):
        chain = [Question("Twice ab?", "abab"), Question("Twice cd?", "cdcd")]
        return [chain, Question("Twice x?", "xx"), Question("Twice y?", "yy")]

    def tools(self):
        return [ask_twice]


CHAIN = Task("t", "twice", 0, {"questions": ["Twice ab?", "Twice cd?"]}, ["abab", "cdcd"])


def call(word: object = "ab", name: str = "ask_twice", number: int = 0) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, {"word": word}),), id=f"reply-{number}")


def texts(messages) -> list[str]:
    return [message.content for message in messages]


def test_a_world_of_your_own_takes_fifteen_lines(tmp_path: Path, replies_to) -> None:
    assert len(OWN_WORLD.splitlines()) <= 15
    path = tmp_path / "drinks.py"
    path.write_text(OWN_WORLD)
    spec = importlib.util.spec_from_file_location("drinks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = module.Drinks()
    taskset = settings.taskset()
    task = taskset.tasks("train")[0]
    first = asyncio.run(taskset.environment(task).reset())
    assert first.messages[0].content == task.data["questions"][0]
    assert first.tools[0].parameters["properties"] == {"drink": {"type": "string"}}
    drink = task.data["questions"][0].split()[2]
    asks = Message("assistant", "", tool_calls=(ToolCall("price", {"drink": drink}),))
    steps = replies_to(settings, task, [asks, f"It costs {task.answer[0]}."])
    assert texts(steps[0].observation.messages) == [task.answer[0]]
    assert steps[1].terminated and steps[1].rewards == {"correct": 1.0}


def test_a_chain_is_right_when_every_answer_is(replies_to) -> None:
    right = replies_to(Twice(), CHAIN, [call(), "abab", call("cd"), "<answer>CDCD</answer>"])
    assert [texts(step.observation.messages) for step in right] == [["abab"], ["Twice cd?"], ["cdcd"], []]
    assert [step.rewards["correct"] for step in right] == [0, 0, 0, 1]
    assert right[-1].terminated and right[-1].metrics == {"success": 1.0, "answered": 1.0}
    half = replies_to(Twice(), CHAIN, ["abab", "no idea"])
    assert half[-1].terminated and half[-1].rewards == {"correct": 0.0}
    assert half[-1].metrics == {"success": 0.0, "answered": 0.5}
    assert len(replies_to(Twice(), CHAIN, ["wrong", "abab"])) == 1


def test_what_the_model_gets_wrong_is_told_to_it(replies_to) -> None:
    malformed = Message("assistant", "<tool_call>{</tool_call>", errors=("tool call 1 is not JSON",))
    steps = replies_to(Twice(), CHAIN, [malformed, call("1"), call(5), call(name="search"), "abab", "cdcd"])
    shown = [step.observation.messages[0] for step in steps[:4]]
    assert texts(shown) == [
        "Error: tool call 1 is not JSON",
        "Error: only letters",
        "Error: ask_twice: argument word: Input should be a valid string (got 5)",
        "Error: no tool called 'search': there is ask_twice",
    ]
    assert {message.role for message in shown} == {"tool"}
    assert [step.metrics["tool_errors"] for step in steps[:4]] == [1, 1, 1, 1]
    assert steps[-1].rewards == {"correct": 1.0}


def test_a_fault_of_the_tool_is_not_hidden(replies_to) -> None:
    def broken(word: str) -> str:
        raise KeyError(word)

    class Broken(Twice):
        def tools(self):
            return [tool(broken, name="ask_twice")]

    with pytest.raises(KeyError, match="ab"):
        replies_to(Broken(), CHAIN, [call()])


def test_calls_are_limited(replies_to) -> None:
    steps = replies_to(Twice(max_tool_calls=2), CHAIN, [call(), call(), call()])
    assert [step.truncated for step in steps] == [False, False, True]
    assert steps[-1].metrics["success"] == 0.0
    three = Message("assistant", "", tool_calls=(ToolCall("ask_twice", {"word": "a"}),) * 3)
    both = replies_to(Twice(max_tool_calls=2), CHAIN, [three, "abab", "cdcd"])
    assert texts(both[0].observation.messages) == ["aa", "aa", "Error: no tool calls are left"]
    assert both[-1].rewards == {"correct": 1.0}


def test_a_required_tool_must_be_called_for_every_question(replies_to) -> None:
    settings = Twice(tool_required=True)
    steps = replies_to(
        settings, CHAIN, ["abab", call(), "abab", "cdcd", call("9"), "cdcd", call("cd"), "cdcd"]
    )
    nudges = [texts(step.observation.messages) == ["Call a tool before you answer."] for step in steps]
    assert nudges == [True, False, False, True, False, True, False, False]  # a failed call does not count
    assert steps[-1].rewards == {"correct": 1.0}
    stubborn = replies_to(Twice(tool_required=True, max_tool_calls=2), CHAIN, ["abab"] * 3)
    assert len(stubborn) == 3 and stubborn[-1].truncated and stubborn[-1].rewards == {"correct": 0.0}


def test_older_results_are_replaced_in_a_whole_new_context(replies_to) -> None:
    settings = Twice(hide_observations=True)
    answer = Message("assistant", "abab", id="reply-1")
    steps = replies_to(settings, CHAIN, [call(), answer, call("cd", number=2), call("ef", number=3)])
    first, second, third, fourth = (step.observation for step in steps)
    assert first.context is None and texts(first.messages) == ["abab"]
    assert second.context is None and texts(second.messages) == ["Twice cd?"]
    assert third.context is not None and fourth.context is not None
    assert texts(third.context) == ["Twice ab?", "", "...", "abab", "Twice cd?", "", "cdcd"]
    assert texts(fourth.context) == ["Twice ab?", "", "...", "abab", "Twice cd?", "", "...", "", "efef"]
    ids = [message.id for message in fourth.context]
    assert len(set(ids)) == len(ids) and ids[1::2][:2] == ["reply-0", "reply-1"]
    assert third.context[2].id == first.messages[0].id  # the same message, edited
    assert third.context[1] == call()
    assert third.messages == () and third.tools == first.tools


def test_hiding_needs_replies_that_can_be_named(replies_to) -> None:
    nameless = Message("assistant", "", tool_calls=(ToolCall("ask_twice", {"word": "a"}),))
    with pytest.raises(RecordError, match="hide_observations needs replies with an id"):
        replies_to(Twice(hide_observations=True), CHAIN, [nameless, nameless])


def test_forks_keep_their_own_history() -> None:
    async def run():
        environment = Twice().taskset().environment(CHAIN)
        assert isinstance(environment, Forkable)
        await environment.reset()
        await environment.step(call())
        fork = await environment.fork(1)
        step = await fork.step(Message("assistant", "abab"))
        return environment, fork, step

    environment, fork, step = asyncio.run(run())
    assert (environment.question, fork.question, len(environment.history), len(fork.history)) == (0, 1, 3, 5)
    assert texts(step.observation.messages) == ["Twice cd?"]
    assert fork.tools["ask_twice"] is environment.tools["ask_twice"]


def test_grading_of_numbers_and_words() -> None:
    settings = Twice()
    assert settings.grade("It is 1,200.", "1200") and settings.grade("12", "12.0")
    assert not settings.grade("12 or 13", "12")
    assert settings.grade("<answer>The Nile</answer>", "the nile")
    assert not settings.grade("Nile, Amazon, Rhine", "Nile")
    assert not settings.grade("room 12", "B 12")

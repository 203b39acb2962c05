"""Tool worlds: a user's own in 15 lines, tool errors, limits, hidden observations."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.environments.conftest import call, said

from silva.config.plugins import find_settings
from silva.environments.bases.tool_qa import Question, ToolQA
from silva.errors import CapabilityError
from silva.protocols import Scripted
from silva.tools.function import ToolError, tool
from silva.types import Message, Task, ToolCall

OWN_WORLD = '''\
from silva.environments.bases.tool_qa import Question, ToolQA

PRICES = {"tea": 3, "coffee": 4, "water": 1}

def price(drink: str) -> int:
    """Price of a drink."""
    return PRICES[drink]

class Drinks(ToolQA):
    eval_size: int = 1
    eval_share: float = 0.5
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
    eval_share: float = 0.5

    def questions(self):
        chain = [Question("Twice ab?", "abab"), Question("Twice cd?", "cdcd")]
        return [chain, Question("Twice x?", "xx"), Question("Twice y?", "yy")]

    def tools(self):
        return [ask_twice]


CHAIN = Task("t", "twice", 0, {"questions": ["Twice ab?", "Twice cd?"]}, ["abab", "cdcd"])


def ask(word: object = "ab", name: str = "ask_twice") -> Message:
    return call(name, word=word)


def texts(messages) -> list[str]:
    return [message.content for message in messages]


def test_a_world_of_your_own_takes_fifteen_lines(tmp_path: Path, replies_to) -> None:
    assert len(OWN_WORLD.splitlines()) <= 15
    path = tmp_path / "drinks.py"
    path.write_text(OWN_WORLD)
    found = find_settings(f"{path}:Drinks", ToolQA)
    assert found is not None
    task = found().taskset().tasks("train")[0]
    drink = task.data["questions"][0].split()[2]
    asked, answered = replies_to(found(), task, [call("price", drink=drink), f"It costs {task.answer[0]}."])
    assert said(asked) == task.answer[0] and answered.rewards == {"correct": 1.0}


def test_a_chain_is_right_when_every_answer_is(replies_to) -> None:
    right = replies_to(Twice(), CHAIN, [ask(), "abab", ask("cd"), "<answer>CDCD</answer>"])
    assert [texts(step.observation.messages) for step in right] == [["abab"], ["Twice cd?"], ["cdcd"], []]
    assert [step.rewards["correct"] for step in right] == [0, 0, 0, 1]
    assert right[-1].terminated and right[-1].metrics == {"success": 1.0, "answered": 1.0}
    half = replies_to(Twice(), CHAIN, ["abab", "no idea"])
    assert half[-1].terminated and half[-1].rewards == {"correct": 0.0}
    assert half[-1].metrics == {"success": 0.0, "answered": 0.5}
    assert len(replies_to(Twice(), CHAIN, ["wrong", "abab"])) == 1


def test_what_the_model_gets_wrong_is_told_to_it(replies_to) -> None:
    malformed = Message("assistant", "<tool_call>{</tool_call>", errors=("tool call 1 is not JSON",))
    steps = replies_to(Twice(), CHAIN, [malformed, ask("1"), ask(5), ask(name="search"), "abab", "cdcd"])
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


def test_an_exception_of_the_tool_is_an_answer_and_counted(replies_to) -> None:
    def broken(word: str) -> str:
        """Fails."""
        raise KeyError(word)

    class Broken(Twice):
        def tools(self):
            return [tool(broken, name="ask_twice")]

    steps = replies_to(Broken(), CHAIN, [ask(), ask(5), ask(name="other")])
    assert said(steps[0]) == "Error: KeyError: 'ab'"
    assert [step.metrics["tool_exceptions"] for step in steps] == [1, 0, 0]
    assert [step.metrics["tool_errors"] for step in steps] == [1, 1, 1]
    nudged = replies_to(Broken(tool_required=True), CHAIN, [ask(), "abab"])
    assert said(nudged[1]) == "Call a tool before you answer."


def test_a_required_tool_must_be_called_for_every_question(replies_to) -> None:
    settings = Twice(tool_required=True)
    steps = replies_to(settings, CHAIN, ["abab", ask(), "abab", "cdcd", ask("9"), "cdcd", ask("cd"), "cdcd"])
    nudges = [texts(step.observation.messages) == ["Call a tool before you answer."] for step in steps]
    assert nudges == [True, False, False, True, False, True, False, False]  # a failed call does not count
    assert steps[-1].rewards == {"correct": 1.0}
    stubborn = replies_to(Twice(tool_required=True, max_tool_calls=2), CHAIN, ["abab"] * 3)
    assert (
        len(stubborn) == 3
        and stubborn[-1].truncated
        and not stubborn[-1].terminated
        and stubborn[-1].rewards == {"correct": 0.0}
    )


def test_answers_are_numbers_or_words() -> None:
    """As `silva.rewards.text.is_right` has it."""
    assert Twice().grade("It is 1,200.", "1200") and not Twice().grade("12 or 13", "12")


class Capitals(ToolQA):
    """Every third entry is a chain, which ends with a question that is also asked alone."""

    eval_size: int = 10
    eval_share: float = 0.4

    def questions(self):
        alone = [Question(f"Q{i}?", str(i)) for i in range(100)]
        return [[alone[i], Question("And then?", "same"), alone[i + 1]] if i % 3 == 0 else alone[i]
                for i in range(99)]  # fmt: skip

    def tools(self):
        return []


def test_questions_that_begin_an_episode_are_not_asked_in_the_other_split() -> None:
    taskset = Capitals(train_size=300).taskset()
    asked = {s: {q for task in taskset.tasks(s) for q in task.data["questions"]} for s in ("train", "eval")}
    assert asked["train"] & asked["eval"] == {"And then?"}
    assert len(asked["eval"]) > 10 and len(asked["train"]) > 30
    assert any(len(task.answer) == 3 for task in taskset.tasks("eval"))


class Played(Twice):
    def questions(self):
        one = ToolCall("ask_twice", {"word": "ab"})
        return [Question(f"{i}?", "abab", [one] * i) for i in range(8)]


def test_a_world_plays_itself_if_its_questions_say_what_to_call(play_out) -> None:
    taskset = Played().taskset()
    for task in [*taskset.tasks("eval"), *taskset.tasks("train")[:6]]:
        episode = taskset.environment(task)
        assert isinstance(episode, Scripted) and len(episode.random_reply(1)) == 4
        steps = play_out(episode)
        calls = int(task.data["questions"][0][0])
        assert [step.rewards["correct"] for step in steps] == [0.0] * calls + [1.0]
    assert len(steps) > 1


def test_the_calls_of_an_expert_are_json() -> None:
    data = {"questions": ["?"], "calls": [[{"name": "f", "arguments": {"x": "é"}}]]}
    task = Task("t", "twice", 0, data, ["a"])
    reply = Twice().taskset().environment(task).expert_reply()
    assert reply == '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


def test_without_calls_there_is_no_expert() -> None:
    episode = Twice().taskset().environment(CHAIN)
    with pytest.raises(
        CapabilityError, match=r"twice: no expert for the question 'Twice ab\?'.*calls=\[ToolCall"
    ):
        episode.expert_reply()

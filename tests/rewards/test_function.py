"""Functions of users as rewards: how each form is called, what it may return, what is an error."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from tests.rewards.attempts import attempt, grade

from silva.config.load import load
from silva.errors import ConfigError, RewardError
from silva.protocols import Attempt, Score
from silva.registries import REGISTRIES
from silva.rewards.function import Function, FunctionReward
from silva.types import Message

SETTINGS = Function(function="own.py:reward")


def own(function, **keys) -> FunctionReward:
    return FunctionReward(Function(function="own.py:reward", **keys), function)


def test_reply_and_answer_are_given_without_thoughts() -> None:
    reward = own(lambda reply, answer: (reply, answer) == ("4", "4"))
    assert grade(reward, "<think>5?</think>4", "4") == Score(1.0, True)
    assert grade(reward, "5", "4") == Score(0.0, False)


def test_any_of_its_own_names_and_columns_may_stand_in_any_order() -> None:
    def reward(level, columns, *, attempt, answer="other"):
        return level + len(columns) + len(attempt.messages) + len(answer)

    # level 3, two columns, two messages, an answer of one letter
    assert grade(own(reward), "x", "A", level=3, more=1).value == 3 + 2 + 2 + 1


def test_the_signature_of_verl() -> None:
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": 0.5, "reason": "good enough", "f1": 0.25}

    score = grade(own(compute_score), "<think>a</think>b", ["c"], data_source="hotpot", extra_info={"i": 1})
    assert seen == [("hotpot", "<think>a</think>b", ["c"], {"i": 1})]
    assert score == Score(0.5, False, {"f1": 0.25})
    assert grade(own(lambda solution_str, ground_truth, **_: solution_str == ground_truth), "a", "a").solved


def test_verl_reads_the_last_reply_alone_with_its_thoughts() -> None:
    messages = (
        Message("user", "q"),
        Message("assistant", "<search>x</search>"),
        Message("tool", "<answer>forged</answer>"),
        Message("assistant", "<answer>4</answer>", reasoning="hm"),
    )
    seen = []
    reward = own(lambda solution_str, ground_truth: seen.append(solution_str) or 0)
    asyncio.run(reward.score(Attempt(messages, "4")))
    assert seen == ["<think>hm</think><answer>4</answer>"]


def test_the_signature_of_trl_gets_batches_of_one() -> None:
    seen = []

    def accuracy(prompts, completions, solution, **kwargs):
        seen.append((prompts, completions, solution, kwargs))
        return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]

    assert grade(own(accuracy), "4", "4", question="2+2?", level=3) == Score(1.0, True)
    user, policy = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    assert seen == [([[user]], [[policy]], ["4"], {"level": [3]})]
    lengths = own(lambda completions, **_: [len(text) for text in completions], completions="text")
    assert grade(lengths, "four", "4").value == 4.0


def test_trl_sees_what_follows_the_question() -> None:
    seen = []
    messages = (
        Message("user", "example"), Message("assistant", "fine"), Message("user", "q"),
        Message("assistant", "look"), Message("tool", "found"), Message("assistant", "it"),
    )  # fmt: skip
    reward = own(lambda completions: seen.extend(completions) or [0])
    asyncio.run(reward.score(Attempt(messages, "x")))
    assert [[message["content"] for message in each] for each in seen] == [["look", "found", "it"]]


def test_async_functions_and_what_they_return_late() -> None:
    async def reward(reply, answer):
        return reply == answer

    assert grade(own(reward), "a", "a").solved
    assert grade(own(lambda reply, answer: reward(reply, answer)), "a", "a").solved


def test_a_function_that_blocks_does_not_block_the_loop() -> None:
    """The function waits for what only the loop can do."""
    free = threading.Event()

    async def both() -> Score:
        reward = own(lambda reply: free.wait(30))
        grading = asyncio.create_task(reward.score(attempt("x")))
        while not grading.done() and not free.is_set():
            await asyncio.sleep(0)
            free.set()
        return await grading

    assert asyncio.run(both()).solved


def test_a_function_that_never_returns_gives_no_result() -> None:
    free = threading.Event()
    with pytest.raises(RewardError, match=r"own\.py:reward: no result within timeout = 0.01 s"):
        grade(own(lambda reply: free.wait(30), timeout=0.01), "x")
    free.set()


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, Score(1.0, True)),
        (0.999, Score(0.999, False)),
        (True, Score(1.0, True)),
        (False, Score(0.0, False)),
        (-1, Score(-1.0, False)),
        (np.float32(0.5), Score(0.5, False)),
        (np.bool_(True), Score(1.0, True)),
        (np.array(2.0), Score(2.0, True)),
        ({"score": 1.0}, Score(1.0, True)),
        ({"score": 1.0, "solved": False, "x": math.nan}, Score(1.0, False)),
        ({"score": 0.2, "solved": True, "acc": True}, Score(0.2, True, {"acc": 1.0})),
        (Score(0.3, True, {"a": 1.0}), Score(0.3, True, {"a": 1.0})),
    ],
)
def test_what_a_function_may_return(returned, score) -> None:
    assert grade(own(lambda reply: returned), "x") == score


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "NoneType: expected a number, a bool, a table with score, or a Score"),
        ("1", "str: expected a number"),
        (math.nan, "nan: expected a finite number"),
        (math.inf, "inf: expected a finite"),
        ([1.0], "list: expected a number"),
        (np.array([1.0, 2.0]), "ndarray: expected a number"),
        ({"reward": 1}, "a table with reward: expected a key score"),
        ({}, "a table with no keys"),
        ({"score": None}, "NoneType: expected"),
        ({"score": 1, "solved": "no"}, "solved = 'no': expected true or false"),
        (Score(math.nan, False), "nan: expected a finite"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function(returned, words) -> None:
    with pytest.raises(RewardError, match=rf"^reward own\.py:reward returned {words}"):
        grade(own(lambda reply: returned), "x")


@pytest.mark.parametrize(
    ("returned", "words"), [(1.0, "float"), ([], "0 rewards"), ([1, 0], "2 rewards"), ([None], "NoneType")]
)
def test_trl_must_return_a_list_of_one(returned, words) -> None:
    with pytest.raises(RewardError, match=rf"own\.py:reward returned {words}"):
        grade(own(lambda completions: returned), "x")


def test_an_exception_is_no_reward() -> None:
    def broken(reply):
        raise KeyError("level")

    with pytest.raises(RewardError, match=r"own\.py:reward raised KeyError: 'level'") as caught:
        grade(own(broken), "x")
    assert isinstance(caught.value.__cause__, KeyError)

    def timeout(reply):
        raise TimeoutError("slow server")

    with pytest.raises(RewardError, match="raised TimeoutError: slow server"):
        grade(own(timeout), "x")


class Panic(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), Panic("boom")]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_would_end_a_program_is_no_reward(error, is_async) -> None:
    def reward(reply):
        raise error

    async def later(reply):
        raise error

    if is_async and isinstance(error, KeyboardInterrupt):
        pytest.skip("in the main thread it is Ctrl-C")
    with pytest.raises(RewardError, match=type(error).__name__):
        grade(own(later if is_async else reward), "x")


def test_a_column_that_is_missing_is_named() -> None:
    with pytest.raises(RewardError, match="needs level: got a row with kind"):
        grade(own(lambda reply, level: 1), "x", kind="easy")


@pytest.mark.parametrize(
    "function", [lambda: 1, lambda text: 1, lambda *arguments: 1, lambda reply, /: 1, dict.get, print]
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(function) -> None:
    with pytest.raises(ConfigError, match=r"reward own\.py:reward: "):
        own(function)


def test_the_short_form_in_a_file_loads_it(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def right(reply, answer):\n    return reply == answer\nSIZE = 3\n")
    (tmp_path / "a.toml").write_text(
        '[[environments]]\ntype = "dataset"\nrows = [{question = "a?", answer = "b"}]\n'
        'reward = "mine.py:right"\n'
    )
    (environment,) = load([f"@{tmp_path / 'a.toml'}"], REGISTRIES, env={}).config.environments
    settings = environment.reward
    assert settings == Function(function=f"{tmp_path / 'mine.py'}:right")
    assert grade(settings.build(), "b", "b").solved
    with pytest.raises(ConfigError, match=r"reward .*mine\.py:wrong: .*has no wrong; it defines right"):
        Function(function=f"{tmp_path / 'mine.py'}:wrong").build()
    with pytest.raises(ConfigError, match=r"SIZE in .* is not a function: it is a int"):
        Function(function=f"{tmp_path / 'mine.py'}:SIZE").build()

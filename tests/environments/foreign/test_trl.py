"""Classes written for TRL, as they are."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from tests.environments.foreign.playing import apart_and_here, wrong

from silva.environments.foreign.trl import Trl
from silva.errors import ConfigError
from silva.protocols import Scripted
from silva.tools.function import ToolDefinitionError
from silva.types import Message, ToolCall

FILE = Path(__file__).parent / "guess_env.py"
ROWS = tuple(
    {"prompt": [{"role": "user", "content": f"Game {i}."}], "low": 1, "high": 3 + i, "extra": [i]}
    for i in range(60)
)


def settings(name: str = "GuessEnv", **keys) -> Trl:
    return Trl(factory=f"{FILE}:{name}", **{"eval_size": 4, "train_size": 20, **keys})


def guess(*numbers: int) -> Message:
    calls = tuple(ToolCall("guess", {"number": n}) for n in numbers)
    return Message("assistant", "", tool_calls=calls, id="r")


DONE = Message("assistant", "I am done.", id="d")


def started(chosen: Trl, index: int = 0):
    taskset = chosen.taskset()
    environment = taskset.environment(taskset.tasks("train")[index])
    return environment, asyncio.run(environment.reset())


def steps_of(environment, *messages: Message):
    async def run():
        return [await environment.step(message) for message in messages]

    return asyncio.run(run())


def test_a_row_becomes_the_prompt_and_what_reset_says_is_added() -> None:
    environment, observation = started(settings(rows=ROWS))
    row = environment.task.data["row"]
    assert [(m.role, m.content) for m in observation.messages] == [
        ("user", f"{row['prompt'][0]['content']}\nThe number is between 1 and {row['high']}.")
    ]
    assert environment.session.instance.secret <= row["high"]


def test_public_methods_are_tools_with_their_docstrings() -> None:
    _, observation = started(settings())
    assert [spec.name for spec in observation.tools] == ["guess", "hint"]
    assert observation.tools[0].description == "Guess the number."
    number = observation.tools[0].parameters["properties"]["number"]
    assert number == {"type": "integer", "description": "Between the two limits, both included."}


def test_the_right_number_is_the_reward_of_the_class() -> None:
    environment, _ = started(settings())
    secret = environment.session.instance.secret
    wrong, right, end = steps_of(environment, guess(secret % 9 + 1), guess(secret), DONE)
    assert wrong.observation.messages[0].content in ("Higher.", "Lower.")
    assert right.observation.messages[0].content == "Right." and not right.terminated
    assert end.terminated and end.rewards == {"reward": 1.0} and end.metrics["success"] == 1.0
    assert not isinstance(environment, Scripted)
    environment, _ = started(settings())
    *_, end = steps_of(environment, guess(secret % 9 + 1), DONE)
    assert end.rewards == {"reward": 0.0} and end.metrics["success"] == 0.0


def test_what_a_method_raises_is_read_by_the_model_as_in_trl() -> None:
    environment, _ = started(settings())
    secret = environment.session.instance.secret
    _, again = steps_of(environment, guess(secret), guess(secret))
    assert again.observation.messages[0].content == "Error: ValueError: Game over."
    assert again.metrics["tool_exceptions"] == 1.0


def test_bad_calls_are_answered() -> None:
    environment, _ = started(settings())
    calls = (
        ToolCall("_private", {}),
        ToolCall("reset", {}),
        ToolCall("guess", {"number": "x"}),
        ToolCall("hint", {}),
    )
    (step,) = steps_of(environment, Message("assistant", "", tool_calls=calls, id="r"))
    said = [message.content for message in step.observation.messages]
    assert said[0].startswith("Error: no tool called '_private'")
    assert said[1].startswith("Error: no tool called 'reset'")
    assert "argument number" in said[2] and said[3] in ("true", "false")


def test_a_reward_method_goes_before_the_attribute() -> None:
    environment, _ = started(settings("OwnsReward", solved_at=0.5))
    *_, end = steps_of(environment, guess(environment.session.instance.secret), DONE)
    assert end.rewards == {"reward": 0.5} and end.metrics["success"] == 1.0


def test_too_many_calls_end_the_episode_with_what_it_earned() -> None:
    environment, _ = started(settings(max_tool_calls=2))
    secret = environment.session.instance.secret
    *_, end = steps_of(environment, guess(secret), guess(secret), guess(secret))
    assert end.truncated and end.rewards == {"reward": 1.0}


def test_no_reward_is_no_result() -> None:
    environment, _ = started(settings("NoReward"))
    with pytest.raises(TypeError, match="NoReward has no reward: expected a method get_reward"):
        steps_of(environment, DONE)


def test_the_task_decides_the_problem_and_the_episode_its_luck() -> None:
    """Also with the random numbers of the process, which the class uses."""
    taskset = settings().taskset()
    task = taskset.tasks("train")[0]

    def luck(seed: int) -> tuple[int, float]:
        environment = taskset.environment(dataclasses.replace(task, seed=seed))
        asyncio.run(environment.reset())
        steps_of(environment, guess(1))
        return environment.session.instance.secret, environment.session.instance.luck

    assert luck(1) == luck(1)
    assert luck(1)[0] == luck(2)[0] and luck(1)[1] != luck(2)[1]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("NoReset", ConfigError, "NoReset has no method reset"),
        ("NoHint", ToolDefinitionError, "tool untyped: parameter number has no type hint"),
        ("Missing", ConfigError, "has no Missing; it defines"),
    ],
)
def test_what_is_no_environment_is_said_at_the_start(name, error, words) -> None:
    with pytest.raises(error, match=words):
        settings(name).taskset()


def test_equal_rows_are_tasks_with_random_numbers_of_their_own() -> None:
    rows = ({"prompt": "Guess."},) * 64
    tasks = settings(rows=rows, train_size=40).taskset()
    training, held_out = tasks.tasks("train"), tasks.tasks("eval")
    contents = {task.content() for task in [*training, *held_out]}
    assert len({task.content() for task in training}) > 30 and len(contents) > 34
    assert all(task.data["row"] == rows[0] for task in training)


def test_copies_of_one_row_of_many_stay_on_one_side() -> None:
    rows = tuple({"prompt": f"Guess {n % 20}."} for n in range(60))
    tasks = settings(rows=rows, train_size=60).taskset()
    sides = [{task.data["row"]["prompt"] for task in tasks.tasks(split)} for split in ("train", "eval")]
    assert all(sides) and not sides[0] & sides[1]


def test_nothing_to_show_is_said() -> None:
    with pytest.raises(
        ConfigError, match="nothing to show: expected a row with `prompt`, or text from reset"
    ):
        started(settings("Silent"))
    _, observation = started(settings("Silent", rows=ROWS))
    assert observation.messages[0].content.startswith("Game ")
    with pytest.raises(ValueError, match="expected one of path, hub and rows, got path and rows"):
        settings(path="rows.jsonl", rows=ROWS)


@pytest.mark.slow
def test_a_worker_process_plays_the_same_episode() -> None:
    apart, here = apart_and_here(settings(rows=ROWS), [guess(1, 2, 3), DONE])
    assert apart == here
    assert settings().workers == 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(), ROWS], ids=["seeds", "rows"])
def test_nothing_is_wrong_with_them(rows) -> None:
    assert wrong(settings(rows=rows)) == []

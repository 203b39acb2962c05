"""A data set as an environment: configured as a user would, from files of the shapes that are recognised."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from silva.config.load import load
from silva.environments.process.workers import Workers
from silva.environments.worlds.dataset import Dataset
from silva.errors import CapabilityError, ConfigError
from silva.protocols import Attempt, Score
from silva.registries import REGISTRIES
from silva.rewards.exact_match import ExactMatch
from silva.types import Message, Step, ToolCall

CODE = '''
def census(city: str) -> int:
    """How many people live in a city."""
    return len(city) * 1000

def wordy(reply, answer, level):
    return 1.0 if answer in reply and level == "easy" else 0.25

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(ground_truth in solution_str), "source": 1.0 * (data_source == "towns")}

async def lengths(prompts, completions, level, **columns):
    return [float(len(c[0]["content"])) / 100 for c in completions]

def broken(reply, answer):
    return float("nan")

def needs_more(completions, trainer_state):
    return [1.0]
'''


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [{"question": f"Town {i}?", "answer": str(i), "level": "easy"} for i in range(count)]


@pytest.fixture
def configured(tmp_path: Path):
    """`configured(**keys)`: the environment of a TOML file beside rows.jsonl and own.py."""

    def make(**keys: Any) -> Dataset:
        (tmp_path / "own.py").write_text(CODE)
        lines = {"type": "dataset", "path": "rows.jsonl", "reward": "exact_match", "eval_size": 4} | keys
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items() if value is not None)
        (tmp_path / "run.toml").write_text("[[environments]]\n" + text)
        if not (tmp_path / "rows.jsonl").exists():
            write(tmp_path / "rows.jsonl", rows())
        found = load([f"@{tmp_path / 'run.toml'}"], REGISTRIES, env={}, cwd=Path("/")).config.environments[0]
        assert isinstance(found, Dataset)
        return found

    return make


def write(path: Path, data: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))


def play(settings: Dataset, *replies: Message | str, task: int = 0) -> list[Step]:
    async def go() -> list[Step]:
        taskset = settings.taskset()
        environment = taskset.environment(taskset.tasks("train")[task])
        await environment.reset()
        found = []
        for number, reply in enumerate(replies):
            text = reply.format(answer=environment.task.answer) if isinstance(reply, str) else reply
            message = Message("assistant", text, id=f"r{number}") if isinstance(text, str) else text
            found.append(await environment.step(message))
        await environment.close()
        return found

    return asyncio.run(go())


def test_rows_become_tasks_and_a_reward_grades_the_answer(configured) -> None:
    settings = configured()
    (right,), (wrong,) = play(settings, "<answer>{answer}</answer>"), play(settings, "no idea")
    assert right.terminated and right.rewards == {"reward": 1.0} and right.metrics["success"] == 1.0
    assert wrong.terminated and wrong.rewards == {"reward": 0.0} and wrong.metrics["success"] == 0.0


def test_how_rows_were_understood_is_told_with_three_of_them(configured) -> None:
    notes = configured().taskset().notes
    assert notes[0] == "dataset: 40 rows, read as table: prompt in `question`, answer in `answer`"
    assert notes[1:] == ["  Town 0? -> 0", "  Town 1? -> 1", "  Town 2? -> 2"]


def test_a_prompt_is_held_out_whatever_its_answers_are(configured, tmp_path: Path) -> None:
    twice = [row | {"answer": f"{row['answer']}{suffix}"} for row in rows() for suffix in "ab"]
    write(tmp_path / "rows.jsonl", twice)
    taskset = configured(train_size=200).taskset()
    prompts = [{json.dumps(t.data["messages"]) for t in taskset.tasks(split)} for split in ("train", "eval")]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]


def test_rows_of_their_own_may_be_held_out(configured, tmp_path: Path) -> None:
    write(tmp_path / "held.jsonl", [*rows(6), {"question": "New?", "answer": "9", "level": "hard"}])
    taskset = configured(eval_path="held.jsonl", eval_size=7, train_size=100).taskset()
    held_out = {task.answer for task in taskset.tasks("eval")}
    assert held_out == {"0", "1", "2", "3", "4", "5", "9"}
    assert {task.answer for task in taskset.tasks("train")} == {str(i) for i in range(6, 40)}
    with pytest.raises(ConfigError, match="eval_size is 8, but 7 distinct problems are given for evaluation"):
        configured(eval_path="held.jsonl", eval_size=8).taskset().tasks("eval")


@pytest.mark.parametrize(
    ("function", "reply", "value"),
    [
        ("wordy", "It is {answer}", 1.0),
        ("wordy", "nothing", 0.25),
        ("compute_score", "It is {answer}", 1.0),
        ("lengths", "x" * 30, 0.3),
    ],
)
def test_functions_of_the_users_own_are_rewards(
    configured, tmp_path: Path, function: str, reply: str, value: float
) -> None:
    more = {"data_source": "towns", "extra_info": {"n": 1}}
    write(tmp_path / "rows.jsonl", [row | more for row in rows()])
    (step,) = play(configured(reward=f"own.py:{function}"), reply)
    assert step.rewards == {"reward": pytest.approx(value)}


def test_a_reward_that_is_no_number_is_a_fault(configured) -> None:
    with pytest.raises(Exception, match="nan"):
        play(configured(reward="own.py:broken"), "x")


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "<answer>0</answer>", tool_calls=(ToolCall(name, arguments),), id="c")


def test_tools_by_name_and_by_function(configured) -> None:
    settings = configured(tools=["own.py:census", "calculator"])
    first, second, last = play(
        settings, call("census", city="abc"), call("calculator", expression="2*3"), "{answer}"
    )
    assert [m.content for m in (*first.observation.messages, *second.observation.messages)] == ["3000", "6"]
    assert [tool.name for tool in first.observation.tools] == ["census", "calculator"]
    assert last.rewards == {"reward": 1.0}


def test_an_answer_beside_a_call_too_many_earns_nothing(configured) -> None:
    settings = configured(tools=["calculator"], max_tool_calls=1, rows=None)
    steps = play(settings, call("calculator", expression="1"), call("calculator", expression="1"))
    assert steps[-1].truncated and steps[-1].rewards == {"reward": 0.0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": None}, "expected one of path, hub and rows, got none"),
        ({"hub": "a/b"}, "expected one of path, hub and rows, got path and hub"),
        ({"expert": "x"}, "expected a column in `expert`"),
        ({"reward": None}, "reward"),
        ({"reward": "nope"}, 'unknown type; known: .*"exact_match".*file.py:function'),
        ({"tools": ["nope"]}, 'unknown type; known: .*"calculator"'),
    ],
)
def test_wrong_keys_are_named(configured, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"prompt": "text"}, r"rows.jsonl:1: no 'text': got 'question'"),
        ({"tools": ["own.py:gone"]}, "own.py has no gone; it defines"),
        ({"reward": "own.py:gone"}, "own.py has no gone"),
        (
            {"expert": "{solution} {answer}"},
            r"expert: got \{solution\}, expected columns of the rows: a",
        ),
        (
            {"reward": "own.py:needs_more"},
            r"rows.jsonl:1: answer: .*needs_more needs trainer_state",
        ),
        ({"reward": "letter"}, r"rows.jsonl:1: answer: answer of the task: got '0', expected one letter"),
    ],
)
def test_what_is_not_there_is_named(configured, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**keys).taskset()


def test_a_wrong_row_is_named_by_file_line_and_key(configured, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [*rows(2), {"question": "", "answer": "1"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl:3: .*question"):
        configured().taskset()


@pytest.mark.parametrize("answer", [[], "  ", {"a": 1}, ["a", ""]])
def test_an_answer_that_cannot_be_graded_ends_the_start(configured, tmp_path: Path, answer: Any) -> None:
    for reward in ("exact_match", "token_f1", "math", "deep_research"):
        write(tmp_path / "rows.jsonl", [*rows(2), {"question": "q", "answer": answer}])
        with pytest.raises(ConfigError, match=r"rows.jsonl:3: answer: "):
            configured(reward=reward).taskset()


@pytest.mark.parametrize(("answer", "said"), [(True, "yes"), (72.0, "72"), (["x", "y"], "y")])
def test_answers_that_are_no_texts_are_graded(configured, tmp_path: Path, answer: Any, said: str) -> None:
    write(tmp_path / "rows.jsonl", [row | {"answer": answer} for row in rows(40)])
    (step,) = play(configured(reward="token_f1"), said)
    assert step.rewards == {"reward": 1.0}


def test_the_expert_may_say_any_column(configured) -> None:
    taskset = configured(expert="{level}: <answer>{answer}</answer>").taskset()
    task = taskset.tasks("train")[0]
    level = task.data["columns"]["level"]
    assert taskset.environment(task).expert_reply() == f"{level}: <answer>{task.answer}</answer>"


def test_system_and_instructions_stand_first(configured) -> None:
    settings = configured(system="Be brief.", instructions="Answer:")
    taskset = settings.taskset()
    shown = asyncio.run(taskset.environment(taskset.tasks("train")[0]).reset()).messages
    assert [(m.role, m.content.split("\n")[0]) for m in shown] == [
        ("system", "Be brief."),
        ("user", "Answer:"),
    ]


def test_the_expert_gives_the_answer_and_random_play_another_one(configured) -> None:
    taskset = configured(expert="<answer>{answer}</answer>").taskset()
    task = taskset.tasks("train")[0]
    episode = taskset.environment(task)
    assert episode.expert_reply() == f"<answer>{task.answer}</answer>"
    assert len({episode.random_reply(seed) for seed in range(50)}) > 10
    needs = configured(tools=["calculator"], tool_required=True).taskset()
    with pytest.raises(CapabilityError, match="no expert knows which tools to call"):
        needs.environment(needs.tasks("train")[0]).expert_reply()


def test_episodes_can_run_in_workers(configured) -> None:
    async def go() -> Any:
        taskset = Workers(configured(workers=1))
        try:
            environment = taskset.environment(taskset.tasks("train")[0])
            await environment.reset()
            return await environment.step(Message("assistant", "none", id="r"))
        finally:
            taskset.close()

    assert asyncio.run(go()).rewards == {"reward": 0.0}


def test_a_score_must_be_finite() -> None:
    class Endless:
        async def score(self, attempt: Attempt) -> Score:
            return Score(float("inf"), True)

    settings = Dataset(rows=tuple(rows()), reward=ExactMatch(), eval_size=4)
    taskset = settings.taskset()
    episode = taskset.environment(taskset.tasks("train")[0])
    episode.reward = Endless()

    async def go() -> None:
        await episode.reset()
        await episode.step(Message("assistant", "x", id="r"))

    with pytest.raises(ValueError, match="the reward is inf, expected a finite number"):
        asyncio.run(go())


def test_a_column_that_is_left_out_is_said(tmp_path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n), "image": b"\x89"} for n in range(20)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    taskset = Dataset(path=str(tmp_path / "rows.parquet"), reward=ExactMatch()).taskset()
    assert list(taskset.notes)[-1] == "  columns that are left out: image (bytes)"
    assert [task.data["columns"] for task in taskset.tasks("train")[:2]] == [{}, {}]

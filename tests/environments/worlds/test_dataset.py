"""A data set as an environment: configured as a user would, from files of the shapes that are recognised."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests.environments.conftest import call, said

from silva.config.load import load
from silva.environments.worlds.dataset import Dataset
from silva.errors import CapabilityError, ConfigError
from silva.protocols import Attempt, Score
from silva.registries import REGISTRIES
from silva.rewards.exact_match import ExactMatch
from silva.types import Message, Step

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

def needs_more(completions, trainer_state):
    return [1.0]
'''


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [{"question": f"Town {i}?", "answer": str(i), "level": "easy"} for i in range(count)]


@pytest.fixture
def configured(tmp_path: Path, rows_file):
    """`configured(**keys)`: the environment of a TOML file beside rows.jsonl and own.py."""

    def make(**keys: Any) -> Dataset:
        (tmp_path / "own.py").write_text(CODE)
        lines = {"type": "dataset", "path": "rows.jsonl", "reward": "exact_match", "eval_size": 4} | keys
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items() if value is not None)
        (tmp_path / "run.toml").write_text("[[environments]]\n" + text)
        if not (tmp_path / "rows.jsonl").exists():
            rows_file(rows())
        found = load([f"@{tmp_path / 'run.toml'}"], REGISTRIES, env={}, cwd=Path("/")).config.environments[0]
        assert isinstance(found, Dataset)
        return found

    return make


@pytest.fixture
def play(replies_to):
    """The first training task, with its answer in the replies."""

    def run(settings: Dataset, *replies: Message | str) -> list[Step]:
        task = settings.taskset().tasks("train")[0]
        said = [each.format(answer=task.answer) if isinstance(each, str) else each for each in replies]
        return replies_to(settings, task, said)

    return run


def test_rows_become_tasks_and_a_reward_grades_the_answer(configured, play) -> None:
    settings = configured()
    (right,), (wrong,) = play(settings, "<answer>{answer}</answer>"), play(settings, "no idea")
    assert right.terminated and right.rewards == {"reward": 1.0} and right.metrics["success"] == 1.0
    assert wrong.terminated and wrong.rewards == {"reward": 0.0} and wrong.metrics["success"] == 0.0
    notes = settings.taskset().notes
    assert notes[0] == "dataset: 40 rows, read as table: prompt in `question`, answer in `answer`"
    assert notes[1:] == ["  Town 0? -> 0", "  Town 1? -> 1", "  Town 2? -> 2"]


def test_a_prompt_is_held_out_whatever_its_answers_are(configured, rows_file) -> None:
    rows_file(
        [row | {"answer": row["answer"] + suffix} for row in rows() for suffix in "ab"],
    )
    taskset = configured(train_size=200).taskset()
    prompts = [{json.dumps(t.data["messages"]) for t in taskset.tasks(split)} for split in ("train", "eval")]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]


def test_rows_of_their_own_may_be_held_out(configured, rows_file) -> None:
    rows_file([*rows(6), {"question": "New?", "answer": "9", "level": "hard"}], "held.jsonl")
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
    configured, play, rows_file, function: str, reply: str, value: float
) -> None:
    more = {"data_source": "towns", "extra_info": {"n": 1}}
    rows_file([row | more for row in rows()])
    (step,) = play(configured(reward=f"own.py:{function}"), reply)
    assert step.rewards == {"reward": pytest.approx(value)}


def test_a_score_must_be_finite(configured, play_out) -> None:
    class Endless:
        async def score(self, attempt: Attempt) -> Score:
            return Score(float("inf"), True)

    taskset = configured().taskset()
    episode = taskset.environment(taskset.tasks("train")[0])
    episode.reward = Endless()
    with pytest.raises(ValueError, match="the reward is inf, expected a finite number"):
        play_out(episode, lambda _: "x")


def test_tools_by_name_and_by_function(configured, play) -> None:
    settings = configured(tools=["own.py:census", "calculator"])
    first, second, last = play(
        settings, call("census", city="abc"), call("calculator", expression="2*3"), "{answer}"
    )
    assert (said(first), said(second)) == ("3000", "6")
    assert [tool.name for tool in first.observation.tools] == ["census", "calculator"]
    assert last.rewards == {"reward": 1.0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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


@pytest.mark.parametrize("answer", [[], "  ", {"a": 1}, ["a", ""]])
def test_an_answer_that_cannot_be_graded_ends_the_start(configured, rows_file, answer: Any) -> None:
    for reward in ("exact_match", "token_f1", "math", "deep_research"):
        rows_file([*rows(2), {"question": "q", "answer": answer}])
        with pytest.raises(ConfigError, match=r"rows.jsonl:3: answer: "):
            configured(reward=reward).taskset()


@pytest.mark.parametrize(("answer", "reply"), [(True, "yes"), (72.0, "72"), (["x", "y"], "y")])
def test_answers_that_are_no_texts_are_graded(configured, play, rows_file, answer: Any, reply: str) -> None:
    rows_file([row | {"answer": answer} for row in rows(40)])
    (step,) = play(configured(reward="token_f1"), reply)
    assert step.rewards == {"reward": 1.0}


def test_system_and_instructions_stand_first(configured) -> None:
    settings = configured(system="Be brief.", instructions="Answer:")
    taskset = settings.taskset()
    shown = asyncio.run(taskset.environment(taskset.tasks("train")[0]).reset()).messages
    assert [(m.role, m.content.split("\n")[0]) for m in shown] == [
        ("system", "Be brief."),
        ("user", "Answer:"),
    ]


def test_the_expert_gives_the_answer_and_random_play_another_one(configured) -> None:
    taskset = configured(expert="{level}: <answer>{answer}</answer>").taskset()
    task = taskset.tasks("train")[0]
    episode = taskset.environment(task)
    assert episode.expert_reply() == f"{task.data['columns']['level']}: <answer>{task.answer}</answer>"
    assert len({episode.random_reply(seed) for seed in range(50)}) > 10
    needs = configured(tools=["calculator"], tool_required=True).taskset()
    with pytest.raises(CapabilityError, match="no expert knows which tools to call"):
        needs.environment(needs.tasks("train")[0]).expert_reply()


def test_a_column_that_is_left_out_is_said(tmp_path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n), "image": b"\x89"} for n in range(20)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    taskset = Dataset(path=str(tmp_path / "rows.parquet"), reward=ExactMatch()).taskset()
    assert list(taskset.notes)[-1] == "  columns that are left out: image (bytes)"
    assert [task.data["columns"] for task in taskset.tasks("train")[:2]] == [{}, {}]


def test_rows_with_an_image_or_a_file_are_left_out_and_counted(configured, rows_file) -> None:
    given = [
        {**row, "image": "data:" if i % 4 == 0 else "", "file_name": None} for i, row in enumerate(rows())
    ]
    given[1]["file_name"] = "a.xlsx"
    rows_file(given)
    taskset = configured(without=["image", "file_name"], eval_share=1.0, eval_size=0).taskset()
    asked = {task.data["messages"][0]["content"] for task in taskset.tasks("eval")}
    assert asked == {f"Town {i}?" for i in range(40) if i % 4 and i != 1}
    assert taskset.notes[-2:] == [
        "dataset: 10 rows with `image` are left out", "dataset: 1 rows with `file_name` are left out"
    ]  # fmt: skip


def test_a_share_of_1_holds_out_all_and_leaves_nothing_to_train_on(configured, play) -> None:
    settings = configured(eval_share=1.0, eval_size=0)
    taskset = settings.taskset()
    assert len(taskset.tasks("eval")) == 40 and taskset.only_held_out
    with pytest.raises(ConfigError, match="eval_share = 1 holds out 40 and leaves 0 for training"):
        play(settings, "7")


def test_rows_are_decrypted_with_their_canary(configured, rows_file) -> None:
    """As xbench: base64 of the UTF-8 text XOR the key, which is repeated. "Ab" XOR "key" is 0x2a 0x07."""
    hidden = {"id": "1", "prompt": "KgdYVBU=", "answer": "XA==", "canary": "key"}
    plain = {"id": "2", "prompt": "Ab!?", "answer": "8", "canary": ""}
    rows_file([hidden, plain])
    tasks = (
        configured(canary="canary", eval_share=1.0, eval_size=0, reward="exact_match").taskset().tasks("eval")
    )
    asked = {task.data["messages"][0]["content"]: task.answer for task in tasks}
    assert asked == {"Ab!?p": "7", "Ab!?": "8"}
    rows_file([{**hidden, "answer": "no base64"}])
    with pytest.raises(
        ConfigError, match=r"jsonl:1: answer: got 'no base64', expected text that is encrypted"
    ):
        configured(canary="canary").taskset()

"""Splits that share no content, whatever the seed; the same tasks in every process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments import ENVIRONMENTS
from silva.environments.bandit import Bandit
from silva.environments.calculator import Calculator
from silva.environments.frozen_lake import FrozenLake
from silva.environments.guess_number import GuessNumber
from silva.environments.tasks import Draft, generated, listed
from silva.environments.tool_qa import ToolQA
from silva.errors import ConfigError


def world(name: str):
    module, _, attribute = ENVIRONMENTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def numbers(limit: int):
    return lambda rng: Draft({"n": rng.randrange(limit)})


class Sizes(ToolQA):
    type: str = "sizes"


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_held_out_tasks_do_not_occur_in_training_and_are_distinct(name: str) -> None:
    settings = world(name)(eval_size=60, train_size=600)
    tasks = settings.taskset()
    held_out = [task.content() for task in tasks.tasks("eval")]
    train = {task.content() for task in tasks.tasks("train")}
    assert len(held_out) == len(set(held_out)) == 60
    assert len(train) > 60
    assert not train & set(held_out)
    other_seed = world(name)(eval_size=20, train_size=600, seed=1).taskset()
    if name in ("calculator", "frozen_lake", "reverse_text"):  # drawn: no seed moves a task across
        assert not {task.content() for task in other_seed.tasks("train")} & set(held_out)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_the_type_in_the_registry_is_the_one_in_the_settings(name: str) -> None:
    assert world(name)().type == name
    assert world(name)(name="mine").taskset().tasks("train")[0].environment == "mine"


def test_tasks_are_the_same_in_another_process_and_plain_json() -> None:
    script = (
        "from silva.environments.frozen_lake import FrozenLake\n"
        "import json\n"
        "tasks = FrozenLake(eval_size=3).taskset()\n"
        "chosen = [*tasks.tasks('eval'), tasks.tasks('train')[17]]\n"
        "print(json.dumps([[t.id, t.seed, t.data] for t in chosen]))"
    )
    environment = {"PYTHONHASHSEED": "7", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    tasks = FrozenLake(eval_size=3).taskset()
    here = [[t.id, t.seed, t.data] for t in [*tasks.tasks("eval"), tasks.tasks("train")[17]]]
    assert json.loads(done.stdout) == json.loads(json.dumps(here))


def test_training_tasks_are_lazy_and_depend_on_their_index_alone() -> None:
    tasks = GuessNumber(train_size=10**9, eval_size=7).taskset().tasks("train")
    assert len(tasks) == 10**9
    assert tasks[123_456_789] == tasks[123_456_789]
    assert tasks[-1].id == "guess_number/train/999999999"
    assert [task.id for task in tasks[2:4]] == ["guess_number/train/2", "guess_number/train/3"]
    with pytest.raises(IndexError):
        tasks[10**9]


def test_a_list_is_gone_through_completely_before_it_repeats() -> None:
    drafts = [Draft({"n": n}) for n in range(10)]
    tasks = listed(Sizes(eval_size=3, train_size=21), drafts, lambda task: None).tasks("train")  # type: ignore
    laps = [[task.data["n"] for task in tasks[lap * 7 : lap * 7 + 7]] for lap in range(3)]
    assert all(sorted(lap) == sorted(laps[0]) and len(set(lap)) == 7 for lap in laps)
    assert laps[0] != laps[1]
    assert [tasks[index].data["n"] for index in (20, 0, 8)] == [laps[2][6], laps[0][0], laps[1][1]]


def test_a_world_that_is_too_small_says_how_small() -> None:
    with pytest.raises(
        ConfigError, match=r"sizes: eval_size is 50, but \d+ draws gave only \d+ distinct held-out"
    ):
        generated(Sizes(eval_size=50), numbers(20), lambda task: None).tasks("eval")  # type: ignore
    with pytest.raises(ConfigError, match="2000 draws gave 20 distinct problems, all held out"):
        generated(Sizes(), numbers(20), lambda task: None, eval_share=1.0).tasks("train")  # type: ignore
    with pytest.raises(ConfigError, match="512 distinct problems cannot give eval_size = 600"):
        Bandit(eval_size=600).taskset()
    with pytest.raises(ConfigError, match="1 distinct problems cannot give eval_size = 1"):
        listed(Sizes(eval_size=1), [Draft({"n": 1}), Draft({"n": 1})], lambda task: None)  # type: ignore


@settings(max_examples=25, deadline=None, derandomize=True)
@given(limit=st.integers(200, 1000), seed=st.integers(0, 99), size=st.integers(1, 20))
def test_generated_splits_never_meet(limit: int, seed: int, size: int) -> None:
    config = Sizes(eval_size=size, train_size=100, seed=seed)
    tasks = generated(config, numbers(limit), lambda task: None)  # type: ignore
    held_out = {task.data["n"] for task in tasks.tasks("eval")}
    assert len(held_out) == size
    assert not held_out & {task.data["n"] for task in tasks.tasks("train")}


def test_keys_keep_whole_ranges_and_reordered_sums_apart() -> None:
    guesses = GuessNumber(eval_size=100, train_size=1000).taskset()
    lows = {split: {task.data["low"] for task in guesses.tasks(split)} for split in ("train", "eval")}  # type: ignore
    assert not lows["train"] & lows["eval"]
    assert len(lows["eval"]) == 15  # 100 tasks of 7 numbers each
    sums = Calculator(digits=1, operators="+", eval_size=20, train_size=500).taskset()
    texts = {
        split: {tuple(sorted(task.data["expressions"][0].split(" + "))) for task in sums.tasks(split)}  # type: ignore
        for split in ("train", "eval")
    }
    assert not texts["train"] & texts["eval"]

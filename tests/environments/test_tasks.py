"""Splits that share no content, whatever the seed; the same tasks in every process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.environments.bases.tool_qa import ToolQA
from silva.environments.tasks import Draft, check_splits, generated, held_out, listed
from silva.environments.worlds.bandit import Bandit
from silva.environments.worlds.frozen_lake import FrozenLake
from silva.errors import ConfigError
from silva.types import Task


def numbers(limit: int):
    return lambda rng: Draft({"n": rng.randrange(limit)})


def drafts(numbers) -> list[Draft]:
    return [Draft({"n": n}) for n in numbers]


def unused(task: Task) -> Any:
    raise AssertionError("nothing is played here")


class Sizes(ToolQA):
    type: str = "sizes"


@pytest.mark.slow
def test_tasks_are_the_same_in_another_process_and_plain_json() -> None:
    script = (
        "from silva.environments.worlds.frozen_lake import FrozenLake\n"
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
    tasks = FrozenLake(train_size=10**9, eval_size=7).taskset().tasks("train")
    assert len(tasks) == 10**9
    assert tasks[123_456_789] == tasks[123_456_789]
    assert tasks[-1].id == "frozen_lake/train/999999999"
    assert [task.id for task in tasks[2:4]] == ["frozen_lake/train/2", "frozen_lake/train/3"]
    with pytest.raises(IndexError):
        tasks[10**9]


def list_of(config: Sizes, names) -> dict[str, list]:
    """What each split of a list of names holds."""
    taskset = listed(config, drafts(names), unused)
    return {split: [task.data["n"] for task in taskset.tasks(split)] for split in ("train", "eval")}


@pytest.mark.parametrize("rows", [1, 85])
def test_a_list_has_as_many_tasks_as_distinct_rows(rows: int) -> None:
    given = drafts(n % rows for n in range(2 * rows))
    apart = listed(Sizes(), given, unused, evaluation=drafts([-1, -2]))
    assert sorted(task.data["n"] for task in apart.tasks("train")) == list(range(rows))
    assert len(apart.tasks("eval")) == 2 and apart.notes == []


@pytest.mark.slow
def test_a_list_that_is_cut_says_how_much_of_it_is_used() -> None:
    rows, rest = drafts(range(7473)), drafts([-1])
    cut, same, more = (
        listed(Sizes(train_size=size), rows, unused, evaluation=rest, notes=["read"])
        for size in (4096, 7473, 9000)
    )
    used = {task.data["n"] for task in cut.tasks("train")}
    assert len(used) == 4096 and not used <= set(range(4096))
    assert cut.notes == ["read", "sizes: 4,096 of 7,473 training tasks are used (train_size = 4096)"]
    assert same.notes == ["read"] and len(more.tasks("train")) == 7473
    assert more.notes[1:] == ["sizes: 7,473 of 7,473 training tasks are used (train_size = 9000)"]
    rows.reverse()
    again = listed(Sizes(train_size=4096), rows, unused, evaluation=rest)
    assert used == {task.data["n"] for task in again.tasks("train")}


def test_all_that_is_held_out_of_a_list_is_kept_unless_eval_size_says_how_much() -> None:
    held_out_ones = [n for n in range(150) if Draft({"n": n}).split(0.25) == "eval"]
    assert sorted(list_of(Sizes(), range(150))["eval"]) == held_out_ones and len(held_out_ones) > 30
    given = drafts(range(300))
    for size, count in ((0, 180), (100, 100)):
        apart = listed(Sizes(eval_size=size), given, unused, evaluation=given[:180])
        assert (len(apart.tasks("eval")), len(apart.tasks("train"))) == (count, 120)
    with pytest.raises(
        ConfigError, match="sizes: 300 distinct problems are given for evaluation, and 0 others for training"
    ):
        listed(Sizes(), given, unused, evaluation=given).tasks("train")


def test_about_the_share_of_a_list_is_held_out() -> None:
    for share, count in ((0.1, 96), (0.25, 251), (0.5, 478)):
        parts = list_of(Sizes(eval_size=90, eval_share=share, train_size=2000), range(1000))
        assert len(set(parts["train"])) == 1000 - count


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    old=st.integers(0, 999),
    new=st.integers(0, 999),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_no_change_of_list_size_or_seed_moves_a_problem_across(old, new, sizes, seeds) -> None:
    before, after = (
        list_of(Sizes(eval_size=size, seed=seed), random.Random(list).sample(range(400), 80))
        for list, size, seed in zip((old, new), sizes, seeds, strict=True)
    )
    assert not set(before["train"]) & set(after["eval"]) and not set(before["eval"]) & set(after["train"])


def test_a_larger_evaluation_only_adds_tasks_and_the_order_of_the_list_is_nothing() -> None:
    small, large = (list_of(Sizes(eval_size=size, train_size=100), range(200)) for size in (10, 30))
    assert small["eval"] == large["eval"][:10] and small["train"] == large["train"]
    assert list_of(Sizes(eval_size=10, train_size=100), reversed(range(200))) == small
    more = list_of(Sizes(eval_size=30, train_size=100), range(220))["eval"]
    assert [n for n in more if n < 200] == large["eval"][: len([n for n in more if n < 200])]


def test_a_draft_with_keys_on_both_sides_is_in_neither_split() -> None:
    names = range(100)
    alone = [Draft({"n": n}, keys=[n]) for n in names]
    pairs = [Draft({"n": n, "and": n + 1}, keys=[n, n + 1]) for n in range(99)]
    taskset = listed(Sizes(eval_size=20, eval_share=0.5, train_size=500), [*alone, *pairs], unused)
    used = {
        split: {n for task in taskset.tasks(split) for n in task.data.values()} for split in ("train", "eval")
    }
    assert not used["train"] & used["eval"] and len(used["train"]) == 45
    assert held_out(3, 0.5) == (Draft({}, keys=[3]).split(0.5) == "eval")


def test_a_world_that_is_too_small_says_how_small() -> None:
    with pytest.raises(
        ConfigError, match=r"sizes: eval_size is 50, but \d+ draws gave only \d+ distinct held-out"
    ):
        generated(Sizes(eval_size=50), numbers(20), unused).tasks("eval")
    with pytest.raises(
        ConfigError, match="2000 draws gave 20 distinct problems, none for training: lower eval_share"
    ):
        generated(Sizes(eval_share=0.999), numbers(20), unused).tasks("train")
    with pytest.raises(
        ConfigError, match=r"of 512 distinct problems .* holds out 256 .*: lower eval_size, or add"
    ):
        Bandit(eval_size=600).taskset().tasks("eval")
    one = drafts([1, 1])
    with pytest.raises(ConfigError, match="eval_size is 1, but of 1 distinct problems"):
        listed(Sizes(eval_size=1), one, unused).tasks("train")


def test_too_few_held_out_names_the_share_that_gives_enough() -> None:
    with pytest.raises(
        ConfigError,
        match=r"eval_size is 3, but of 8 distinct problems eval_share = 0\.25 holds out 2 and leaves 6 for "
        r"training: set eval_share to 0\.4, or lower eval_size, or add problems",
    ):
        list_of(Sizes(eval_size=3), range(8))
    assert len(list_of(Sizes(eval_size=3, eval_share=0.4, train_size=5), range(8))["eval"]) == 3
    with pytest.raises(ConfigError, match=r"leaves 0 for training: set eval_share to 0\.\d+, or lower"):
        list_of(Sizes(eval_size=1, eval_share=0.99), range(4))
    both = [Draft({"n": n}, keys=[n, n + 1]) for n in range(8)]
    with pytest.raises(ConfigError, match=", 1 ask what belongs to both and are left out"):
        listed(Sizes(eval_size=3), both, unused).tasks("eval")
    check_splits(Bandit().taskset(), "bandit")
    for few in (Bandit(eval_size=600), FrozenLake(size=2, eval_size=256)):
        with pytest.raises(ConfigError, match=r"eval_size is (600|256), but "):
            check_splits(few.taskset(), "w")
    assert 0 < len(FrozenLake(size=2).taskset().tasks("eval")) < 20, "all there are, where none are asked for"


class Own:
    """A task set without our help: which numbers each split holds."""

    def __init__(self, train, held_out) -> None:
        self.numbers = {"train": train, "eval": held_out}

    def tasks(self, split):
        return [
            Task(f"{split}/{i}", "own", i, {"n": n}, split=split) for i, n in enumerate(self.numbers[split])
        ]

    def environment(self, task):
        raise NotImplementedError


def test_splits_of_somebody_s_own_must_not_overlap() -> None:
    check_splits(Own(range(10, 500), range(10)), "own")
    with pytest.raises(
        ConfigError,
        match=r'own: training task train/3 has the content of the held-out task eval/1 \(\{"n": 8\}\)',
    ):
        check_splits(Own([5, 6, 7, 8], [9, 8]), "own")
    with pytest.raises(
        ConfigError, match="environment own: task eval/0: expected data and answer of plain JSON"
    ):
        check_splits(Own([1], [{2}]), "own")


def test_many_training_tasks_are_compared_in_part() -> None:
    looked_at = []

    class Counted(Own):
        def tasks(self, split):
            return super().tasks(split) if split == "eval" else self

        def __len__(self):
            return 25_000

        def __getitem__(self, index):
            looked_at.append(index)
            return Task(f"train/{index}", "own", 0, {"n": index})

    check_splits(Counted([], [-1]), "own")
    assert looked_at == list(range(0, 25_000, 3))
    with pytest.raises(ConfigError, match="training task train/9999 "):
        check_splits(Counted([], [9999]), "own")


def test_what_is_disjoint_by_construction_is_not_compared() -> None:
    taskset = listed(Sizes(eval_size=1, train_size=10**12), drafts(range(9)), unused)
    check_splits(taskset, "sizes")

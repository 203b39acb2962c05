"""Maps that can be solved, gymnasium's dynamics, sizes of the compact style."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from tests.environments.conftest import said

from silva.environments.worlds.frozen_lake import ACTIONS, FrozenLake, FrozenLakeGame, shortest_path
from silva.types import Task

TASK = Task("frozen_lake/0", "frozen_lake", 3, {"map": ["SFFF", "FHFH", "FFFH", "HFFG"]})
TINY = {"style": "compact", "think": False, "answer_tags": False}


def test_the_symbols_follow_the_player(first, replies_to) -> None:
    settings = FrozenLake(**TINY)
    assert first(settings, TASK) == "P___\n_O_O\n___O\nO__G\n10"
    safe = replies_to(settings, TASK, ["U", "D||D||R||R", "D||R"])
    assert list(map(said, safe)) == [
        "P___\n_O_O\n___O\nO__G\n9",
        "____\n_O_O\n__PO\nO__G\n5",
        "____\n_O_O\n___O\nO__√\n3",
    ]
    assert [step.rewards["goal"] for step in safe] == [0, 0, 1]
    assert [step.metrics["action_is_effective"] for step in safe] == [0, 1, 1]
    assert safe[-1].terminated and safe[-1].metrics["success"] == 1
    (fallen,) = replies_to(settings, TASK, ["R||D||R"])
    assert said(fallen) == "____\n_X_O\n___O\nO__G\n8"
    assert fallen.terminated and fallen.metrics["success"] == 0 and fallen.rewards == {"goal": 0}


def test_random_starts_move_both_ends_and_keep_a_way() -> None:
    starts = set()
    for task in FrozenLake(random_start=True, size=5, eval_size=60).taskset().tasks("eval"):
        rows = task.data["map"]
        assert ["".join(rows).count(tile) for tile in "SG"] == [1, 1]
        start = divmod("".join(rows).index("S"), 5)
        path = shortest_path(rows, start)
        assert path is not None and 2 <= len(path) <= 10
        starts.add(start)
    assert len(starts) > 12
    assert FrozenLake(max_actions=5, random_start=True).max_actions == 5


def test_slippery_ice_slips_as_often_as_it_should() -> None:
    settings = FrozenLake(size=3, slippery=True, success_rate=0.6, **TINY)
    ends = []
    for seed in range(1000):
        task = dataclasses.replace(TASK, seed=seed, data={"map": ["FFF", "FSF", "FFG"]})
        game = FrozenLakeGame(settings, task)
        game.apply("Right")
        ends.append(game.position)
    assert {(1, 2), (0, 1), (2, 1)} == set(ends)
    assert 570 < ends.count((1, 2)) < 630
    assert 160 < ends.count((0, 1)) < 240


@pytest.mark.parametrize("settings", [FrozenLake(), FrozenLake(slippery=True, success_rate=0.4, size=5)])
def test_moves_are_those_of_gymnasium(settings: FrozenLake) -> None:
    taskset = settings.taskset()
    for task in taskset.tasks("train")[:20]:
        game = taskset.environment(task)
        assert isinstance(game, FrozenLakeGame)
        lake = FrozenLakeEnv(
            desc=game.rows, is_slippery=settings.slippery, success_rate=settings.success_rate
        )
        rng = copy.deepcopy(game.rng)
        for number in range(20):
            state = game.position[0] * len(game.rows) + game.position[1]
            action = (task.seed >> number) % 4
            ways = lake.P[state][action]
            _, there, reward, done = rng.choices(ways, [way[0] for way in ways])[0]
            outcome = game.apply(ACTIONS[action])
            assert game.position == divmod(int(there), len(game.rows))
            assert outcome == (reward, done, there != state, "")
            if done:
                break


def test_on_slippery_ice_the_expert_plans_one_move_at_a_time() -> None:
    assert FrozenLakeGame(FrozenLake(slippery=True), TASK).expert_actions() == ["Down"]
    steady = FrozenLakeGame(FrozenLake(), TASK)
    assert steady.expert_actions() == ["Down", "Down", "Right", "Down", "Right", "Right"]

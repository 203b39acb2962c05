"""Maps that can be solved, gymnasium's dynamics, sizes of the compact style."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.frozen_lake import ACTIONS, FrozenLake, FrozenLakeGame, shortest_path
from silva.types import Message, Task

ROWS = ["SFFF", "FHFH", "FFFH", "HFFG"]
TASK = Task("frozen_lake/0", "frozen_lake", 3, {"map": ROWS})
TINY = {"style": "compact", "think": False, "answer_tags": False}


def test_the_symbols_follow_the_player(replies_to) -> None:
    settings = FrozenLake(**TINY)
    safe = replies_to(settings, TASK, ["U", "D||D||R||R", "D||R"])
    assert [step.observation.messages[0].content for step in safe] == [
        "P___\n_O_O\n___O\nO__G\n9",
        "____\n_O_O\n__PO\nO__G\n5",
        "____\n_O_O\n___O\nO__√\n3",
    ]
    assert [step.rewards["goal"] for step in safe] == [0, 0, 1]
    assert [step.metrics["action_is_effective"] for step in safe] == [0, 1, 1]
    assert safe[-1].terminated and safe[-1].metrics["success"] == 1
    fallen = replies_to(settings, TASK, ["R||D||R"])
    assert fallen[0].observation.messages[0].content == "____\n_X_O\n___O\nO__G\n8"
    assert fallen[0].terminated and fallen[0].metrics["success"] == 0 and fallen[0].rewards == {"goal": 0}


def test_a_compact_turn_is_short() -> None:
    game = FrozenLakeGame(FrozenLake(**TINY), TASK)
    prompt = asyncio.run(game.reset()).messages[0].content
    assert prompt == "P___\n_O_O\n___O\nO__G\n10" and len(prompt.encode()) == 22
    assert game.expert_reply() == "D||D||R||D||R"
    tagged = FrozenLakeGame(FrozenLake(style="compact", think=False, max_actions_per_turn=1), TASK)
    assert tagged.expert_reply() == "<answer>D</answer>"


def test_random_starts_move_both_ends_and_keep_a_way() -> None:
    taskset = FrozenLake(random_start=True, size=5, eval_size=100).taskset()
    starts = set()
    for task in taskset.tasks("eval"):
        rows = task.data["map"]
        assert [sum(row.count(tile) for row in rows) for tile in "SG"] == [1, 1]
        start = next((r, row.index("S")) for r, row in enumerate(rows) if "S" in row)
        path = shortest_path(rows, start)
        assert path is not None and 2 <= len(path) <= 10
        starts.add(start)
    assert len(starts) > 15


def test_slippery_ice_slips_as_often_as_it_should() -> None:
    rows = ["FFF", "FSF", "FFG"]
    settings = FrozenLake(size=3, slippery=True, success_rate=0.6, **TINY)
    ends = []
    for seed in range(1000):
        game = FrozenLakeGame(settings, dataclasses.replace(TASK, seed=seed, data={"map": rows}))
        game.apply("Right")
        ends.append(game.position)
    assert {(1, 2), (0, 1), (2, 1)} == set(ends)
    assert 570 < ends.count((1, 2)) < 630
    assert 160 < ends.count((0, 1)) < 240


@pytest.mark.parametrize("settings", [FrozenLake(), FrozenLake(slippery=True, success_rate=0.4, size=5)])
def test_moves_are_those_of_gymnasium(settings: FrozenLake) -> None:
    taskset = settings.taskset()
    for task in taskset.tasks("train")[:50]:
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
    game = FrozenLakeGame(FrozenLake(slippery=True), TASK)
    assert game.expert_actions() == ["Down"]
    steady = FrozenLakeGame(FrozenLake(), TASK)
    assert steady.expert_actions() == ["Down", "Down", "Right", "Down", "Right", "Right"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(moves=st.lists(st.lists(st.sampled_from("LDRUx"), min_size=1, max_size=6), max_size=6))
def test_reward_one_means_standing_on_the_goal(moves: list[list[str]]) -> None:
    game = FrozenLakeGame(FrozenLake(**TINY), TASK)

    async def run() -> float:
        await game.reset()
        total = 0.0
        for turn in moves:
            step = await game.step(Message("assistant", "||".join(turn)))
            total += sum(step.rewards.values())
            if step.terminated or step.truncated:
                break
        return total

    assert asyncio.run(run()) == float(game.position == (3, 3))


def test_settings_that_cannot_reach_the_goal_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_actions = 5 cannot reach the goal of a map of size 4"):
        FrozenLake(max_actions=5)
    assert FrozenLake(max_actions=5, random_start=True).max_actions == 5

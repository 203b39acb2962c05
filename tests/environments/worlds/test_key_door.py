"""One key of several opens the door; a wrong one is only told of at the end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.key_door import KeyDoor, KeyDoorGame
from silva.types import Step, Task

DATA = {"keys": ["pink", "red", "blue"], "exits": ["Left", "Right", "Left"]}
TASK = Task("t", "key_door", 0, DATA, "red")
COMPACT: dict[str, Any] = dict(style="compact", think=False, answer_tags=False)


@pytest.fixture
def play(first, replies_to):
    """What is shown from the first observation on, and the last step."""

    def run(*replies: str, **keys: Any) -> tuple[list[str], Step]:
        world = KeyDoor(keys=3, before=1, after=2, **keys)
        steps = replies_to(world, TASK, replies)
        return [first(world, TASK), *map(said, steps)], steps[-1]

    return run


def test_the_way_in_little_and_in_words(play) -> None:
    shown, end = play("(", "r", ")", "(", "=", **COMPACT)
    assert shown == ["(\n9", "r:prb\n8", ")\n7", "(\n6", "=\n5", "=\n4"]
    assert (end.rewards, end.terminated, end.metrics["success"]) == ({"opened": 1.0}, True, 1.0)
    replies = [f"<think>x</think><answer>{a}</answer>" for a in ("Left", "Take red", "Right", "Left", "Open")]
    shown, end = play(*replies)
    assert "A room. The sign shows left." in shown[0] and "Take pink" in shown[0]
    assert shown[1].startswith("Keys lie here: pink, red, blue. A note says: the door is red.")
    assert shown[-1].startswith("The door opens.") and end.rewards == {"opened": 1.0}


def test_a_wrong_key_earns_nothing_and_nothing_says_so_before_the_door(play) -> None:
    right, _ = play("(", "r", ")", "(", **COMPACT)
    for key in "pb":
        shown, end = play("(", key, ")", "(", "=", **COMPACT)
        assert shown[:-1] == right
        assert (end.rewards, end.terminated, end.metrics["success"]) == ({"opened": 0.0}, True, 0.0)


@pytest.mark.slow
def test_only_the_right_key_and_the_right_exits_open_the_door() -> None:
    """All ways through five places, with every action there is."""
    world = KeyDoor(keys=3, before=1, after=2)

    def opens(way: tuple[str, ...]) -> bool:
        game = KeyDoorGame(world, TASK)
        return any([game.apply(action).reward for action in way])

    ways = itertools.product(KeyDoorGame(world, TASK).actions(), repeat=5)
    assert list(filter(opens, ways)) == [("Left", "Take red", "Right", "Left", "Open")]


def test_a_wrong_exit_costs_a_turn_and_a_second_key_is_not_taken(play) -> None:
    shown, end = play(")", "(", "p", "r", ")", "(", "=", **COMPACT)
    assert shown[1] == "(\n8" and shown[4] == ")\n5"
    assert end.rewards == {"opened": 0.0}


def test_random_play_opens_the_door_as_often_as_chance_says(play_out) -> None:
    """One key of two, with turns to spare: one half."""
    world = KeyDoor(keys=2, before=0, after=1, max_actions=30, train_size=400).taskset()
    games = [(task, world.environment(task)) for task in world.tasks("train")]
    won = [play_out(g, lambda _, g=g, t=t: g.random_reply(t.seed))[-1].metrics["success"] for t, g in games]
    assert abs(sum(won) / 400 - 0.5) < 4 * (0.25 / 400) ** 0.5

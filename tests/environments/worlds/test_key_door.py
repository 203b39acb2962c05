"""One key of several opens the door; a wrong one is only told of at the end."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from silva.environments.worlds.key_door import KeyDoor, KeyDoorGame
from silva.types import Message, Step, Task

DATA = {"keys": ["pink", "red", "blue"], "exits": ["Left", "Right", "Left"]}
TASK = Task("t", "key_door", 0, DATA, "red")
COMPACT: dict[str, Any] = dict(style="compact", think=False, answer_tags=False)


def play(*replies: str, **keys: Any) -> tuple[list[str], Step]:
    """What is shown from the first observation on, and the last step."""

    async def go() -> tuple[list[str], Step]:
        game = KeyDoorGame(KeyDoor(keys=3, before=1, after=2, **keys), TASK)
        shown = [(await game.reset()).messages[0].content]
        for reply in replies:
            step = await game.step(Message("assistant", reply))
            shown.append(step.observation.messages[0].content)
        return shown, step

    return asyncio.run(go())


def test_the_way_in_little() -> None:
    shown, end = play("(", "r", ")", "(", "=", **COMPACT)
    assert shown == ["(\n9", "r:prb\n8", ")\n7", "(\n6", "=\n5", "=\n4"]
    assert (end.rewards, end.terminated, end.metrics["success"]) == ({"opened": 1.0}, True, 1.0)


def test_the_way_in_words() -> None:
    replies = [f"<think>x</think><answer>{a}</answer>" for a in ("Left", "Take red", "Right", "Left", "Open")]
    shown, end = play(*replies)
    assert "A room. The sign shows left." in shown[0] and "Take pink" in shown[0]
    assert shown[1].startswith("Keys lie here: pink, red, blue. A note says: the door is red.")
    assert shown[-1].startswith("The door opens.") and end.rewards == {"opened": 1.0}


def test_a_wrong_key_earns_nothing_and_nothing_says_so_before_the_door() -> None:
    right, _ = play("(", "r", ")", "(", **COMPACT)
    for key in "pb":
        shown, _ = play("(", key, ")", "(", **COMPACT)
        assert shown == right
        _, end = play("(", key, ")", "(", "=", **COMPACT)
        assert (end.rewards, end.terminated, end.metrics["success"]) == ({"opened": 0.0}, True, 0.0)


def test_only_the_right_key_and_the_right_exits_open_the_door() -> None:
    """All ways through five places, with every action there is."""
    won = {
        "".join(replies)
        for replies in itertools.product("()=prb", repeat=5)
        if play_until_over(replies).rewards["opened"]
    }
    assert won == {"(r)(="}


def play_until_over(replies: tuple[str, ...]) -> Step:
    async def go() -> Step:
        game = KeyDoorGame(KeyDoor(keys=3, before=1, after=2, max_actions=5, **COMPACT), TASK)
        await game.reset()
        for reply in replies:
            step = await game.step(Message("assistant", reply))
            if step.terminated or step.truncated:
                break
        return step

    return asyncio.run(go())


def test_a_wrong_exit_costs_a_turn_and_a_second_key_is_not_taken() -> None:
    shown, end = play(")", "(", "p", "r", ")", "(", "=", **COMPACT)
    assert shown[1] == "(\n8" and shown[4] == ")\n5"
    assert end.rewards == {"opened": 0.0}


def test_random_play_opens_the_door_as_often_as_chance_says() -> None:
    """One key of two, with turns to spare: one half."""
    tasks = KeyDoor(keys=2, before=0, after=1, max_actions=30, train_size=2000).taskset()

    async def won(task: Task) -> float:
        game: Any = tasks.environment(task)
        await game.reset()
        while True:
            step = await game.step(Message("assistant", game.random_reply(task.seed)))
            if step.terminated or step.truncated:
                return step.metrics["success"]

    async def go() -> float:
        return sum([await won(task) for task in tasks.tasks("train")]) / 2000

    assert abs(asyncio.run(go()) - 0.5) < 4 * (0.25 / 2000) ** 0.5


def test_too_few_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_actions = 4: 1 rooms, a key, 3 rooms and the door need 6"):
        KeyDoor(max_actions=4)

"""Rules move by move, rooms that an independent search solves, rewards that only a solution brings."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.sokoban import ACTIONS, Sokoban, SokobanGame, read_room, solve
from silva.errors import ConfigError
from silva.types import Message, Task

ROOM = ["######", "#__O_#", "#_PX_#", "#__XO#", "#____#", "######"]
TASK = Task("sokoban/0", "sokoban", 3, {"room": ROOM}, [])
TINY = {"style": "compact", "think": False, "answer_tags": False}
TWO = {"rows": 8, "columns": 8, "boxes": 2, "max_moves": 20, "max_actions": 20}


def shortest(rows: list[str]) -> int | None:
    """The least number of moves, by a breadth-first search over (row, column) that shares no code."""
    at = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    goals = {cell for cell, symbol in at.items() if symbol in "O√S"}
    player = next(cell for cell, symbol in at.items() if symbol in "PS")
    layer = {(player, frozenset(cell for cell, symbol in at.items() if symbol in "X√"))}
    seen, moves = set(layer), 0
    while layer:
        if any(boxes == goals for _, boxes in layer):
            return moves
        moves += 1
        following = set()
        for (r, c), boxes in layer:
            for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):
                one, two = (r + down, c + right), (r + 2 * down, c + 2 * right)
                if at[one] == "#" or (one in boxes and (at[two] == "#" or two in boxes)):
                    continue
                following.add((one, (boxes - {one}) | {two} if one in boxes else boxes))
        layer = following - seen
        seen |= layer
    return None


def test_an_episode_move_by_move(replies_to) -> None:
    steps = replies_to(Sokoban(**TINY), TASK, ["L||R||R", "D||L||R||R", "D", "D||R||U||U"])
    shown = [step.observation.messages[0].content for step in steps]
    assert shown[0] == "######\n#__O_#\n#__PX#\n#__XO#\n#____#\n######\n7"  # the box went to the wall
    assert shown[1] == "######\n#__O_#\n#___X#\n#__PO#\n#__X_#\n######\n3"[:-1] + "3"
    assert [round(step.rewards["score"], 9) for step in steps[:2]] == [-0.3, -0.4]


def test_boxes_on_targets_pay_once_and_the_last_one_more(replies_to) -> None:
    """Up: nothing. Right (box to O): +1. Round it and back off: -1. The symbols follow."""
    room = ["#######", "#_____#", "#_PXO_#", "#___O_#", "#___X_#", "#_____#", "#######"]
    task = Task("sokoban/1", "sokoban", 0, {"room": room}, [])
    keys = {"rows": 7, "columns": 7, "boxes": 2, "max_actions": 20, **TINY}
    steps = replies_to(Sokoban(**keys), task, ["R", "R", "U||R||R", "D||L", "L||D||D||D||R", "U"])
    scores = [step.rewards["score"] for step in steps]
    assert scores == pytest.approx([0.9, -1.1, -0.3, -0.2, -0.5, 0.9])
    boards = [step.observation.messages[0].content.split("\n") for step in steps]
    assert boards[0][2] == "#__P√_#"
    assert boards[1][2] == "#___SX#"  # pushed off again; the player stands on the target
    assert boards[5][2:6] == ["#___OX#", "#___√_#", "#___P_#", "#_____#"]
    assert not steps[-1].terminated


def test_the_last_box_ends_the_episode(replies_to) -> None:
    task = Task("sokoban/2", "sokoban", 0, {"room": ["#####", "#P_X#", "#_XO#", "#___#", "#####"]}, [])
    (step,) = replies_to(Sokoban(rows=5, columns=5, **TINY), task, ["D||R||L"])
    assert step.terminated and step.metrics["success"] == 1 and step.metrics["actions"] == 2
    assert step.rewards["score"] == pytest.approx(10.8)

"""Rules move by move, rooms that an independent search solves, rewards that only a solution brings."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.environments.conftest import said

from silva.environments.worlds.sokoban import ACTIONS, Sokoban, _shape, read_room, solve
from silva.errors import ConfigError
from silva.types import Step, Task

TINY: dict[str, Any] = {"style": "compact", "think": False, "answer_tags": False}
TWO: dict[str, Any] = {"rows": 8, "columns": 8, "boxes": 2, "max_moves": 16, "max_actions": 20}
ROOM = ["######", "#__O_#", "#_P__#", "#_XX_#", "#___O#", "######"]


def task(rows: list[str]) -> Task:
    return Task("sokoban/0", "sokoban", 3, {"room": rows}, [])


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


def rows_of(step: Step) -> list[str]:
    return said(step).split("\n")


def test_an_episode_move_by_move(replies_to) -> None:
    """Neither two boxes in a row nor a box at a wall can be pushed."""
    settings = Sokoban(**TINY, boxes=2, max_actions=20)
    steps = replies_to(settings, task(ROOM), ["L||D||R", "U||R||D||D", "x"])
    assert rows_of(steps[0]) == ["######", "#__O_#", "#____#", "#PXX_#", "#___O#", "######", "17"]
    assert steps[0].metrics["action_is_effective"] == pytest.approx(2 / 3)
    assert rows_of(steps[1])[3:5] == ["#_PX_#", "#_X_O#"]
    assert steps[1].metrics["action_is_effective"] == pytest.approx(3 / 4)
    assert rows_of(steps[2])[0] == "?" and steps[2].shaped == {"format": -0.1}
    assert [step.rewards["score"] for step in steps] == pytest.approx([-0.3, -0.4, 0.0])


def test_boxes_on_targets_pay_once_and_the_last_one_more(replies_to) -> None:
    room = ["########", "#______#", "#_PXO__#", "#______#", "#___X__#", "#___O__#", "########"]
    settings = Sokoban(rows=7, columns=8, boxes=2, max_actions=20, **TINY)
    steps = replies_to(settings, task(room), ["R", "R", "U||R||R||D", "L", "D||L||D||L"])
    assert [step.rewards["score"] for step in steps] == pytest.approx([0.9, -1.1, -0.4, 0.9, 10.7])
    assert rows_of(steps[0])[2] == "#__P√__#"
    assert rows_of(steps[1])[2] == "#___SX_#"  # pushed off again; the player stands on the target
    assert rows_of(steps[3])[2] == "#___√P_#"
    assert rows_of(steps[4])[4:] == ["#___P__#", "#___√__#", "########", "10"]
    assert steps[-1].terminated and steps[-1].metrics["success"] == 1.0
    assert steps[-1].metrics["actions"] == 3.0  # the one after the solution is not played


@pytest.mark.parametrize("keys", [{}, {"rows": 5, "columns": 5}, TWO], ids=["6x6", "5x5", "8x8"])
def test_rooms_are_as_far_from_solved_as_an_exhaustive_search_says(keys: dict[str, Any]) -> None:
    lengths = set()
    for drawn in Sokoban(**{"eval_size": 10, **keys}).taskset().tasks("train")[:25]:
        rows = drawn.data["room"]
        length = shortest(rows)
        assert length == len(drawn.answer)
        room, position = read_room(rows)
        found = solve(room, position)
        assert found is not None and len(found) == length
        lengths.add(length)
        cells = "".join(rows)
        assert cells.count("X") == cells.count("O") + cells.count("S") == keys.get("boxes", 1)
    assert len(lengths) > 4 and min(lengths) >= 3 and max(lengths) <= keys.get("max_moves", 10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), walk=st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_the_solver_agrees_with_an_exhaustive_search_from_anywhere(seed: int, walk: list[str]) -> None:
    """Positions that random moves lead to, of which many cannot be solved any more."""
    draft = Sokoban(rows=6, columns=6, boxes=2)._draw(random.Random(seed))
    room, position = read_room(draft.data["room"])
    for action in walk:
        position = room.moved(position, dict(room.steps())[action])
    found, length = solve(room, position), shortest(room.draw(position))
    assert (None if found is None else len(found)) == length
    for action in found or []:
        position = room.moved(position, dict(room.steps())[action])
    assert found is None or position[1] == room.targets


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"max_actions_per_turn": 1, **TINY}, TWO])
def test_the_expert_returns_as_much_as_the_shortest_solution(keys: dict[str, Any], expert_rate) -> None:
    settings = Sokoban(**{"eval_size": 20, **keys})
    wanted = [shortest(drawn.data["room"]) for drawn in settings.taskset().tasks("eval")]
    best = [settings.boxes + 10 - 0.1 * moves for moves in wanted if moves is not None]
    assert len(best) == settings.eval_size
    assert expert_rate(settings, settings.eval_size) == (1.0, pytest.approx(sum(best) / len(best)))


def test_the_expert_finds_its_way_after_other_moves(play_out) -> None:
    room = ["#######", "#___O_#", "#_PX__#", "#_____#", "#_____#", "#######"]
    tasks = Sokoban(rows=6, columns=7, max_actions=20, **TINY).taskset()
    game = tasks.environment(task(room))
    steps = play_out(game, lambda turn: "R||R" if turn == 0 else game.expert_reply())
    assert steps[-1].truncated and steps[-1].metrics["success"] == 0.0  # against the wall: lost
    other = tasks.environment(task(room))
    steps = play_out(other, lambda turn: "U||U" if turn == 0 else other.expert_reply())
    assert len(steps) == 2 and steps[-1].metrics["success"] == 1.0
    assert steps[-1].metrics["actions"] == 5.0  # down again, push, two to get below the box, push


def test_a_room_is_the_same_turned_mirrored_shifted_or_with_the_player_elsewhere() -> None:
    rows = ["#######", "#__PO##", "#_X_###", "#######", "#######"]
    guises = [
        ["#######", "#######", "#_P_O##", "#_X_###", "#######"],  # shifted
        ["#######", "##O_P_#", "###_X_#", "#######", "#######"],  # mirrored
        ["#####", "###O#", "##__#", "##XP#", "##__#", "#####"],  # turned
    ]
    assert all(_shape(guise) == _shape(rows) for guise in guises)
    other = ["#######", "#__XO##", "#_P_###", "#######", "#######"]
    assert _shape(other) != _shape(rows)


def test_vocabularies(first) -> None:
    def shown(**keys: Any) -> str:
        return first(Sokoban(**keys), task(ROOM))

    assert shown(**TINY) == "######\n#__O_#\n#_P__#\n#_XX_#\n#___O#\n######\n10"
    assert shown(**TINY, symbols="W.TDBAX").startswith("WWWWWW\nW..T.W\nW.A..W\nW.BB.W")
    places = "P: (2, 2)\nX: (3, 2) (3, 3)\nO: (1, 3) (4, 4)\n#: -\n"
    assert shown(**TINY, vocabulary="coordinates") == places + "10"
    assert shown(**TINY, vocabulary="both").startswith(places + "######\n#__O_#")
    words = shown(vocabulary="words", think=False)
    assert "\nwall, floor, you, floor, floor, wall\nwall, floor, box, box, floor, wall\n" in words
    assert "√" not in words
    full = shown()
    assert "√: box on a target" in full and "Actions: Up, Down, Left, Right." in full
    assert "Box: (3, 2) (3, 3)\nTarget: (1, 3) (4, 4)\n" in shown(vocabulary="coordinates")


def test_rooms_that_cannot_be_made_are_named() -> None:
    with pytest.raises(ConfigError, match="of 1000 rooms of 5 x 5 takes 9 to 10 moves with boxes = 5"):
        Sokoban(rows=5, columns=5, boxes=5, min_moves=9).taskset().tasks("eval")

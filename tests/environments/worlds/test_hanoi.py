"""Rules, optimal play, and that nothing but a solution earns a solution's reward."""

from __future__ import annotations

import itertools
import json
from collections import deque

import pytest
from tests.environments.conftest import said

from silva.environments.worlds.hanoi import Hanoi, Move, distance, illegal, read_moves, solution, top
from silva.types import Task

TOWER = Task("h", "hanoi", 0, {"position": [0, 0, 0], "goal": 2})


def least_moves(start: tuple[int, ...], goal: int) -> int:
    """Breadth-first search, independent of the formula."""
    seen, queue = {start: 0}, deque([start])
    while queue:
        position = queue.popleft()
        if set(position) == {goal}:
            return seen[position]
        for source, target in itertools.permutations(range(3), 2):
            move = Move(top(position, source), source, target)
            if not illegal(position, move):
                there = (*position[: move.disk - 1], target, *position[move.disk :])
                if there not in seen:
                    seen[there] = seen[position] + 1
                    queue.append(there)
    raise AssertionError("unreachable")


def test_the_formula_equals_breadth_first_search_from_every_position() -> None:
    for position in itertools.product(range(3), repeat=4):
        for goal in range(3):
            assert distance(position, goal) == least_moves(position, goal)
            assert len(solution(position, goal)) == distance(position, goal)
    assert distance([0] * 10, 2) == 1023


def test_a_game_of_several_turns_with_an_illegal_move(first, replies_to) -> None:
    settings = Hanoi(min_disks=2, max_disks=2, eval_size=2, think=False)
    task = Task("h", "hanoi", 0, {"position": [0, 0], "goal": 2})
    steps = replies_to(settings, task, ["A>B || A>B", "B>C || C>A", "<answer>A>B || A>C || B>C</answer>"])
    assert said(steps[0]) == (
        "Illegal move A>B: disk 2 is larger than disk 1.\nA: 2\nB: 1\nC: -\n"
        "Goal: all disks on C.\nActions left: 18."
    )
    assert steps[0].metrics["action_is_effective"] == 0.5
    assert said(steps[1]).startswith("A: 2 1\n")
    assert [step.rewards["solved"] for step in steps] == [0, 0, 1]
    assert steps[2].terminated and steps[2].metrics["success"] == 1
    compact = Hanoi(style="compact", think=False, answer_tags=False)
    assert first(compact, TOWER) == "321\n-\n-\nC\n20"
    assert said(replies_to(compact, TOWER, ["BA"])[0]) == "!\n321\n-\n-\nC\n19"


SOLVED = [[1, "A", "C"], [2, "A", "B"], [1, "C", "B"], [3, "A", "C"],
          [1, "B", "A"], [2, "B", "C"], [1, "A", "C"]]  # fmt: skip


@pytest.mark.parametrize(
    ("moves", "reward"),
    [
        (SOLVED, 1.0),
        (SOLVED[:4], 0.5 * 4 / 7),
        (SOLVED[:-1], 0.5 * 6 / 7),
        ([[2, "A", "C"], *SOLVED[1:]], 0.0),  # another disk than the one that moves
        ([*SOLVED, [3, "A", "B"]], 0.5),  # solved, and then an illegal move
        ([[1, "A", "B"], [1, "B", "A"]] * 4, 0.0),  # eight legal moves that lead nowhere
        ([*SOLVED, [1, "C", "A"]], 0.5 * 6 / 7),  # solved, and then left
        ("no moves", 0.0),
    ],
)
def test_single_answers_worked_by_hand(moves, reward: float, replies_to) -> None:
    for reply in (json.dumps(moves), f"<answer>{json.dumps(moves)}</answer>"):
        for partial in (True, False):
            (step,) = replies_to(Hanoi(form="single", partial=partial, think=False), TOWER, [reply])
            assert step.rewards["correct"] == pytest.approx(reward if partial or reward == 1.0 else 0.0)
            assert step.metrics["success"] == float(reward == 1.0)
            assert step.shaped == {"format": 0.0 if isinstance(moves, list) else -0.1}


def test_what_is_read_as_a_list_of_moves() -> None:
    assert read_moves('[[1, "A", "C"]]', 3) == [Move(1, 0, 2)]
    assert read_moves("[[1,A,C],[2,'A','B']]", 3) == [Move(1, 0, 2), Move(2, 0, 1)]
    for text in ("", "[]", "[[1, A, D]]", "[[1, A, C]] or so", "[[1, A]]", "[1, A, C]"):
        assert read_moves(text, 3) is None
    assert read_moves(json.dumps([[1, "A", "B"], [1, "B", "A"]] * 16), 3) is not None
    assert read_moves(json.dumps([[1, "A", "B"], [1, "B", "A"]] * 17), 3) is None

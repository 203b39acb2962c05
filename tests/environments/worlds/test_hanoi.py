"""Rules, optimal play, and that nothing but a solution earns a solution's reward."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.worlds.hanoi import Hanoi, Move, distance, illegal, play, read_moves, solution, top
from silva.types import Task

TOWER = Task("h", "hanoi", 0, {"position": [0, 0, 0], "goal": 2})
SINGLE = Hanoi(form="single", partial=True, think=False)


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


def answer(moves: list[list]) -> str:
    return f"<answer>{json.dumps(moves)}</answer>"


def single(reply: str, replies_to, task: Task = TOWER) -> tuple[float, float]:
    step = replies_to(SINGLE, task, [reply])[0]
    return step.rewards["correct"], step.metrics["success"]


def test_the_formula_equals_breadth_first_search_from_every_position() -> None:
    for position in itertools.product(range(3), repeat=4):
        for goal in range(3):
            assert distance(position, goal) == least_moves(position, goal)
            assert len(solution(position, goal)) == distance(position, goal)
    assert distance([0] * 10, 2) == 1023


def test_a_game_of_several_turns_with_an_illegal_move(replies_to) -> None:
    settings = Hanoi(min_disks=2, max_disks=2, eval_size=2, think=False)
    task = Task("h", "hanoi", 0, {"position": [0, 0], "goal": 2})
    steps = replies_to(settings, task, ["A>B || A>B", "B>C || C>A", "<answer>A>B || A>C || B>C</answer>"])
    assert steps[0].observation.messages[0].content == (
        "Illegal move A>B: disk 2 is larger than disk 1.\nA: 2\nB: 1\nC: -\n"
        "Goal: all disks on C.\nActions left: 18."
    )
    assert steps[0].metrics["action_is_effective"] == 0.5
    assert steps[1].observation.messages[0].content.startswith("A: 2 1\n")
    assert [step.rewards["solved"] for step in steps] == [0, 0, 1]
    assert steps[2].terminated and steps[2].metrics["success"] == 1


def test_compact_positions(replies_to) -> None:
    settings = Hanoi(style="compact", think=False, answer_tags=False)
    game = settings.taskset().environment(TOWER)
    assert asyncio.run(game.reset()).messages[0].content == "321\n-\n-\nC\n20"
    step = replies_to(settings, TOWER, ["BA"])[0]
    assert step.observation.messages[0].content == "!\n321\n-\n-\nC\n19"


def test_single_answers_worked_by_hand(replies_to) -> None:
    full = [
        [1, "A", "C"],
        [2, "A", "B"],
        [1, "C", "B"],
        [3, "A", "C"],
        [1, "B", "A"],
        [2, "B", "C"],
        [1, "A", "C"],
    ]
    assert single(answer(full), replies_to) == (1.0, 1.0)
    assert single(json.dumps(full), replies_to) == (1.0, 1.0)
    assert single(answer(full[:4]), replies_to) == (pytest.approx(0.5 * 4 / 7), 0.0)
    assert single(answer(full[:-1]), replies_to) == (pytest.approx(0.5 * 6 / 7), 0.0)
    wrong_disk = [[2, "A", "C"], *full[1:]]
    assert single(answer(wrong_disk), replies_to) == (0.0, 0.0)
    solved_then_illegal = [*full, [3, "A", "B"]]
    assert single(answer(solved_then_illegal), replies_to) == (0.5, 0.0)
    useless = [[1, "A", "B"], [1, "B", "A"]] * 4  # eight legal moves that lead nowhere
    assert single(answer(useless), replies_to) == (0.0, 0.0)
    assert single("no moves", replies_to) == (0.0, 0.0)


def test_without_partial_only_a_solution_earns_anything(replies_to) -> None:
    settings = Hanoi(form="single", think=False)
    almost = answer([list(m) for m in [(1, "A", "C"), (2, "A", "B"), (1, "C", "B"), (3, "A", "C")]])
    step = replies_to(settings, TOWER, [almost])[0]
    assert step.rewards == {"correct": 0.0} and step.shaped == {"format": 0.0}
    assert replies_to(settings, TOWER, ["?"])[0].shaped == {"format": -0.1}


moves = st.tuples(st.integers(0, 5), st.sampled_from("ABC"), st.sampled_from("ABC")).map(list)
legal_walks = st.lists(st.integers(0, 2), max_size=28)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    position=st.lists(st.integers(0, 2), min_size=3, max_size=4),
    goal=st.integers(0, 2),
    moves=st.lists(moves),
)
def test_no_unsolved_list_reaches_the_reward_of_a_solution(position, goal, moves, replies_to) -> None:
    if distance(position, goal):
        check(Task("h", "hanoi", 0, {"position": position, "goal": goal}), moves, replies_to)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(position=st.lists(st.integers(0, 2), min_size=3, max_size=3), choices=legal_walks)
def test_nor_does_any_list_of_legal_moves(position, choices, replies_to) -> None:
    if distance(position, 2):
        now, walk = list(position), []
        for choice in choices:
            options = [Move(top(now, a), a, b) for a, b in itertools.permutations(range(3), 2)]
            options = [move for move in options if not illegal(now, move)]
            move = options[choice % len(options)]
            walk.append([move.disk, "ABC"[move.source], "ABC"[move.target]])
            now[move.disk - 1] = move.target
        check(Task("h", "hanoi", 0, {"position": position, "goal": 2}), walk, replies_to)


def check(task: Task, moves: list[list], replies_to) -> None:
    parsed = [Move(disk, "ABC".index(a), "ABC".index(b)) for disk, a, b in moves]
    end, legal = play(task.data["position"], parsed)
    really_solved = legal and set(end) == {task.data["goal"]}
    reward, success = single(answer(moves), replies_to, task)
    assert (reward == 1.0) == (success == 1.0) == really_solved
    assert really_solved or 0.0 <= reward <= 0.5


def test_what_is_read_as_a_list_of_moves() -> None:
    assert read_moves('[[1, "A", "C"]]', 3) == [Move(1, 0, 2)]
    assert read_moves("[[1,A,C],[2,'A','B']]", 3) == [Move(1, 0, 2), Move(2, 0, 1)]
    for text in ("", "[]", "[[1, A, D]]", "[[1, A, C]] or so", "[[1, A]]", "[1, A, C]"):
        assert read_moves(text, 3) is None
    assert read_moves(json.dumps([[1, "A", "B"], [1, "B", "A"]] * 16), 3) is not None
    assert read_moves(json.dumps([[1, "A", "B"], [1, "B", "A"]] * 17), 3) is None


def test_limits_that_leave_no_solution_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_actions = 20: 5 disks need up to 31"):
        Hanoi(max_disks=5)
    with pytest.raises(ValidationError, match="max_disks = 2: expected min_disks = 3"):
        Hanoi(max_disks=2)

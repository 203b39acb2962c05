"""The Tower of Hanoi: move all disks to the goal peg, one at a time, never a larger on a smaller one.

`turns`: moves are played one or several a turn, illegal ones are answered and change nothing.
`single`: one reply holds all moves as [[disk, "from", "to"], ...]. Reward 1 if every move is legal, names
the disk that moves, and the last one reaches the goal. Otherwise nothing or, with `partial`, half the
share of the way covered: the fall in the least number of moves still needed, from the start to the
position before the first illegal move. Moves that lead nowhere therefore earn nothing.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.environments.tasks import Draft, Tasks, generated, listed
from silva.rewards.text import extract_answer
from silva.types import Task

PEGS = "ABC"
LISTED_DISKS = 6  # up to here all tasks are listed (3^6 positions x 3 goals), beyond they are drawn


class Hanoi(TextGameSettings):
    bounds: ClassVar = ("disks",)
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["hanoi"] = "hanoi"
    form: Literal["turns", "single"] = "turns"
    """`turns`: a game of several turns; `single`: all moves in one answer."""
    min_disks: Positive = 3
    """Fewest disks."""
    max_disks: Annotated[int, Field(ge=1, le=14)] = 4
    """Most disks."""
    start: Literal["any", "tower"] = "any"
    """`any` legal position, or all disks on one peg (six tasks for each number of disks)."""
    max_actions: Positive = 20
    """Moves of one episode; a turn without a valid move uses up one."""
    eval_size: Positive = 64
    """Held-out tasks, disjoint from the training tasks by content."""
    partial: bool = False
    """`single` only: credit, at most 0.5, for the share of the way covered."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        needed = 2**self.max_disks - 1
        if self.form == "turns" and self.max_actions < needed:
            raise ValueError(f"max_actions = {self.max_actions}: {self.max_disks} disks need up to {needed}")
        return self

    def taskset(self) -> Tasks:
        if self.start == "tower" or self.max_disks <= LISTED_DISKS:
            return listed(self, self._all(), self._build)
        return generated(self, self._draw, self._build)

    def _build(self, task: Task) -> HanoiGame | HanoiAnswer:
        return HanoiGame(self, task) if self.form == "turns" else HanoiAnswer(self, task)

    def _all(self) -> Iterator[Draft]:
        for disks in range(self.min_disks, self.max_disks + 1):
            towers = [(peg,) * disks for peg in range(3)]
            positions = towers if self.start == "tower" else itertools.product(range(3), repeat=disks)
            for position in positions:
                for goal in range(3):
                    if distance(position, goal):
                        yield Draft({"position": list(position), "goal": goal})

    def _draw(self, rng: random.Random) -> Draft:
        disks = rng.randint(self.min_disks, self.max_disks)
        goal, position = rng.randrange(3), [rng.randrange(3) for _ in range(disks)]
        if not distance(position, goal):
            position[-1] = (goal + 1) % 3
        return Draft({"position": position, "goal": goal})


class Move(NamedTuple):
    disk: int
    source: int
    target: int


class HanoiGame(TextGame):
    reward_name = "solved"
    settings: Hanoi

    def __init__(self, settings: Hanoi, task: Task) -> None:
        super().__init__(settings, task)
        self.position: list[int] = list(task.data["position"])
        self.goal: int = task.data["goal"]

    def instructions(self) -> str:
        return (
            f"Tower of Hanoi. Move all disks to peg {PEGS[self.goal]}. A move takes the top disk of a peg to "
            "another peg, never onto a smaller disk. Each line shows a peg from bottom to top."
        )

    def actions(self) -> dict[str, str]:
        return {f"{a}>{b}": f"{a}{b}" for a, b in itertools.permutations(PEGS, 2)}

    def render(self) -> str:
        pegs = show_pegs(self.position)
        if self.settings.style == "compact":
            return "\n".join(_short(peg) for peg in pegs) + f"\n{PEGS[self.goal]}"
        return _lines(pegs) + f"\nGoal: all disks on {PEGS[self.goal]}."

    def apply(self, action: str) -> Outcome:
        source, target = PEGS.index(action[0]), PEGS.index(action[2])
        disk = top(self.position, source)
        problem = illegal(self.position, Move(disk, source, target))
        if problem:
            note = "!" if self.settings.style == "compact" else f"Illegal move {action}: {problem}."
            return Outcome(effective=False, note=note)
        self.position[disk - 1] = target
        self.solved = distance(self.position, self.goal) == 0
        return Outcome(float(self.solved), self.solved)

    def expert_actions(self) -> list[str]:
        return [f"{PEGS[move.source]}>{PEGS[move.target]}" for move in solution(self.position, self.goal)]


class HanoiAnswer(Attempts):
    settings: Hanoi

    def __init__(self, settings: Hanoi, task: Task) -> None:
        super().__init__(settings, task)
        self.partial_weight = 0.5 if settings.partial else 0.0
        self.format_penalty = settings.format_penalty
        self.position: list[int] = list(task.data["position"])
        self.goal: int = task.data["goal"]

    def prompt(self) -> str:
        pegs = show_pegs(self.position)
        if self.settings.style == "compact":
            return "/".join(_short(peg) for peg in pegs) + PEGS[self.goal]
        think = "Think in <think>...</think> first. " if self.settings.think else ""
        return (
            f"Tower of Hanoi. Move all disks to peg {PEGS[self.goal]}, one at a time, never onto a "
            f"smaller disk. Each line shows a peg from bottom to top.\n{_lines(pegs)}\n{think}Give all moves "
            'as a list of [disk, from, to], for example <answer>[[1, "A", "C"], [2, "A", "B"]]</answer>'
        )

    def judge(self, reply: str) -> Verdict:
        moves = read_moves(extract_answer(reply), len(self.position))
        if moves is None:
            return Verdict(solved=False, valid=False)
        position, legal = play(self.position, moves)
        left, needed = distance(position, self.goal), distance(self.position, self.goal)
        return Verdict(solved=legal and left == 0, partial=max(0.0, (needed - left) / needed))

    def expert_reply(self) -> str:
        return _answer(solution(self.position, self.goal))

    def random_reply(self, seed: int) -> str:
        """As many moves as needed, each drawn from the legal ones."""
        rng, position, moves = random.Random(seed), list(self.position), []
        for _ in range(distance(position, self.goal)):
            options = [Move(top(position, a), a, b) for a, b in itertools.permutations(range(3), 2)]
            moves.append(rng.choice([move for move in options if not illegal(position, move)]))
            position[moves[-1].disk - 1] = moves[-1].target
        return _answer(moves)


# A position lists the peg of each disk, the smallest disk (1) first.


def distance(position: Sequence[int], goal: int) -> int:
    """The least number of moves that brings all disks to a peg: the largest one out of place moves once,
    all smaller ones wait on the third peg."""
    moves = 0
    for disk in range(len(position), 0, -1):
        if position[disk - 1] != goal:
            moves += 2 ** (disk - 1)
            goal = 3 - goal - position[disk - 1]
    return moves


def solution(position: Sequence[int], goal: int) -> list[Move]:
    """The shortest list of moves that brings all disks to a peg."""
    for disk in range(len(position), 0, -1):
        if (here := position[disk - 1]) != goal:
            third = 3 - goal - here
            before = solution(position[: disk - 1], third)
            return [*before, Move(disk, here, goal), *solution([third] * (disk - 1), goal)]
    return []


def play(position: Sequence[int], moves: Sequence[Move]) -> tuple[list[int], bool]:
    """The position after the moves, up to the first illegal one, and whether all were legal."""
    now = list(position)
    for move in moves:
        if illegal(now, move):
            return now, False
        now[move.disk - 1] = move.target
    return now, True


def illegal(position: Sequence[int], move: Move) -> str:
    """Why a move is illegal; empty where it is legal."""
    upper, lower = top(position, move.source), top(position, move.target)
    if not upper:
        return f"peg {PEGS[move.source]} is empty"
    if move.disk != upper:
        return f"disk {move.disk} is not on top of peg {PEGS[move.source]}"
    if move.source == move.target:
        return f"disk {move.disk} stays where it is"
    return f"disk {upper} is larger than disk {lower}" if lower and upper > lower else ""


def top(position: Sequence[int], peg: int) -> int:
    """The number of the top disk of a peg; 0 where it is empty."""
    return next((disk for disk, where in enumerate(position, 1) if where == peg), 0)


def show_pegs(position: Sequence[int]) -> list[list[int]]:
    return [[disk for disk in range(len(position), 0, -1) if position[disk - 1] == peg] for peg in range(3)]


_MOVE = r"\[\s*(\d{1,2})\s*,\s*\"?([ABC])\"?\s*,\s*\"?([ABC])\"?\s*\]"
_MOVES = re.compile(rf"\[\s*{_MOVE}(?:\s*,\s*{_MOVE})*\s*\]")


def read_moves(text: str, disks: int) -> list[Move] | None:
    """The moves of a written list; None where it is no such list or longer than four solutions."""
    text = text.strip().replace("'", '"')
    if not _MOVES.fullmatch(text):
        return None
    moves = [Move(int(disk), PEGS.index(a), PEGS.index(b)) for disk, a, b in re.findall(_MOVE, text)]
    return moves if len(moves) <= 4 * 2**disks else None


def _answer(moves: Sequence[Move]) -> str:
    rows = ", ".join(f'[{move.disk}, "{PEGS[move.source]}", "{PEGS[move.target]}"]' for move in moves)
    return f"<answer>[{rows}]</answer>"


def _short(peg: list[int]) -> str:
    return "".join(f"{disk:x}" for disk in peg) or "-"  # hexadecimal: one character a disk


def _lines(pegs: list[list[int]]) -> str:
    return "\n".join(
        f"{name}: {' '.join(str(d) for d in peg) or '-'}" for name, peg in zip(PEGS, pegs, strict=True)
    )

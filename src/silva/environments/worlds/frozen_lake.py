"""FrozenLake: walk over ice to the goal, not into a hole. The dynamics are gymnasium's.

Reward 1 at the goal, else 0; falling into a hole ends the episode. Every map can be solved within
`max_actions`; held-out maps do not occur in training. In compact style a turn shows four rows of four
characters and the number of actions left.
"""

from __future__ import annotations

import random
from math import comb
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Fraction
from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.types import Task

ACTIONS = ("Left", "Down", "Right", "Up")  # in gymnasium's order
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_TILES = {"S": "_", "F": "_", "H": "O", "G": "G"}


class FrozenLake(TextGameSettings):
    type: Literal["frozen_lake"] = "frozen_lake"
    size: Annotated[int, Field(ge=2, le=16)] = 4
    """Rows and columns of the map."""
    frozen: Annotated[float, Field(ge=0.6, le=1)] = 0.7
    """Least share of ice, the rest are holes; every map that has it is equally likely, so that training maps
    are no easier than the held-out ones, which all differ."""
    slippery: bool = False
    """Moves may go to the side instead."""
    success_rate: Fraction = 0.8
    """How often a move on slippery ice goes where it should; else to either side, equally often."""
    random_start: bool = False
    """Start and goal anywhere on the map instead of in opposite corners."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        needed = 2 if self.random_start else 2 * (self.size - 1)
        if self.max_actions < needed:
            raise ValueError(
                f"max_actions = {self.max_actions} cannot reach the goal of a map of size {self.size}: "
                f"expected {needed} or more"
            )
        return self

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: FrozenLakeGame(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        most = round((1 - self.frozen) * len(cells))
        maps = [comb(len(cells) - 2, holes) for holes in range(most + 1)]
        while True:
            start, goal = rng.sample(cells, 2) if self.random_start else (cells[0], cells[-1])
            rest = [cell for cell in cells if cell not in (start, goal)]
            holes = rng.sample(rest, rng.choices(range(most + 1), maps)[0])
            tiles = {start: "S", goal: "G", **dict.fromkeys(holes, "H")}
            rows = ["".join(tiles.get((row, c), "F") for c in range(self.size)) for row in range(self.size)]
            path = shortest_path(rows, start)
            if path is not None and 2 <= len(path) <= self.max_actions:
                return Draft({"map": rows})


class FrozenLakeGame(TextGame):
    reward_name = "goal"
    settings: FrozenLake

    def __init__(self, settings: FrozenLake, task: Task) -> None:
        super().__init__(settings, task)
        self.rows: list[str] = list(task.data["map"])
        self.position = next((r, row.index("S")) for r, row in enumerate(self.rows) if "S" in row)

    def instructions(self) -> str:
        slip = " The ice is slippery: a move may go to the side." if self.settings.slippery else ""
        return (
            f"You walk on a frozen lake. Reach the goal without falling into a hole.{slip}\n"
            "P: you, _: ice, O: hole, G: goal, X: you in a hole, √: you on the goal."
        )

    def actions(self) -> dict[str, str]:
        return {name: name[0] for name in ACTIONS}

    def render(self) -> str:
        rows = [[_TILES[tile] for tile in row] for row in self.rows]
        row, column = self.position
        rows[row][column] = {"_": "P", "O": "X", "G": "√"}[rows[row][column]]
        return "\n".join("".join(row) for row in rows)

    def apply(self, action: str) -> Outcome:
        before, last = self.position, len(self.rows) - 1
        down, right = self._direction(ACTIONS.index(action))
        row = min(max(before[0] + down, 0), last)
        column = min(max(before[1] + right, 0), last)
        self.position = (row, column)
        tile = self.rows[row][column]
        self.solved = tile == "G"
        return Outcome(float(self.solved), tile in "GH", self.position != before)

    def _direction(self, action: int) -> tuple[int, int]:
        """Where a move goes: on slippery ice at times to a side."""
        if not self.settings.slippery:
            return _MOVES[action]
        straight = self.settings.success_rate
        aside = (1.0 - straight) / 2.0
        ways = ((action - 1) % 4, action, (action + 1) % 4)
        return _MOVES[self.rng.choices(ways, (aside, straight, aside))[0]]

    def expert_actions(self) -> list[str]:
        """A shortest path; on slippery ice its first move alone, to plan again from where it leads."""
        path = shortest_path(self.rows, self.position) or []
        return path[:1] if self.settings.slippery else path


def shortest_path(rows: list[str], start: tuple[int, int]) -> list[str] | None:
    """Action names of a shortest way to G around the holes; None where there is no way."""
    paths: dict[tuple[int, int], list[str]] = {start: []}
    queue = [start]
    for row, column in queue:  # it grows on the way
        path = paths[row, column]
        if rows[row][column] == "G":
            return path
        for action, (down, right) in zip(ACTIONS, _MOVES, strict=True):
            r, c = there = (row + down, column + right)
            inside = 0 <= r < len(rows) and 0 <= c < len(rows)
            if inside and there not in paths and rows[r][c] != "H":
                paths[there] = [*path, action]
                queue.append(there)
    return None

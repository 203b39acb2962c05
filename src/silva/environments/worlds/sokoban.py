"""Sokoban: push every box onto a target. Boxes can be pushed, one at a time, but not pulled.

Each action costs 0.1. A box pushed onto a target pays 1, a box pushed off one costs 1, and the last box
pays 10 more. No failure returns as much as a solution: pushing a box on and off again adds up to nothing,
and the settings must make the last push worth more than all actions cost.

Rooms are made backwards: pulls lead away from the solved room, one layer of positions after the other. So
every room can be solved, in as many moves as its layer is far away. No held-out room occurs in training,
neither turned, mirrored or shifted nor with the player elsewhere.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.errors import ConfigError
from silva.types import Task

ACTIONS = ("Up", "Down", "Left", "Right")
SYMBOLS = "#_O√XPS"
MEANINGS = ("wall", "floor", "target", "box on a target", "box", "you", "you on a target")
LAYER = 400  # positions that are followed from each layer while a room is made
MAX_ROOMS = 1000  # are tried before the settings are called impossible
MAX_NODES = 20_000  # positions that the expert looks at
_DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
_BRUSHES = (  # what one step of the random walk opens, besides its own cell
    ((0, -1), (0, 1)),
    ((-1, 0), (1, 0)),
    ((0, 1), (1, 0)),
    ((0, -1), (-1, 0)),
    ((0, 1), (1, 0), (1, 1)),
)

Position = tuple[int, frozenset[int]]  # the cell of the player, the cells of the boxes


class Sokoban(TextGameSettings):
    type: Literal["sokoban"] = "sokoban"
    rows: Annotated[int, Field(ge=5, le=16)] = 6
    """Rows of a room, its outer walls included."""
    columns: Annotated[int, Field(ge=5, le=16)] = 6
    """Columns of a room, its outer walls included."""
    boxes: Annotated[int, Field(ge=1, le=6)] = 1
    """Boxes, and as many targets."""
    min_moves: Positive = 3
    """Least length of the solution that is known of a room."""
    max_moves: Positive = 10
    """Greatest length of that solution. Of the lengths that a room has, each is equally likely."""
    step_reward: Annotated[float, Field(le=0)] = -0.1
    """Of each action."""
    box_reward: Annotated[float, Field(ge=0)] = 1.0
    """For a box pushed onto a target; taken back if it is pushed off again."""
    solved_reward: Annotated[float, Field(gt=0)] = 10.0
    """For the last box, added to `box_reward`."""
    vocabulary: Literal["grid", "words", "coordinates", "both"] = "grid"
    """Show rows of symbols, rows of words, lists of places (row, column), or `both` lists and symbols."""
    symbols: str = SYMBOLS
    """Characters for wall, floor, target, box on a target, box, player, player on a target."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.min_moves <= self.max_moves <= self.max_actions:
            raise ValueError(
                f"got min_moves = {self.min_moves}, max_moves = {self.max_moves} and max_actions = "
                f"{self.max_actions}: expected min_moves <= max_moves <= max_actions"
            )
        if len(self.symbols) != 7 or len({*self.symbols}) < 7 or any(s.isspace() for s in self.symbols):
            raise ValueError(f"symbols: got {self.symbols!r}, expected seven different characters, no spaces")
        cost, gain = -self.step_reward * self.max_actions, self.solved_reward + self.box_reward
        if cost >= gain:
            raise ValueError(
                f"max_actions = {self.max_actions} actions cost {cost:g}, but the last box pays {gain:g}, "
                "so a failure could return more than a solution: lower max_actions or raise solved_reward"
            )
        return self

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: SokobanGame(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        for _ in range(MAX_ROOMS):
            free = _carve(rng, self.rows, self.columns)
            if len(free) < 2 * self.boxes + 1:
                continue
            room = Room(self.rows, self.columns, frozenset(free), frozenset(rng.sample(free, self.boxes)))
            if found := _start(rng, room, self.min_moves, self.max_moves):
                position, solution = found
                rows = room.draw(position)
                return Draft({"room": rows}, solution, keys=[_shape(rows)])
        raise ConfigError(
            f"environment {self.label}: none of {MAX_ROOMS} rooms of {self.rows} x {self.columns} takes "
            f"{self.min_moves} to {self.max_moves} moves with boxes = {self.boxes}: make rooms larger, or "
            "lower boxes or min_moves"
        )


class Room(NamedTuple):
    """What does not change in an episode. A cell is a number: row * columns + column."""

    rows: int
    columns: int
    free: frozenset[int]  # cells without a wall
    targets: frozenset[int]

    def steps(self) -> list[tuple[str, int]]:
        """Each action, and what it adds to the number of a cell."""
        return list(zip(ACTIONS, (-self.columns, self.columns, -1, 1), strict=True))

    def moved(self, position: Position, step: int) -> Position:
        """The position after a step; the same one if a wall or a second box is in the way."""
        player, boxes = position
        there = player + step
        if there not in self.free:
            return position
        if there not in boxes:
            return there, boxes
        beyond = there + step
        if beyond not in self.free or beyond in boxes:
            return position
        return there, boxes - {there} | {beyond}

    def before(self, position: Position, step: int) -> Iterator[Position]:
        """The positions that this step leads from, to the given one."""
        player, boxes = position
        here, ahead = player - step, player + step
        if here in self.free and here not in boxes:
            yield here, boxes
            if ahead in boxes:
                yield here, boxes - {ahead} | {player}

    def draw(self, position: Position, symbols: str = SYMBOLS) -> list[str]:
        player, boxes = position

        def symbol(cell: int) -> str:
            target = cell in self.targets
            if cell not in self.free:
                return symbols[0]
            if cell in boxes:
                return symbols[3 if target else 4]
            return symbols[6 if target else 5] if cell == player else symbols[2 if target else 1]

        starts = range(0, self.rows * self.columns, self.columns)
        return ["".join(symbol(start + column) for column in range(self.columns)) for start in starts]


def read_room(rows: Sequence[str]) -> tuple[Room, Position]:
    """A room from rows of `SYMBOLS`."""
    cells = {kind: {i for i, symbol in enumerate("".join(rows)) if symbol == kind} for kind in SYMBOLS}
    free = frozenset().union(*(cells[kind] for kind in "_O√XPS"))
    room = Room(len(rows), len(rows[0]), free, frozenset(cells["O"] | cells["√"] | cells["S"]))
    (player,) = cells["P"] | cells["S"]
    return room, (player, frozenset(cells["X"] | cells["√"]))


class SokobanGame(TextGame):
    settings: Sokoban

    def __init__(self, settings: Sokoban, task: Task) -> None:
        super().__init__(settings, task)
        self.room, self.position = read_room(task.data["room"])
        self.plan: list[str] | None = list(task.answer)  # actions that solve the room from here, if known

    def instructions(self) -> str:
        parts = ["You see a warehouse from above. Push every box from behind, one at a time, onto a target."]
        if self.settings.vocabulary in ("grid", "both"):
            legend = zip(self.settings.symbols, MEANINGS, strict=True)
            parts.append(", ".join(f"{symbol}: {meaning}" for symbol, meaning in legend) + ".")
        if self.settings.vocabulary in ("coordinates", "both"):
            parts.append("Places are (row, column); (0, 0) is the top left corner. Walls are all around.")
        return "\n".join(parts)

    def actions(self) -> dict[str, str]:
        return {name: name[0] for name in ACTIONS}

    def render(self) -> str:
        vocabulary, grid = self.settings.vocabulary, self.room.draw(self.position, self.settings.symbols)
        if vocabulary == "words":
            words = dict(zip(self.settings.symbols, MEANINGS, strict=True))
            return "\n".join(", ".join(words[symbol] for symbol in row) for row in grid)
        if vocabulary == "grid":
            return "\n".join(grid)
        return "\n".join([*self._coordinates(), *(grid if vocabulary == "both" else [])])

    def apply(self, action: str) -> Outcome:
        room, before = self.room, self.position
        self.position = room.moved(before, dict(room.steps())[action])
        if self.plan and action == self.plan[0]:
            self.plan = self.plan[1:]
        elif self.position != before:
            self.plan = None
        gained = len(self.position[1] & room.targets) - len(before[1] & room.targets)
        self.solved = self.position[1] == room.targets
        reward = self.settings.step_reward + self.settings.box_reward * gained
        reward += self.settings.solved_reward if self.solved else 0.0
        return Outcome(reward, self.solved, self.position != before)

    def expert_actions(self) -> list[str]:
        """The known solution, elsewhere the shortest one; any move if none is found (see `solve`)."""
        if self.plan is None:
            self.plan = solve(self.room, self.position)
        here = self.position
        moves = [action for action, step in self.room.steps() if self.room.moved(here, step) != here]
        return self.plan or moves[:1] or [ACTIONS[0]]

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.room)

    def _coordinates(self) -> list[str]:
        player, boxes = self.position
        rows, columns = range(1, self.room.rows - 1), range(1, self.room.columns - 1)
        inner = {row * self.room.columns + column for row in rows for column in columns}
        compact = self.settings.style == "compact"
        names = self.settings.symbols if compact else tuple(map(str.capitalize, MEANINGS))
        shown = ((5, [player]), (4, boxes), (2, self.room.targets), (0, inner - self.room.free))
        return [f"{names[kind]}: {_places(cells, self.room.columns)}" for kind, cells in shown]


def solve(room: Room, start: Position, max_nodes: int = MAX_NODES) -> list[str] | None:
    """The shortest solution (A*); None if there is none, or none was found in `max_nodes` positions.

    The estimate is the number of pushes that each box needs to its nearest target, if it were alone.
    """
    pushes = _pushes(room)
    if any(box not in pushes for box in start[1]):
        return None
    came: dict[Position, tuple[str, Position] | None] = {start: None}
    length = {start: 0}
    queue = [(sum(pushes[box] for box in start[1]), 0, start)]
    added = 0  # breaks ties: positions have no order
    for _ in range(max_nodes):
        if not queue:
            return None
        _, _, here = heapq.heappop(queue)
        if here[1] == room.targets:
            return _path(came, here)[::-1]
        for action, step in room.steps():
            there = room.moved(here, step)
            if length[here] + 1 >= length.get(there, 1 << 30) or any(box not in pushes for box in there[1]):
                continue
            came[there], length[there] = (action, here), length[here] + 1
            added -= 1  # of equal estimates, the newest first
            heapq.heappush(queue, (length[there] + sum(pushes[box] for box in there[1]), added, there))
    return None


def _start(
    rng: random.Random, room: Room, min_moves: int, max_moves: int
) -> tuple[Position, list[str]] | None:
    """A position with no box on a target, and moves that solve it; None if all are too near.

    A layer holds the positions that are one move farther away than those of the layer before. The distance
    is exact until a layer has more than `LAYER` positions. From then on there may be shorter solutions.
    """
    layer = [(player, room.targets) for player in sorted(room.free - room.targets)]
    came: dict[Position, tuple[str, Position] | None] = dict.fromkeys(layer)
    starts = []
    for distance in range(1, max_moves + 1):
        farther = []
        for position in layer:
            for action, step in room.steps():
                for earlier in room.before(position, step):
                    if earlier not in came:
                        came[earlier] = (action, position)
                        farther.append(earlier)
        layer = farther if len(farther) <= LAYER else rng.sample(farther, LAYER)
        unsolved = [position for position in layer if not position[1] & room.targets]
        if distance >= min_moves and unsolved:
            starts.append(unsolved)
    if not starts:
        return None
    position = rng.choice(rng.choice(starts))
    return position, _path(came, position)


def _path(came: dict[Position, tuple[str, Position] | None], position: Position) -> list[str]:
    actions = []
    while (link := came[position]) is not None:
        action, position = link
        actions.append(action)
    return actions


def _pushes(room: Room) -> dict[int, int]:
    """For each cell from which a lone box can be pushed to a target: the least number of pushes."""
    pushes = dict.fromkeys(sorted(room.targets), 0)
    queue = deque(pushes)
    while queue:
        cell = queue.popleft()
        for _, step in room.steps():
            box, player = cell - step, cell - 2 * step
            if box in room.free and player in room.free and box not in pushes:
                pushes[box] = pushes[cell] + 1
                queue.append(box)
    return pushes


def _carve(rng: random.Random, rows: int, columns: int) -> list[int]:
    """The cells that a random walk opens with brushes of several shapes; they are connected."""
    row, column = rng.randrange(1, rows - 1), rng.randrange(1, columns - 1)
    down, right = rng.choice(_DIRECTIONS)
    free = set()
    for _ in range(int(1.7 * (rows + columns))):
        if rng.random() < 0.35:
            down, right = rng.choice(_DIRECTIONS)
        row = min(max(row + down, 1), rows - 2)
        column = min(max(column + right, 1), columns - 2)
        for r, c in ((0, 0), *rng.choice(_BRUSHES)):
            if 0 < row + r < rows - 1 and 0 < column + c < columns - 1:
                free.add((row + r) * columns + column + c)
    return sorted(free)


def _shape(rows: list[str]) -> list[str]:
    """The same for rooms that differ only by a turn, a reflection, a shift or the place of the player."""
    shape = [row.replace("P", "_").replace("S", "O") for row in rows]
    forms = []
    for turn in range(6):  # the first two cut away what is all wall
        shape = ["".join(column) for column in zip(*shape[::-1], strict=True) if {*column} != {"#"}]
        if turn > 1:
            forms += [shape, [row[::-1] for row in shape]]
    return min(forms)


def _places(cells: Iterable[int], columns: int) -> str:
    return " ".join("({}, {})".format(*divmod(cell, columns)) for cell in sorted(cells)) or "-"

"""Which task comes next: environments mixed by weight, each in its own seeded order, epoch after epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from silva.ports import derive
from silva.protocols import TaskSet
from silva.types import Task


@dataclass(frozen=True)
class World:
    """An environment of the run: `weight` is its share of training tasks against the others."""

    label: str
    taskset: TaskSet
    weight: float


class TaskStream:
    """An endless sequence of training tasks. `position` (tasks drawn per environment) is all its state."""

    def __init__(self, worlds: list[World], seed: int, position: Mapping[str, int] | None = None):
        self.worlds, self.seed = worlds, seed
        self.position = {w.label: int((position or {}).get(w.label, 0)) for w in worlds}
        self._orders: dict[tuple[str, int], list[int]] = {}

    def draw(self) -> tuple[World, Task]:
        """The environment furthest behind its share is next (the earlier one listed on a tie)."""
        world = min(self.worlds, key=lambda w: (self.position[w.label] + 1) / w.weight)
        tasks = world.taskset.tasks("train")
        epoch, index = divmod(self.position[world.label], len(tasks))
        self.position[world.label] += 1
        return world, tasks[self._order(world.label, epoch, len(tasks))[index]]

    def _order(self, label: str, epoch: int, size: int) -> list[int]:
        if (label, epoch) not in self._orders:
            order = list(range(size))
            Random(derive(self.seed, "order", label, epoch)).shuffle(order)
            self._orders = {k: v for k, v in self._orders.items() if k[0] != label} | {(label, epoch): order}
        return self._orders[label, epoch]

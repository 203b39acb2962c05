"""Which task comes next: environments mixed by weight, each in its own seeded order, epoch after epoch.

With pools, tasks that were easy or hard when they were last played come again only now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from silva.algorithms.filters import DifficultyPools, difficulty
from silva.ports import derive, uniform
from silva.protocols import TaskSet
from silva.types import Group, Task


@dataclass(frozen=True)
class Source:
    """The tasks of one environment: `weight` is their share of training against those of the others."""

    label: str
    taskset: TaskSet
    weight: float


class TaskStream:
    """An endless sequence of training tasks. `position`, `passed` and `pools` are all its state.

    position: tasks drawn or skipped per environment, which is its place in the order of its tasks.
    passed: tasks skipped because of their pool; they do not count towards the environment's share.
    pools: "easy" or "hard", by environment and task; the others are normal.
    """

    def __init__(
        self,
        sources: list[Source],
        seed: int,
        position: Mapping[str, int] | None = None,
        *,
        passed: Mapping[str, int] | None = None,
        settings: DifficultyPools | None = None,
        pools: Mapping[str, str] | None = None,
    ):
        self.sources, self.seed, self.settings = sources, seed, settings
        self.position = {w.label: int((position or {}).get(w.label, 0)) for w in sources}
        self.passed = {w.label: int((passed or {}).get(w.label, 0)) for w in sources}
        self.pools: dict[str, str] = dict(pools or {})
        self._orders: dict[tuple[str, int], list[int]] = {}

    def draw(self) -> tuple[Source, Task]:
        """The environment furthest behind its share is next (the earlier one listed on a tie)."""
        source = min(self.sources, key=lambda w: (self._drawn(w) + 1) / w.weight)
        task = self._next(source)
        for _ in range(len(source.taskset.tasks("train")) - 1):  # if all are skipped, the last one is drawn
            if not self._passed_over(source, task):
                break
            self.passed[source.label] += 1
            task = self._next(source)
        return source, task

    def remember(self, group: Group) -> None:
        """Remember how hard the group's task was."""
        if self.settings is None or not group.scored:
            return
        mean = sum(t.raw_reward for t in group.scored) / len(group.scored)
        pool = difficulty(self.settings, mean)
        key = f"{group.task.environment}/{group.task.id}"
        if pool == "normal":
            self.pools.pop(key, None)
        else:
            self.pools[key] = pool

    def _drawn(self, source: Source) -> int:
        return self.position[source.label] - self.passed[source.label]

    def _next(self, source: Source) -> Task:
        tasks = source.taskset.tasks("train")
        epoch, index = divmod(self.position[source.label], len(tasks))
        self.position[source.label] += 1
        return tasks[self._order(source.label, epoch, len(tasks))[index]]

    def _passed_over(self, source: Source, task: Task) -> bool:
        pool = self.pools.get(f"{task.environment}/{task.id}") if self.settings else None
        if pool is None or self.settings is None:
            return False
        share = self.settings.easy_fraction if pool == "easy" else self.settings.hard_fraction
        seed = derive(self.seed, "pool", source.label)
        return float(uniform([seed], [self.position[source.label]])[0]) >= share

    def _order(self, label: str, epoch: int, size: int) -> list[int]:
        if (label, epoch) not in self._orders:
            order = list(range(size))
            Random(derive(self.seed, "order", label, epoch)).shuffle(order)
            self._orders = {k: v for k, v in self._orders.items() if k[0] != label} | {(label, epoch): order}
        return self._orders[label, epoch]

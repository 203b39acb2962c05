"""Which task comes next: environments mixed by weight, each in its own seeded order, pass after pass.

A pass has each distinct task of an environment once, and every pass has another order. With pools, tasks that
were easy or hard when they were last played come again only now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import Any

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
    """An endless sequence of training tasks.

    step: draws that may belong to one step, in which no task comes twice if there are as many tasks.
    settings: of pools; None: there are none.

    Its state:
    position: tasks drawn or skipped per environment, which is its place in the order of its tasks.
    passed: tasks skipped because of their pool; they do not count towards the environment's share.
    pools: "easy" or "hard", by environment and task; the others are normal.
    recent: ids of the last tasks of each environment, kept with pools only: the tasks that are passed over
        bring two draws of the same task closer together than its places in the order are.
    """

    def __init__(
        self,
        sources: list[Source],
        seed: int,
        *,
        step: int = 1,
        settings: DifficultyPools | None = None,
    ):
        self.sources, self.seed, self.step, self.settings = sources, seed, step, settings
        self._tasks = {w.label: w.taskset.tasks("train") for w in sources}
        self.load({})

    def state(self) -> dict[str, Any]:
        found = {"position": self.position, "passed": self.passed, "pools": self.pools, "recent": self.recent}
        return deepcopy(found)

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """What is not in `state` is at its beginning."""
        labels = list(self._tasks)
        self.position: dict[str, int] = dict.fromkeys(labels, 0) | dict(state.get("position", {}))
        self.passed: dict[str, int] = dict.fromkeys(labels, 0) | dict(state.get("passed", {}))
        self.pools: dict[str, str] = dict(state.get("pools", {}))
        self._pooled = Counter({w: sum(key.startswith(f"{w}/") for key in self.pools) for w in labels})
        self.recent: dict[str, list[str]] = {w: state.get("recent", {}).get(w, []) for w in labels}
        self._orders = {
            label: passes(tasks, derive(self.seed, "order", label), self.step, start=self.position[label])
            for label, tasks in self._tasks.items()
        }

    def draw(self) -> tuple[Source, Task]:
        """The environment furthest behind its share is next (the earlier one listed on a tie)."""
        drawn = {label: self.position[label] - self.passed[label] for label in self._tasks}
        source = min(self.sources, key=lambda w: (drawn[w.label] + 1) / w.weight)
        if self.settings is None:
            return source, self._next(source)
        recent, repeated = self._avoided(source.label), list[Task]()
        before = self.position[source.label] + 1
        for _ in range(2 * len(self._tasks[source.label])):  # which contain a whole pass
            task = self._next(source)
            if self._passed_over(source, task):
                continue
            if task.id not in recent:
                break
            repeated.append(task)
        else:  # every task is passed over, or was drawn just now
            latest = {id: place for place, id in enumerate(recent)}
            task = min(repeated, key=lambda t: latest[t.id], default=task)
        self.passed[source.label] += self.position[source.label] - before
        self.recent[source.label] = [*self.recent[source.label], task.id][-self.step :]
        return source, task

    def remember(self, group: Group) -> None:
        """Remember how hard the group's task was."""
        if self.settings is None or not group.scored:
            return
        mean = sum(t.raw_reward for t in group.scored) / len(group.scored)
        label = group.task.environment
        key = f"{label}/{group.task.id}"
        self._pooled[label] -= self.pools.pop(key, None) is not None
        if (pool := difficulty(self.settings, mean)) != "normal":
            self.pools[key] = pool
            self._pooled[label] += 1

    def _next(self, source: Source) -> Task:
        self.position[source.label] += 1
        number, task = next(self._orders[source.label])
        # Played again, a task has another seed, so another noise.
        return replace(task, seed=derive(task.seed, "pass", number)) if number else task

    def _avoided(self, label: str) -> list[str]:
        """The tasks that the next draw must not repeat, oldest first. With fewer normal tasks than a step
        draws, only half of them are avoided, so that the next one is found soon."""
        normal = len(self._tasks[label]) - self._pooled[label]
        avoided = self.step - 1 if normal >= self.step else normal // 2
        return self.recent[label][-avoided:] if avoided else []

    def _passed_over(self, source: Source, task: Task) -> bool:
        pool = self.pools.get(f"{task.environment}/{task.id}") if self.settings else None
        if pool is None or self.settings is None:
            return False
        share = self.settings.easy_fraction if pool == "easy" else self.settings.hard_fraction
        seed = derive(self.seed, "pool", source.label)
        return float(uniform([seed], [self.position[source.label]])[0]) >= share


def passes(tasks: Sequence[Task], seed: int, step: int, *, start: int = 0) -> Iterator[tuple[int, Task]]:
    """An endless order of tasks from its place `start` on, each with the number of its pass.

    The first pass leaves out tasks with the content of an earlier one; every later pass is the one before it
    in another order. A task comes again after half a pass at the earliest, and after `step` draws if there
    are as many tasks. So if a step draws them all, or more, every pass has the order of the first.
    """
    contents, order, first = set[str](), list[int](), list(range(len(tasks)))
    Random(derive(seed, 0)).shuffle(first)
    for index in first:
        task = tasks[index]
        if (content := task.content()) not in contents:
            contents.add(content)
            order.append(index)
            if len(order) > start:
                yield 0, task
    for number in count(1):
        rng, before = Random(derive(seed, number)), number * len(order)
        apart = min(max(step, len(order) // 2), len(order))
        ready, waiting = order[: len(order) - apart + 1], iter(order[len(order) - apart + 1 :])
        order = []
        while ready:
            place = rng.randrange(len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            order.append(ready.pop())
            ready += islice(waiting, 1)
            if before + len(order) > start:  # earlier tasks are not made, because that takes time
                yield number, tasks[order[-1]]

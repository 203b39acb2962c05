"""Work in flight: tasks are drawn, issued under ids of their own, played, and taken in the order of issue.

    TaskStream ──draw──> issue ──rollout──> in flight ──take──> groups
                           ^                                      │
                           └── as many as `take` asks for, and `level` batches behind them

    consumes      tasks of the stream, when `take` issues work; the engine's version, at every request
    produces      the groups of each piece of work, in the order of issue whatever finishes first, so that a
                  batch does not depend on the clock; `issued` in the ledger, before anything is played
    waits for     the rollouts that `take` takes, and these for the engine and for environments
    unblocked by  the last of these rollouts, an error of one of them, or the cancellation of `take`. What is
                  in flight goes on until it is taken, until `updated` restarts it or `close` cancels it

Staleness (the versions published between a token and its training) is bounded at admission. While a batch
is collected, `level` batches at most are in flight behind it. Work at place q behind it is trained in one of
the next 1 + q // batch <= level steps, and a step publishes at most once. With level 0 nothing is in flight
while the trainer computes, and staleness is 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silva.aio import Turnstile, cancelled, gather
from silva.errors import CheckpointError
from silva.orchestrator.tasks import TaskStream
from silva.ports import crash_point
from silva.protocols import Rollout, TaskSet, Work
from silva.storage.ledger import Ledger
from silva.types import Group, Task

AT_ONCE = 32  # pieces of work that begin before the event loop looks at timers and connections again


@dataclass(frozen=True)
class Flight:
    """Work that has been issued; `groups` is done when it has been played.

    `updates`: those of the policy that it lived through.
    """

    work: Work
    environment: str
    groups: asyncio.Task[tuple[Group, ...]]
    updates: int = 0


@dataclass(frozen=True)
class Played:
    work: Work
    groups: tuple[Group, ...]


class WorkQueue:
    """Issues the work of one run.

    Args:
        batch: pieces of work of a step.
        steps: of the whole run: nothing is issued for steps behind the last one.
        level: how many batches may be in flight behind the one that is collected.
        max_updates: how many updates work in flight may live through; None: any number.

    Its state is what has been issued and not been taken.
    """

    def __init__(
        self,
        stream: TaskStream,
        rollout: Rollout,
        ledger: Ledger,
        *,
        batch: int,
        steps: int,
        level: int = 0,
        max_updates: int | None = None,
        on_played: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.stream, self.rollout, self.ledger, self.on_played = stream, rollout, ledger, on_played
        self.batch, self.steps, self.level, self.max_updates = batch, steps, level, max_updates
        self._flights: deque[Flight] = deque()
        self._again: deque[tuple[str, Work]] = deque()
        self._step, self._count = 0, 0  # of the newest id
        self._turnstile = Turnstile(AT_ONCE)

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not self._flights and not self._again

    def state(self) -> list[dict[str, Any]]:
        waiting = [*((f.environment, f.work) for f in self._flights), *self._again]
        return [
            {
                "id": w.id, "environment": label, "task": w.task.id, "seed": w.task.seed,
                "temperature": w.temperature,
            }
            for label, w in waiting
        ]  # fmt: skip

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """What was in flight at the checkpoint is issued first, under the ids it had.

        Raises:
            CheckpointError: a task of it does not exist any more.
        """
        wanted = {(entry["environment"], entry["task"]) for entry in state}
        labels = {label for label, _ in wanted}
        found = {  # one pass over the tasks, however many entries there are
            (source.label, task.id): (source.taskset, task)
            for source in self.stream.sources
            if source.label in labels
            for task in source.taskset.tasks("train")
            if (source.label, task.id) in wanted
        }
        self._again = deque(_restored(entry, found) for entry in state)

    async def take(
        self, count: int, step: int, *, attempt: int, temperature: float, ahead: int = 0
    ) -> list[Played]:
        """The `count` oldest pieces of work, for this step; waits until they are played.

        Args:
            attempt: 0, or the number of the refill.
            ahead: more of this step, which are issued too and taken later.
        """
        behind = min(self.level, self.steps - step) * self.batch + ahead
        self._issue(count + behind - len(self._flights), step, attempt, temperature)
        taken = [self._flights.popleft() for _ in range(count)]
        done = 0

        async def played(flight: Flight) -> Played:
            nonlocal done
            groups = await flight.groups
            done += 1
            self.on_played(done, count)
            return Played(flight.work, groups)

        return await gather(played(flight) for flight in taken)

    async def updated(self, version: int) -> int:
        """There is a new policy: what began too many updates ago, and has not ended, begins again.

        Returns:
            how many pieces of work.
        """
        flights, old = list(self._flights), dict[int, Flight]()  # by place
        for place, flight in enumerate(flights):
            if flight.groups.done():
                continue
            if self.max_updates is None or flight.updates < self.max_updates:
                flights[place] = dataclasses.replace(flight, updates=flight.updates + 1)
            else:
                old[place] = flight
        self._flights = deque(flights)
        await cancelled(flight.groups for flight in old.values())
        for flight in old.values():
            self.ledger.record("restarted", work=flight.work.id, version=version)
        self.ledger.commit()
        for place, flight in old.items():
            self._flights[place] = self._begun(flight.environment, flight.work)
        return len(old)

    async def close(self) -> None:
        """Cancel what is in flight, and wait until it has ended."""
        tasks = [flight.groups for flight in self._flights]
        self._flights.clear()
        await cancelled(tasks)

    def _issue(self, count: int, step: int, attempt: int, temperature: float) -> None:
        issued = [self._next(step, temperature) for _ in range(count)]
        for label, work in issued:
            self.ledger.record(
                "issued", work=work.id, task=work.task.id, content=work.task.content(), environment=label,
                step=step, attempt=attempt,
            )  # fmt: skip
        self.ledger.commit()
        crash_point("issue")
        self._flights += [self._begun(label, work) for label, work in issued]

    def _begun(self, label: str, work: Work) -> Flight:
        async def play() -> tuple[Group, ...]:
            await self._turnstile()
            return tuple([group async for group in self.rollout.run(work)])

        return Flight(work, label, asyncio.ensure_future(play()))

    def _next(self, step: int, temperature: float) -> tuple[str, Work]:
        if self._again:
            return self._again.popleft()
        self._step, self._count = step, self._count + 1 if step == self._step else 0
        source, task = self.stream.draw()
        return source.label, Work(f"s{step}g{self._count}", task, source.taskset, temperature)


def _restored(
    entry: Mapping[str, Any], found: Mapping[tuple[str, str], tuple[TaskSet, Task]]
) -> tuple[str, Work]:
    label, id, name = entry["environment"], entry["id"], entry["task"]
    if (label, name) not in found:
        raise CheckpointError(
            f"work {id} was in flight at the checkpoint: got no task {name!r} of environment {label!r}, "
            "expected the tasks with which the run began"
        )
    taskset, task = found[label, name]
    return label, Work(id, dataclasses.replace(task, seed=entry["seed"]), taskset, entry["temperature"])

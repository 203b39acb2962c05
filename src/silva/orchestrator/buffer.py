"""The batch of a step: issue tasks, play them, seal the groups, drop what teaches nothing, refill, select.

    TaskStream ──draw──> issued ──rollout──> sealed ──drop_reason──> kept, or dropped with its reason
                           ^                                           │               │
                           │                                        select          as many new tasks,
                           └───────────────────────────────────────────────────────  max_refills times

`collect` waits for rollouts and for nothing else. Groups stand in the order they were issued, whatever order
they finished in, so a batch does not depend on the clock. Staleness is bounded here, at admission: a batch is
issued only when the version it will be trained on is at most `staleness` publishes away; with 0 that means
after the publish before it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from silva.algorithms.compose import drop_reason, select, with_penalties
from silva.algorithms.filters import Reason
from silva.algorithms.settings import Algorithm
from silva.errors import NoSignalError
from silva.orchestrator.tasks import TaskStream, World
from silva.ports import crash_point
from silva.protocols import Engine, Rollout
from silva.rollouts.faults import tally
from silva.storage.ledger import Ledger, token_digest
from silva.types import Group, Task


@dataclass(frozen=True)
class Dropped:
    group: Group
    reason: Reason


@dataclass
class Batch:
    """The groups of one step in order of issue."""

    step: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return [*self.kept, *(d.group for d in self.dropped)]


class Buffer:
    """Collects batches of `groups` groups for one run.

    Args:
        longest: tokens of the longest answer that limits allow.
    """

    def __init__(
        self,
        *,
        stream: TaskStream,
        rollout: Rollout,
        engine: Engine,
        recipe: Algorithm,
        ledger: Ledger,
        groups: int,
        longest: int,
        on_groups: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.stream, self.rollout, self.engine, self.recipe, self.ledger = (
            stream,
            rollout,
            engine,
            recipe,
            ledger,
        )
        self.groups, self.longest, self.on_groups = groups, longest, on_groups

    @property
    def group_size(self) -> int:
        return int(self.rollout.settings.group_size)  # type: ignore[attr-defined]

    async def collect(self, step: int, temperature: float) -> Batch:
        """Play at this temperature until the batch is full or may not be refilled any more.

        Raises:
            NoSignalError: not one episode of the step gave a usable result.
        """
        batch, issued, recipe = Batch(step), 0, self.recipe
        wanted = math.ceil(self.groups * recipe.oversample)
        for attempt in range(recipe.max_refills + 1):
            enough = wanted if attempt == 0 or recipe.variance_filter else self.groups
            missing = enough - len(batch.kept)
            if missing <= 0:
                break
            groups = await self._play(step, missing, issued, attempt, temperature)
            self._sort(batch, groups, [drop_reason(recipe, group) for group in groups])
            issued += missing
            self.ledger.commit()
            crash_point("seal")
        groups, batch.kept = batch.kept, []
        self._sort(batch, groups, select(recipe, groups, self.groups))
        self.ledger.commit()
        if batch.dropped and not batch.kept and all(d.reason == "failed" for d in batch.dropped):
            raise NoSignalError(_every_episode_failed(batch))
        return batch

    def _sort(self, batch: Batch, groups: Sequence[Group], reasons: Sequence[Reason | None]) -> None:
        for group, reason in zip(groups, reasons, strict=True):
            if reason is None:
                batch.kept.append(group)
            else:
                batch.dropped.append(Dropped(group, reason))
                self.ledger.record("dropped", group=group.key, reason=reason)

    async def _play(self, step: int, count: int, first: int, attempt: int, temperature: float) -> list[Group]:
        draws = [(f"s{step}g{first + i}", *self.stream.draw()) for i in range(count)]
        for key, world, task in draws:
            self.ledger.record(
                "issued", group=key, task=task.id, content=task.content(), environment=world.label,
                step=step, attempt=attempt, rollouts=self.group_size,
            )  # fmt: skip
        self.ledger.commit()
        crash_point("issue")
        done = 0

        async def one(key: str, world: World, task: Task) -> list[Group]:
            nonlocal done
            run = self.rollout.run(task, world.taskset, self.engine, key=key, temperature=temperature)
            groups = [g async for g in run]
            done += 1
            self.on_groups(done, count)
            return groups

        played = await _gather([one(*draw) for draw in draws])
        groups = [with_penalties(self.recipe, group, self.longest) for groups in played for group in groups]
        for group in groups:
            self.stream.sort(group)
            self.ledger.record(
                "sealed",
                group=group.key,
                step=step,
                trajectories=[t.id for t in group.trajectories],
                rewards=[None if t.failure else t.raw_reward for t in group.trajectories],
                digest=token_digest(
                    s.tokens for t in group.trajectories for turn in t.turns for s in turn.segments
                ),
            )
        return groups


async def _gather(coroutines: list) -> list:
    """Results in order; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _every_episode_failed(batch: Batch) -> str:
    errors = [t.error for g in batch.groups for t in g.trajectories]
    return (
        f"step {batch.step}: all {len(errors)} episodes failed, so there is nothing to learn from: "
        f"{tally(errors)}"
    )

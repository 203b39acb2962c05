"""Episodes that branch where the policy grows uncertain: ARPO (arXiv:2507.19849), AEPO (arXiv:2510.14545).

    root ──turn──turn──turn        every leaf is a trajectory; turns that leaves share are the same objects
              └────turn──turn

After each reply but a root's first, the entropy of its first tokens decides whether the same observation is
answered in other ways too: these branches start at once.

Nobody waits for anybody: each path from a root on has a budget of its own, which it shares with its branches.
What it has not used when it ends becomes new roots, all at once. So the forest depends on the seed alone,
whatever time tools take, and no root can take all branches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from silva.ports import derive, uniform
from silva.protocols import Reply, Work
from silva.rollouts.episode import Episode
from silva.rollouts.settings import BranchingRolloutSettings
from silva.rollouts.strategy import Strategy
from silva.types import Group, Trajectory


class Branching(Strategy[BranchingRolloutSettings]):
    """The strategy `branching`."""

    async def run(self, work: Work) -> AsyncIterator[Group]:
        """Yields the one group of the task: each root, followed by what has grown from it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                leaves = await _Forest(self, work, tasks).grow()
        except ExceptionGroup as group:  # the first error has cancelled all else
            raise group.exceptions[0] from None
        yield Group(work.id, work.task, tuple(leaves))


@dataclass
class _Path:
    """A path from a root on, as it grows.

    Attributes:
        place: (3, 2, 1) is the first branch of root 3 after its second turn.
        budget: branches that may still grow from it.
        first: entropy of its root's first reply.
        row: turns in a row that have branched.
        attempt: how often its place was played before without a result.
    """

    place: tuple[int | str, ...]
    budget: int
    first: float = math.nan
    row: int = 0
    attempt: int = 0

    @property
    def name(self) -> tuple[int | str, ...]:
        """Unique in the forest, and inherited by branches: those of a failed attempt stay in it."""
        return (*self.place, "again", self.attempt) if self.attempt else self.place


class _Forest:
    """The trees of one piece of work."""

    def __init__(self, strategy: Branching, work: Work, tasks: asyncio.TaskGroup):
        self.strategy, self.settings, self.work, self.tasks = strategy, strategy.settings, work, tasks
        self.actor = strategy.policy(work)
        self.unit = math.log(strategy.renderer.vocabulary)

    async def grow(self) -> list[Trajectory]:
        leaves, roots = list[Trajectory](), self.settings.initial_rollouts
        if self.settings.entropy_gap_weight is not None:
            leaves = await self._root(_Path((0,), 0))
            roots = self._roots(leaves[0])
        budgets = shares(self.settings.group_size - roots, roots - len(leaves))
        grown = [self._root(_Path((i,), budget)) for i, budget in enumerate(budgets, len(leaves))]
        return leaves + await _all([self.tasks.create_task(root) for root in grown])

    def _roots(self, played: Trajectory) -> int:
        """How many, counting the one that was played first, which does not branch any more: two at least.

        AEPO's k * sigmoid(beta * (H_root - mean H of later replies)).
        """
        weight, size = self.settings.entropy_gap_weight or 0.0, self.settings.group_size
        entropies = [self._entropy(turn.reply[0].entropies) for turn in played.turns]
        gap = entropies[0] - sum(entropies[1:]) / len(entropies[1:]) if entropies[1:] else 0.0
        return max(2, min(size, round(size / (1 + math.exp(-weight * gap)))))

    async def _root(self, path: _Path) -> list[Trajectory]:
        work, strategy = self.work, self.strategy
        episode = Episode(
            work.task, work.taskset, self.actor, strategy.renderer, self.settings.limits, **self._own(path),
            on_turn=strategy.on_turn, watch=strategy.watch, context=self.settings.context,
        )  # fmt: skip
        return await self._play(episode, path)

    async def _play(self, episode: Episode, path: _Path) -> list[Trajectory]:
        """Play an episode to its end: its trajectory, then those of its branches and of new roots."""
        settings, grown = self.settings, list[asyncio.Task[list[Trajectory]]]()
        try:
            if episode.parent is None:
                await episode.start()
            while not episode.over and (reply := await episode.reply()) is not None:
                count = self._branches(path, episode, reply)
                if settings.variant == "paper":
                    grown += await self._fork(episode, path, count)
                await episode.step(reply)
                if settings.variant == "code" and not episode.over:
                    grown += await self._fork(episode, path, count)
        finally:
            await episode.close()
        trajectory = episode.trajectory()
        if trajectory.failure == "redo" and path.attempt < settings.redo:
            leaves = await self._root(_Path(path.place, path.budget, attempt=path.attempt + 1))
        else:
            new = [self._root(_Path((*path.name, "new", i), 0)) for i in range(1, path.budget + 1)]
            grown += [self.tasks.create_task(root) for root in new]
            leaves = [trajectory]
        return leaves + await _all(grown)

    def _branches(self, path: _Path, episode: Episode, reply: Reply) -> int:
        """How many branches this turn gets."""
        settings, turn = self.settings, len(episode.state.turns)
        entropy = self._entropy(reply.segments[0].entropies)
        if turn == 0:
            path.first = entropy
        if settings.variant == "paper" and turn == (episode.fork_turn or 0):
            return 0  # nothing was decided yet, or it was when this branch began
        probability = branch_probability(settings, entropy - path.first, path.row)
        drawn = uniform(derive(episode.seed, "branch", turn), range(settings.beam_size - 1)) < probability
        path.row = path.row + 1 if drawn.any() else 0
        return min(path.budget, int(drawn.sum()))

    async def _fork(self, episode: Episode, path: _Path, count: int) -> list[asyncio.Task[list[Trajectory]]]:
        """Branches that go on from here; each gets an equal share of the budget that is left."""
        own, *budgets = shares(path.budget - count, count + 1)
        path.budget, grown = own, list[asyncio.Task[list[Trajectory]]]()
        for i, budget in enumerate(budgets, 1):
            branch = _Path((*path.name, len(episode.state.turns), i), budget, path.first, path.row)
            twin = await episode.fork(**self._own(branch))
            grown.append(self.tasks.create_task(self._play(twin, branch)))
        if grown:
            await asyncio.sleep(0)  # each has begun, and so will close its environment
        return grown

    def _entropy(self, entropies: Sequence[float]) -> float:
        """Of the beginning of a reply, in units of ln(vocabulary), see `entropy_tokens`."""
        count = self.settings.entropy_tokens
        first = entropies[:count]
        if self.settings.variant == "paper" and first:
            return count * sum(first) / len(first) / self.unit
        return sum(first) / self.unit

    def _own(self, path: _Path) -> dict[str, Any]:
        """Id and seed of an episode. A root has those of an episode of `linear`."""
        return {
            "id": f"{self.work.id}/{'.'.join(map(str, path.name))}",
            "seed": derive(self.strategy.seed, self.work.id, *path.place, path.attempt),
        }


def branch_probability(settings: BranchingRolloutSettings, gap: float, row: int) -> float:
    """Of a turn; below 0 and above 1 mean never and always.

    ARPO's alpha + beta * (H - H_root), of which the papers compare a fixed threshold with the result, and the
    released code a random number, as here. AEPO's penalty as in its paper, or as in its code, which compares
    the other way round.

    Args:
        gap: the reply's entropy less that of the root's first reply.
        row: turns in a row that have branched.
    """
    threshold, gain = settings.branch_probability, settings.entropy_weight * gap
    kept = max(0.0, 1 - settings.branch_penalty * row)
    if settings.variant == "paper":
        return kept * (threshold + gain)
    if not settings.branch_penalty:
        return threshold + gain
    return 1 - threshold / kept + gain if kept else 0.0


def shares(total: int, parts: int) -> list[int]:
    """Of a budget, as even as can be, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


async def _all(tasks: Sequence[asyncio.Task[list[Trajectory]]]) -> list[Trajectory]:
    return [leaf for task in tasks for leaf in await task]

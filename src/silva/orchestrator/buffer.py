"""The batch of a step: play work, seal its groups, drop what teaches nothing, refill, compare, select.

    WorkQueue.take ──> sealed ──drop_reason──> kept, or dropped with its reason
          ^                                      │               │
          │                                   compare       as many new pieces of work,
          └──────────────────────────────────────────────── max_refills times

`collect` waits for rollouts and for nothing else. A batch is as large as asked for when that many pieces of
work have a group that is kept; a piece may give several.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from silva.algorithms.compose import compare, drop_reason, with_penalties
from silva.algorithms.filters import Reason
from silva.algorithms.settings import Algorithm
from silva.errors import NoSignalError
from silva.orchestrator.work import Played, WorkQueue
from silva.ports import crash_point
from silva.rollouts.faults import tally
from silva.rollouts.settings import RolloutSettings
from silva.storage.ledger import Ledger, token_digest
from silva.storage.rollouts import LearnedTurn, RolloutRow, Status
from silva.types import Group, Sample, Trajectory


@dataclass(frozen=True)
class Dropped:
    group: Group
    reason: Reason


@dataclass
class Piece:
    """What became of the groups of one piece of work."""

    kept: list[Group]
    dropped: list[Dropped] = field(default_factory=list)

    def drop(self, reasons: Sequence[Reason | None]) -> list[Dropped]:
        """Drop each of the kept groups that has a reason; returns these."""
        pairs = list(zip(self.kept, reasons, strict=True))
        found = [Dropped(group, reason) for group, reason in pairs if reason is not None]
        self.kept = [group for group, reason in pairs if reason is None]
        self.dropped += found
        return found


@dataclass
class Batch:
    """The work of one step in order of issue."""

    step: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def kept(self) -> list[Group]:
        return [group for piece in self.pieces for group in piece.kept]

    @property
    def dropped(self) -> list[Dropped]:
        return [dropped for piece in self.pieces for dropped in piece.dropped]

    @property
    def groups(self) -> list[Group]:
        return [*self.kept, *(d.group for d in self.dropped)]

    @property
    def failed(self) -> list[Trajectory]:
        """Episodes without a result."""
        return [t for g in self.groups for t in g.trajectories if not t.has_result]

    @property
    def played(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def filled(self) -> list[Piece]:
        """Pieces with a group that is kept."""
        return [piece for piece in self.pieces if piece.kept]

    def rows(
        self,
        samples: Iterable[Sample],
        version: int | None = None,
        clipped: Mapping[Sample, np.ndarray] = MappingProxyType({}),
    ) -> list[RolloutRow]:
        """For the file of rollouts: groups that are kept, then those dropped.

        Args:
            samples: what was trained.
            version: of the policy before the step.
            clipped: [T] of samples, see `LearnedTurn`.
        """
        by_trajectory: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.advantages is not None:
                by_trajectory[sample.trajectory].append(sample)
        advantages = {t: float(s[-1].advantages[-1]) for t, s in by_trajectory.items()}  # type: ignore[index]

        def rows(group: Group, status: Status, reason: str = "") -> list[RolloutRow]:
            return [
                RolloutRow(
                    self.step, group.task.id, group.task.environment, group.key, t,
                    status=status if t.failure is None else "failed",
                    reason=reason if t.failure is None else f"{t.failure}: {t.error}",
                    advantage=advantages.get(t.id),
                    version=version,
                    learned=tuple(
                        each for s in by_trajectory[t.id] for each in learned_turns(s, t, clipped.get(s))
                    ),
                )
                for t in group.trajectories
            ]  # fmt: skip

        kept = [row for group in self.kept for row in rows(group, "trained")]
        return kept + [row for d in self.dropped for row in rows(d.group, "dropped", d.reason)]


def learned_turns(
    sample: Sample, trajectory: Trajectory, clipped: np.ndarray | None = None
) -> list[LearnedTurn]:
    """What the file of rollouts keeps of a sample with advantages, turn by turn."""
    read = {turn.id: len(turn.segments[0].tokens) for turn in trajectory.turns}
    old = sample.old_logprobs
    return [
        LearnedTurn(
            turn,
            advantages=_short(sample.advantages[start + read[turn] : end]),  # type: ignore[index]
            weights=_short(sample.loss_weights[start + read[turn] : end]),
            logprobs=() if old is None else _short(old[start + read[turn] : end]),
            streams={name: _short(weights[start:end]) for name, weights in sample.streams.items()},
            clipped=() if clipped is None else _short(clipped[start + read[turn] : end]),
        )
        for turn, (start, end) in zip(sample.turn_ids, sample.turn_spans, strict=True)
    ]


def _short(values: np.ndarray) -> tuple[Any, ...]:
    """A single one if all are equal."""
    return tuple(
        values[:1].tolist()
        if np.array_equal(values, values[:1].repeat(len(values)), True)
        else values.tolist()
    )


class Buffer:
    """Collects the batches of one run.

    Args:
        work: `work.batch` pieces are played first, which may be more than are trained.
        rollout: how they are played: a batch has `groups_per_step` pieces.
    """

    def __init__(self, work: WorkQueue, recipe: Algorithm, ledger: Ledger, rollout: RolloutSettings):
        self.work, self.recipe, self.ledger, self.rollout = work, recipe, ledger, rollout
        self.size = rollout.groups_per_step

    async def collect(self, step: int, temperature: float) -> Batch:
        """Play at this temperature until the batch is full or may not be refilled any more.

        Raises:
            NoSignalError: not one episode of the step gave a usable result.
        """
        batch, recipe, size = Batch(step), self.recipe, self.size
        for attempt in range(recipe.max_refills + 1):
            enough = self.work.batch if attempt == 0 or recipe.variance_filter else size
            missing = enough - len(batch.filled)
            if missing <= 0:
                break
            played = await self.work.take(missing, step, attempt=attempt, temperature=temperature)
            batch.pieces += await self._looked_at(step, played)
        reasons = iter(compare(recipe, batch.kept))
        for piece in batch.filled:
            self._drop(piece, [next(reasons) for _ in piece.kept])
        for piece in batch.filled[size:]:  # those that were played last
            self._drop(piece, ["surplus"] * len(piece.kept))
        self.ledger.commit()
        self.check(batch)
        return batch

    async def share(self, step: int, temperature: float, count: int, left: int) -> list[Piece]:
        """The next `count` pieces of a batch, sealed, of which `left` more follow; all of them are issued.

        What teaches nothing is dropped. Nothing is refilled, and groups are not compared.
        """
        played = await self.work.take(count, step, attempt=0, temperature=temperature, ahead=left)
        return await self._looked_at(step, played)

    async def _looked_at(self, step: int, played: Sequence[Played]) -> list[Piece]:
        """Sealed, and without the groups that teach nothing by themselves."""
        pieces = list[Piece]()
        for each in played:
            pieces.append(self._sealed(step, each))
            await asyncio.sleep(0)  # work in flight goes on: 10,000 episodes take a quarter of a second
        for piece in pieces:
            self._drop(piece, [drop_reason(self.recipe, group) for group in piece.kept])
            await asyncio.sleep(0)
        self.ledger.commit()
        crash_point("seal")
        return pieces

    def check(self, batch: Batch) -> None:
        """Raises NoSignalError if not one episode of the batch gave a usable result."""
        if batch.dropped and not batch.kept and all(d.reason == "failed" for d in batch.dropped):
            errors = [t.error for g in batch.groups for t in g.trajectories]
            raise NoSignalError(
                f"step {batch.step}: all {len(errors)} episodes failed, so there is nothing to learn from: "
                f"{tally(errors)}"
            )

    def _drop(self, piece: Piece, reasons: Sequence[Reason | None]) -> None:
        for dropped in piece.drop(reasons):
            self.ledger.record("dropped", group=dropped.group.key, reason=dropped.reason)

    def _sealed(self, step: int, played: Played) -> Piece:
        groups = [with_penalties(self.recipe, group, self.rollout.limits) for group in played.groups]
        for group in groups:
            self.work.stream.remember(group)
        self.ledger.record(
            "sealed",
            work=played.work.id,
            step=step,
            groups={
                group.key: {
                    "trajectories": [t.id for t in group.trajectories],
                    "rewards": [None if t.failure else t.raw_reward for t in group.trajectories],
                    "digest": token_digest(
                        s.tokens for t in group.trajectories for turn in t.turns for s in turn.segments
                    ),
                }
                for group in groups
            },
        )
        return Piece(groups)

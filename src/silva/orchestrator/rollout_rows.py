"""The rows of rollouts/step_N.parquet: every rollout of a step or of an evaluation, with its fate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from silva.evaluation.evaluator import Evaluation
from silva.orchestrator.buffer import Batch
from silva.storage.rollouts import RolloutRow, Status
from silva.types import Group, Sample


def training_rows(batch: Batch, samples: Iterable[Sample]) -> list[RolloutRow]:
    """The groups that are kept, then those that were dropped. `samples`: what was trained."""
    advantages = {s.trajectory: float(s.advantages[-1]) for s in samples if s.advantages is not None}

    def rows(group: Group, status: Status, reason: str = "") -> list[RolloutRow]:
        return [
            RolloutRow(
                step=batch.step,
                task=group.task.id,
                environment=group.task.environment,
                group=group.key,
                trajectory=t,
                status=status if t.failure is None else "failed",
                reason=reason if t.failure is None else f"{t.failure}: {t.error}",
                advantage=advantages.get(t.id),
            )
            for t in group.trajectories
        ]

    kept = [row for group in batch.kept for row in rows(group, "trained")]
    return kept + [row for d in batch.dropped for row in rows(d.group, "dropped", d.reason)]


def evaluation_rows(step: int, evaluations: Sequence[Evaluation]) -> list[RolloutRow]:
    return [
        RolloutRow(
            step=step, task=task.id, environment=e.environment, group=f"eval:{task.id}", trajectory=t,
            status="eval", reason=t.error or "",
        )
        for e in evaluations
        for task, t in e.episodes
    ]  # fmt: skip

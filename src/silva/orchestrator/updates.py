"""From groups to updates of the policy: rows, advantages, loss, learning rate, optimizer step.

groups ──to_samples──> rows ──score, with_advantages──> rows with advantages ──> update ──> metrics
                                                                                  │
                                                          ledger first: who is trained

The loop owns the schedule: trainers know no learning rate and no length of a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import numpy as np

from silva.aio import gather
from silva.algorithms.aggregation import normalise
from silva.algorithms.compose import with_advantages
from silva.config.sections import Optimizer
from silva.errors import RecordError
from silva.orchestrator.parts import Parts
from silva.orchestrator.state import RunState
from silva.protocols import Trainer
from silva.rollouts.samples import next_states, to_samples
from silva.types import Group, LossSpec, OptimParams, Sample, Signals

Row = tuple[Group, list[Sample]]
"""A group and the samples of its trajectories."""


class Updates:
    """Those of one run."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._echo = {each.label: each.echo for each in parts.config.environments}

    async def rows(self, groups: Sequence[Group], own: int, controllers: Mapping[str, float]) -> list[Row]:
        """The rows of the groups with advantages, from what the trainer knows before its first update.

        Args:
            own: how many of the groups are of this step; the others are replayed.
        """
        p, rows = self.parts, [(group, to_samples([group])) for group in groups]
        samples = list(chain.from_iterable(samples for _, samples in rows))
        if not samples:
            return rows
        self._check_fresh(samples, {group.key for group in groups[own:]})
        if p.buffer.work.idle:
            await p.engine.sleep()
        ends = next_states(groups, p.engine.capabilities.context) if p.recipe.bootstraps else []
        signals = await p.trainer.score([*samples, *ends], p.recipe.needs) if p.recipe.needs else Signals()
        values = signals.values[len(samples) :] if ends and signals.values else ()
        ahead = {end.trajectory: float(row[-1]) for end, row in zip(ends, values, strict=True)}
        known = signals.first(len(samples))
        ready = iter(with_advantages(p.recipe, samples, groups, known, controllers, bootstrap=ahead))
        return [
            (group, [echoed(next(ready), self._echo.get(group.task.environment, 0.0)) for _ in samples])
            for group, samples in rows
        ]

    def _check_fresh(self, samples: Sequence[Sample], replayed: Collection[str]) -> None:
        """Raises RecordError if the policy of a token is staler than admission allows, or `replay` does."""
        now, level = self.parts.trainer.version, self.parts.buffer.work.level
        for sample in samples:
            if sample.group in replayed:
                continue
            sampled = sample.versions[sample.versions >= 0]
            if len(sampled) and not now - level <= sampled.min() <= sampled.max() <= now:
                raise RecordError(
                    f"a token of {sample.trajectory}: got one of versions {sampled.min()} to {sampled.max()} "
                    f"of the policy while version {now} is trained, expected at most "
                    f"rollout.max_async_level = {level} versions before it"
                )

    async def update(
        self, state: RunState, number: int, new: Sequence[Row], replayed: Sequence[Row] = ()
    ) -> tuple[dict[str, float], dict[Sample, np.ndarray]]:
        """One optimizer step on rows of this step (`new`) and replayed ones; its metrics, and for each sample
        which of its tokens the loss clipped (`LearnedTurn`).

        Args:
            state: after the step before.
            number: of the update in its step.
        """
        p, part, step = self.parts, [*new, *replayed], state.step + 1
        groups = [group for group, _ in part]
        shown = await p.data.draw(step) if p.data else []
        own = [sample for _, samples in part for sample in samples]
        samples = normalise(
            [*own, *shown],
            p.recipe.aggregation,
            constant=self._constant(groups),
        )
        p.ledger.record("trained", step=step, update=number, groups=[g.key for g, _ in new])
        if replayed:
            p.ledger.record("replayed", step=step, update=number, groups=[g.key for g, _ in replayed])
        p.ledger.commit()
        p.monitor.stage("train", number, p.config.trainer.updates_per_step)
        loss, trainer = p.recipe.loss_spec(state.controllers), p.config.trainer
        update = state.updates + number
        total = p.config.steps * trainer.updates_per_step
        critic = optim_params(update, trainer.critic.optimizer, total) if p.recipe.critic else None
        policy = optim_params(update, trainer.optimizer, total)
        metrics = await one_update(p.trainer, samples, loss, policy, critic)
        p.notices.update(step, metrics)
        if not p.config.monitoring.rollouts or "clipped" not in metrics:
            return metrics, {}
        # Most updates clip nothing, which nobody needs to be asked for.
        none = [np.zeros(len(sample), bool) for sample in own]
        clipped = await p.trainer.clipped() if metrics["clipped"] else none
        return metrics, dict(zip(own, clipped, strict=False))

    def _constant(self, groups: Sequence[Group]) -> float | None:
        """What `aggregation = "constant"` divides the update's loss by."""
        recipe = self.parts.recipe
        if recipe.aggregation != "constant":
            return None
        trajectories = sum(len(group.scored) for group in groups)
        return recipe.aggregation_constant or float(trajectories * self.parts.buffer.rollout.longest_answer)


async def one_update(
    trainer: Trainer,
    samples: Sequence[Sample],
    loss: LossSpec,
    policy: OptimParams,
    critic: OptimParams | None = None,
) -> dict[str, float]:
    """The gradient of all samples, and a step on it; the metrics of both."""
    if trainer.capabilities.pipelined:  # a service makes both in one turn of its own
        calls = trainer.forward_backward(samples, loss), trainer.optim_step(policy, critic)
        learnt, stepped = await gather(calls)
    else:
        learnt = await trainer.forward_backward(samples, loss)
        stepped = await trainer.optim_step(policy, critic)
    return {**learnt, **stepped}


def echoed(sample: Sample, weight: float) -> Sample:
    """The sample with a stream of what the environment answers: tokens without loss after the first reply."""
    if not weight:
        return sample
    answered = (sample.loss_weights == 0) & (np.cumsum(sample.loss_weights > 0) > 0)
    return sample.replace(streams={**sample.streams, "observations": (weight * answered).astype(np.float32)})


def optim_params(update: int, settings: Optimizer, total_updates: int) -> OptimParams:
    """What one update, counted from 0, is made with."""
    return OptimParams(
        lr_at(update, settings, total_updates),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def lr_at(update: int, settings: Optimizer, total_updates: int) -> float:
    """Learning rate of one update, counted from 0.

    Warm-up of W updates rises linearly, `lr * (update + 1) / (W + 1)`, so that update W is the first at full
    rate; then constant, linear or cosine, reaching `lr * min_lr_ratio` at update `total_updates - 1`.
    """
    if update < settings.warmup:
        return settings.lr * (update + 1) / (settings.warmup + 1)
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (update - settings.warmup) / max(1, total_updates - 1 - settings.warmup))
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)

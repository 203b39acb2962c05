"""The reinforcement learning loop: one, for every recipe.

    stage         consumes                     produces                     waits for, unblocked by
    ┌─> rollout   tasks, the engine's version  a Batch of sealed groups     the last of its episodes
    │   train     groups that are kept         rows, updates_per_step       each answer of the trainer
    │                                          times an optimizer step
    │   publish   the trainer's weights        a version in the engine      trainer, then engine
    │   evaluate  held-out tasks, when due     results, a row of metrics    the last of its episodes
    └── save      RunState, when due           a checkpoint                 trainer and disk

Every stage waits for the one before it. Rollouts of later steps may already be in flight meanwhile
(`rollout.max_async_level`, see work.py), or updates begin while the last groups of their step are played
(`rollout.overlap_training`). A first Ctrl-C gives up rollout and evaluate at once; train, publish and save
are completed. An error of any part ends the run, and what is in flight is cancelled. The ledger is written
before each effect, the checkpoint after all of them; a killed run goes on from its last checkpoint, and what
came after is repeated, bit for bit if nothing was in flight. Components never reference this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TypeVar

import numpy as np

from silva.algorithms.compose import next_state
from silva.errors import NoSignalError
from silva.evaluation.evaluator import Evaluation, rollout_rows
from silva.orchestrator import metrics
from silva.orchestrator.buffer import Batch
from silva.orchestrator.collapse import collapse_metrics
from silva.orchestrator.ending import StepEnd
from silva.orchestrator.evaluations import stalled
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.parts import Parts
from silva.orchestrator.replay import FILE as REPLAY
from silva.orchestrator.state import RunState
from silva.orchestrator.updates import Row, Updates
from silva.ports import crash_point
from silva.signals import Interrupted
from silva.storage.checkpoints import Writer
from silva.types import Group, Sample

__all__ = ["Loop", "Parts", "split"]
T = TypeVar("T")
FAILING_STEPS = 3
"""So many steps in a row with too many failures are no accident."""


@dataclass
class Trained:
    """What a step has played and trained. `updates`: the metrics of each. `clipped`: [T] of its samples."""

    batch: Batch
    rows: list[Row] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    clipped: dict[Sample, np.ndarray] = field(default_factory=dict)

    def learnt(self, metrics: dict[str, float], clipped: dict[Sample, np.ndarray]) -> None:
        self.updates.append(metrics)
        self.clipped |= clipped


class Loop:
    """Runs `parts` from `state` to the last step; `state` is where the run stands after each whole step."""

    def __init__(self, parts: Parts, state: RunState):
        self.parts, self.state = parts, state
        parts.load(state.parts)
        self._updates = Updates(parts)
        self._end = StepEnd(parts, self._evaluate, others=self._replayed)

    async def run(self, begun: Callable[[], None] = lambda: None) -> RunState:
        """Train to the last step; `begun` is called when a step is done: now the run has something to lose.

        Raises:
            Interrupted: after Ctrl-C, with a checkpoint of the last whole step on disk.
            NoSignalError: too many episodes gave no result (`rollout.max_failed`), with a checkpoint as well.
        """
        p = self.parts
        with Interrupt() as interrupt:
            try:
                self.state = await self._end.begin(self.state, interrupt)
                while self.state.step < p.config.steps and not self._stops_early():
                    await self._step(interrupt)
                    begun()
                    interrupt.check()
                    if self.state.failing >= FAILING_STEPS:
                        await self.save()
                        raise NoSignalError(p.notices.failing(p.config.rollout.max_failed))
            except Interrupted:
                await self.save()
                raise
            finally:
                await p.buffer.work.close()
        await self.save()
        p.notices.end()
        return self.state

    def _stops_early(self) -> bool:
        """Whether the last evaluations brought nothing better, see `algorithm.early_stop`."""
        p, state = self.parts, self.state
        if not stalled(state, p.recipe.early_stop, p.config.eval.every):
            return False
        p.monitor.message(
            f"stopped after step {state.step} of {p.config.steps}: {p.recipe.early_stop} evaluations in a "
            f"row were not better than that at step {state.best_step} (algorithm.early_stop)"
        )
        return True

    async def _step(self, interrupt: Interrupt) -> None:
        p, step = self.parts, self.state.step + 1
        p.phases.step.clear()
        before, version = dict(p.engine.counts()), p.trainer.version
        done = await (self._overlapped if p.config.rollout.overlap_training else self._in_turn)(
            step, interrupt
        )
        with p.phases("publish"):
            done.metrics |= await self._publish(step, trained=bool(done.updates))
        done.metrics |= p.idle() | metrics.engine_metrics(before, p.engine.counts())
        p.notices.cost(step, p.config.steps, done.metrics)
        self._advance(done, version)
        self.state = await self._end.finish(self.state, interrupt)

    async def _in_turn(self, step: int, interrupt: Interrupt) -> Trained:
        """Play the whole batch, then make the updates: each of a share of the groups that are kept."""
        p, done, controllers = self.parts, Trained(Batch(step)), self.state.controllers
        with p.phases("rollout"):
            p.monitor.stage("rollout", 0, p.buffer.size)
            done.batch = batch = await interrupt.during(p.buffer.collect(step, self._temperature))
        with p.phases("train"):
            replayed = p.replay.draw(step, p.trainer.version) if p.replay and batch.kept else []
            own, count = len(batch.kept), p.config.trainer.updates_per_step
            done.rows = await self._updates.rows([*batch.kept, *replayed], own, controllers)
            done.metrics = await self._diagnosis(step, batch, replayed)
            shares = zip_longest(split(done.rows[:own], count), split(done.rows[own:], count), fillvalue=())
            for number, (new, again) in enumerate(shares):
                done.learnt(*await self._updates.update(self.state, number, new, again))
            if p.replay:
                p.replay.add(step, batch.kept)
        return done

    async def _overlapped(self, step: int, interrupt: Interrupt) -> Trained:
        """Make each update as soon as its share of the batch is played, while the others are still played.

        The engine gets the new weights after the last one, so all of the batch is of one version. Once the
        first update is made, the step is played to its end: half of it is nothing to go on from.
        """
        p, done = self.parts, Trained(Batch(step))
        sizes = [len(share) for share in split(range(p.buffer.size), p.config.trainer.updates_per_step)]
        for number, size in enumerate(sizes):
            with p.phases("rollout"):
                left = sum(sizes[number + 1 :])
                share = p.buffer.share(step, self._temperature, size, left)
                pieces = await (share if done.updates else interrupt.during(share))
                done.batch.pieces += pieces
            with p.phases("train"):
                groups = [group for piece in pieces for group in piece.kept]
                rows = await self._updates.rows(groups, len(groups), self.state.controllers)
                if rows:
                    done.learnt(*await self._updates.update(self.state, len(done.updates), rows))
                done.rows += rows
        p.buffer.check(done.batch)
        with p.phases("train"):
            done.metrics = await self._diagnosis(step, done.batch, ())
        return done

    @property
    def _temperature(self) -> float:
        usual: float = self.parts.config.rollout.sampling.temperature
        return self.state.controllers.get("temperature", usual)

    async def _diagnosis(self, step: int, batch: Batch, replayed: Sequence[Group]) -> dict[str, float]:
        p, found = self.parts, dict[str, float]()
        if p.replay:
            stale = p.replay.staleness(replayed, p.trainer.version)
            found = {"replay/groups": len(replayed), "replay/held": p.replay.size, "replay/staleness": stale}
        every = p.config.monitoring.collapse_every
        if not every or step % every:
            return found
        collapse = await collapse_metrics(p.trainer, batch.groups)
        return found | {f"collapse/{name}": value for name, value in collapse.items()}

    async def _publish(self, step: int, *, trained: bool) -> dict[str, float]:
        """The policy becomes the reference when that is due, and after an update the engine's; metrics."""
        p, every = self.parts, self.parts.recipe.reference_refresh
        if every and step % every == 0:
            await p.trainer.refresh_reference()
        if not trained:
            return {}
        snapshot = await p.trainer.publish()
        p.ledger.record("published", version=snapshot.version)
        p.ledger.commit()
        crash_point("publish")
        probed = await p.sync.load(snapshot)
        restarted = await p.buffer.work.updated(snapshot.version)
        return ({"perf/restarted_work": float(restarted)} if restarted else {}) | probed

    def _advance(self, done: Trained, version: int) -> None:
        """The state after the step, before which the policy had `version`. Its numbers wait there until its
        evaluation is done, however often that is interrupted."""
        p, batch = self.parts, done.batch
        samples = [sample for _, samples in done.rows for sample in samples]
        p.monitor.rollouts(batch.step, batch.rows(samples, version, done.clipped))
        means = metrics.mean_of_updates(done.updates)
        controllers = next_state(
            p.recipe, self.state.controllers, batch.groups,
            {name.removeprefix("train/"): value for name, value in means.items()},
            p.config.rollout.sampling.temperature,
        )  # fmt: skip
        fails = len(batch.failed) > p.config.rollout.max_failed * batch.played
        turns = [turn for group in batch.groups for turn in group.turns]
        generated = sum(s.count for turn in turns for s in turn.segments if s.source == "policy")
        self.state = self.state.replace(
            step=batch.step,
            ledger=p.ledger.position,
            parts=p.state(),
            controllers=controllers,
            tokens_generated=self.state.tokens_generated + generated,
            tokens_in_rows=self.state.tokens_in_rows + sum(len(s) for s in samples),
            tokens_trained=self.state.tokens_trained + int(means.get("train/trained_tokens", 0)),
            steps_trained=self.state.steps_trained + p.notices.step(batch, samples),
            failing=self.state.failing + 1 if fails else 0,
            updates=self.state.updates + len(done.updates),
            pending=metrics.batch_metrics(batch)
            | metrics.advantage_metrics(samples)
            | means
            | done.metrics
            | (p.data.metrics() if p.data else {})
            | {f"control/{name}": value for name, value in controllers.items()}
            | metrics.perf_metrics(p.phases.step, generated, done.updates),
        )

    async def _evaluate(self, step: int) -> list[Evaluation]:
        self.parts.monitor.stage("eval", 0, 0)
        evaluations = await self.parts.evaluate(f"evaluation at step {step}")
        self.parts.monitor.rollouts(step, rollout_rows(step, evaluations))
        return evaluations

    async def save(self) -> None:
        """A checkpoint of the last whole step, unless this process has just written it."""
        await self._end.save(self.state)

    def _replayed(self) -> dict[str, Writer]:
        return {REPLAY: self.parts.replay.state()} if self.parts.replay else {}


def split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Consecutive shares, as even as can be; fewer where there are fewer items than parts."""
    parts = min(parts, len(items))
    cuts = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [items[a:b] for a, b in pairwise(cuts)]

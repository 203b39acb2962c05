"""The reinforcement learning loop: one, for every recipe.

    ┌─> rollout     Buffer.collect            groups of trajectories       waits for episodes
    │   train       to_samples                rows                         waits for the trainer
    │               with_advantages           rows with advantages
    │               normalise, forward_backward, optim_step                updates_per_step times
    │   publish     trainer.publish, engine.load                           waits for both
    │   evaluate    when due                                               waits for episodes
    └── save        when due                  checkpoint                   waits for the disk

Every stage waits for the one before it. Rollouts of later steps may already be in flight meanwhile
(`rollout.max_async_level`, see work.py). The ledger is written before each effect, the checkpoint after all
of them; a killed run goes on from its last checkpoint and repeats what came after, bit for bit if nothing
was in flight. Components never reference this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import TypeVar

from silva.algorithms.aggregation import normalise
from silva.algorithms.compose import next_state, with_advantages
from silva.algorithms.settings import Algorithm
from silva.config.sections import Checkpoint
from silva.errors import RecordError
from silva.evaluation.evaluator import Evaluation, records
from silva.monitoring.monitor import Monitor
from silva.orchestrator import metrics
from silva.orchestrator.buffer import Batch, Buffer
from silva.orchestrator.collapse import collapse_metrics
from silva.orchestrator.evaluations import compared, fallen
from silva.orchestrator.interrupt import Interrupt, Interrupted
from silva.orchestrator.notices import Notices
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import Probe
from silva.orchestrator.replay import FILE as REPLAY
from silva.orchestrator.replay import Replay
from silva.orchestrator.rollout_rows import evaluation_rows, training_rows
from silva.orchestrator.schedule import optim_params
from silva.orchestrator.state import RunState
from silva.ports import crash_point
from silva.protocols import Engine, Trainer
from silva.rollouts.samples import next_states, to_samples
from silva.storage.checkpoints import CheckpointStore, Writer
from silva.storage.ledger import Ledger
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Group, OptimParams, Sample, Signals

T = TypeVar("T")
Row = tuple[Group, list[Sample]]
"""A group and the samples of its trajectories."""


@dataclass(frozen=True)
class Settings:
    """The part of the configuration the loop reads. `eval_every`: 0 for the last step only."""

    steps: int
    temperature: float  # of the rollouts, as configured
    trainer: LocalTrainerSettings
    eval_every: int
    collapse_every: int
    checkpoint: Checkpoint

    @property
    def updates(self) -> int:
        """Of the whole run: where schedules end."""
        return self.steps * self.trainer.updates_per_step

    def evaluates(self, step: int) -> bool:
        return step == self.steps or bool(self.eval_every and step % self.eval_every == 0)


@dataclass(frozen=True)
class Parts:
    """Everything the loop joins; constructed in commands/train.py.

    evaluate: plays the held-out tasks; its argument says when, for messages.
    """

    settings: Settings
    recipe: Algorithm
    trainer: Trainer
    engine: Engine
    buffer: Buffer
    evaluate: Callable[[str], Awaitable[list[Evaluation]]]
    ledger: Ledger
    store: CheckpointStore
    monitor: Monitor
    notices: Notices
    phases: Phases
    replay: Replay | None = None
    probe: Probe | None = None  # None: the engine shares the trainer's parameters


class Loop:
    """Runs `parts` from `state` to the last step; `state` is where the run stands after each whole step."""

    def __init__(self, parts: Parts, state: RunState):
        self.parts, self.state = parts, state
        self._saved: RunState | None = None  # that of the newest checkpoint written by this process

    async def run(self, begun: Callable[[], None] = lambda: None) -> RunState:
        """Train to the last step; `begun` is called before the first one.

        Raises:
            Interrupted: after Ctrl-C, with a checkpoint of the last whole step on disk.
        """
        with Interrupt() as interrupt:
            try:
                await self._begin(interrupt)
                begun()
                while self.state.step < self.parts.settings.steps and not self._stops_early():
                    await self._step(interrupt)
                    interrupt.check()
            except Interrupted:
                await self.save()
                raise
            finally:
                await self.parts.buffer.work.close()
        await self.save()
        self.parts.notices.end()
        return self.state

    def _stops_early(self) -> bool:
        """Whether the last evaluations brought nothing better, see `algorithm.early_stop`."""
        p, step, best = self.parts, self.state.step, self.state.best_step
        wait = p.recipe.early_stop * p.settings.eval_every
        if not wait or best is None or step - best < wait:
            return False
        p.monitor.message(
            f"stopped after step {step} of {p.settings.steps}: {p.recipe.early_stop} evaluations in a row "
            f"were not better than that at step {best} (algorithm.early_stop)"
        )
        return True

    async def _begin(self, interrupt: Interrupt) -> None:
        """The evaluation before training, or the one an interrupt cut short."""
        p, state = self.parts, self.state
        p.monitor.stage("start")
        if state.best_step == state.step and p.settings.checkpoint.keep_best:
            p.store.mark_best(state.step)  # killed between the checkpoint and its mark
        if state.pending is not None:
            await self._finish_step(state.pending, interrupt)
        elif state.eval_before is None:
            evaluations = await interrupt.during(self._evaluate(0))
            before = records(evaluations)
            self.state = state.replace(eval_before=before, eval_last=before, seconds=dict(p.phases.total))
            p.monitor.step(0, metrics.eval_metrics(evaluations) | metrics.perf_metrics(p.phases.step))

    async def _step(self, interrupt: Interrupt) -> None:
        p, step = self.parts, self.state.step + 1
        p.phases.step.clear()
        with p.phases("rollout"):
            p.monitor.stage("rollout", 0, p.buffer.size)
            temperature = self.state.controllers.get("temperature", p.settings.temperature)
            batch = await interrupt.during(p.buffer.collect(step, temperature))
        with p.phases("train"):
            replayed = p.replay.draw(step, p.trainer.version) if p.replay and batch.kept else []
            rows = await self._with_advantages([*batch.kept, *replayed], len(batch.kept))
            diagnosis = await self._diagnosis(step, batch, replayed)
            updates = await self._train(step, rows, len(batch.kept))
            if p.replay:
                p.replay.add(step, batch.kept)
        with p.phases("publish"):
            probed = await self._publish(step, trained=bool(updates))
        samples = [sample for _, samples in rows for sample in samples]
        p.monitor.rollouts(step, training_rows(batch, samples))
        self._advance(batch, samples, updates, diagnosis | probed)
        await self._finish_step(self.state.pending or {}, interrupt)

    async def _with_advantages(self, groups: Sequence[Group], own: int) -> list[Row]:
        """The rows of the groups with advantages, from what the trainer knows before its first update.

        Args:
            own: how many of the groups are of this step; the others are replayed.
        """
        p, rows = self.parts, [(group, to_samples([group])) for group in groups]
        samples = list(chain.from_iterable(samples for _, samples in rows))
        if not samples:
            return rows
        self._check_fresh(samples, {group.key for group in groups[own:]})
        if not p.buffer.work.in_flight:
            await p.engine.sleep()
        ends = next_states(groups, p.engine.capabilities.context) if p.recipe.bootstraps else []
        signals = await p.trainer.score([*samples, *ends], p.recipe.needs) if p.recipe.needs else Signals()
        values = signals.values[len(samples) :] if ends and signals.values else ()
        ahead = {end.trajectory: float(row[-1]) for end, row in zip(ends, values, strict=True)}
        found = iter(
            with_advantages(
                p.recipe, samples, groups, signals.first(len(samples)), self.state.controllers,
                bootstrap=ahead,
            )
        )  # fmt: skip
        return [(group, [next(found) for _ in samples]) for group, samples in rows]

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

    async def _diagnosis(self, step: int, batch: Batch, replayed: Sequence[Group]) -> dict[str, float]:
        p, found = self.parts, dict[str, float]()
        if p.replay:
            stale = p.replay.staleness(replayed, p.trainer.version)
            found = {"replay/groups": len(replayed), "replay/held": p.replay.size, "replay/staleness": stale}
        every = p.settings.collapse_every
        if not every or step % every:
            return found
        collapse = await collapse_metrics(p.trainer, batch.groups)
        return found | {f"collapse/{name}": value for name, value in collapse.items()}

    async def _train(self, step: int, rows: Sequence[Row], own: int) -> list[dict[str, float]]:
        """The metrics of each update: a share of the step's own groups, and of those that are replayed."""
        p, results, updates = self.parts, [], self.parts.settings.trainer.updates_per_step
        shares = zip_longest(split(rows[:own], updates), split(rows[own:], updates), fillvalue=())
        for update, (new, again) in enumerate(shares):
            part = [*new, *again]
            groups = [group for group, _ in part]
            samples = normalise(
                [sample for _, samples in part for sample in samples],
                p.recipe.aggregation,
                constant=self._constant(groups),
            )
            p.ledger.record("trained", step=step, update=update, groups=[g.key for g, _ in new])
            if again:
                p.ledger.record("replayed", step=step, update=update, groups=[g.key for g, _ in again])
            p.ledger.commit()
            p.monitor.stage("train", update, p.settings.trainer.updates_per_step)
            loss = p.recipe.loss_spec(self.state.controllers)
            found = dict(await p.trainer.forward_backward(samples, loss))
            found |= await p.trainer.optim_step(*self._optim_params(self.state.updates + update))
            p.notices.update(step, found)
            results.append(found)
        return results

    def _optim_params(self, update: int) -> tuple[OptimParams, OptimParams | None]:
        """Of the policy, and of the critic if there is one."""
        trainer, total = self.parts.settings.trainer, self.parts.settings.updates
        critic = optim_params(update, trainer.critic.optimizer, total) if self.parts.recipe.critic else None
        return optim_params(update, trainer.optimizer, total), critic

    def _constant(self, groups: Sequence[Group]) -> float | None:
        """What `aggregation = "constant"` divides the update's loss by."""
        recipe = self.parts.recipe
        if recipe.aggregation != "constant":
            return None
        trajectories = sum(len(group.scored) for group in groups)
        return recipe.aggregation_constant or float(trajectories * self.parts.buffer.longest)

    async def _publish(self, step: int, *, trained: bool) -> dict[str, float]:
        """The policy becomes the reference when that is due, and after an update the engine's; metrics."""
        p, every = self.parts, self.parts.recipe.reference_refresh
        if every and step % every == 0:
            await p.trainer.refresh_reference()
        if trained:
            snapshot = await p.trainer.publish()
            p.ledger.record("published", version=snapshot.version)
            p.ledger.commit()
            crash_point("publish")
            await p.engine.load(snapshot)
            restarted = await p.buffer.work.updated(snapshot.version)
            found = {"perf/restarted_work": float(restarted)} if restarted else {}
            probed = await p.probe.check(p.trainer, p.engine) if p.probe else {}
            return found | {f"perf/{name}": value for name, value in probed.items()}
        return {}

    def _advance(
        self,
        batch: Batch,
        samples: Sequence[Sample],
        updates: Sequence[dict[str, float]],
        diagnosis: dict[str, float],
    ) -> None:
        """The state after the step. Its numbers wait there until its evaluation is done, however often that
        is interrupted."""
        p, work = self.parts, self.parts.buffer.work
        means = metrics.mean_of_updates(updates)
        controllers = next_state(
            p.recipe, self.state.controllers, batch.groups,
            {name.removeprefix("train/"): value for name, value in means.items()}, p.settings.temperature,
        )  # fmt: skip
        turns = [turn for group in batch.groups for turn in group.turns]
        generated = sum(s.count for turn in turns for s in turn.segments if s.source == "policy")
        self.state = self.state.replace(
            step=batch.step,
            tasks=dict(work.stream.position),
            passed=dict(work.stream.passed),
            pools=dict(work.stream.pools),
            in_flight=work.in_flight,
            ledger=p.ledger.position,
            controllers=controllers,
            tokens_generated=self.state.tokens_generated + generated,
            tokens_trained=self.state.tokens_trained + sum(len(s) for s in samples),
            steps_trained=self.state.steps_trained + p.notices.step(batch, samples),
            updates=self.state.updates + len(updates),
            seconds=dict(p.phases.total),
            pending=metrics.batch_metrics(batch)
            | metrics.advantage_metrics(samples)
            | means
            | diagnosis
            | {f"control/{name}": value for name, value in controllers.items()}
            | metrics.perf_metrics(p.phases.step, generated),
        )

    async def _finish_step(self, pending: dict[str, float], interrupt: Interrupt) -> None:
        """Evaluate when due, log the step, save when due."""
        p, settings, step = self.parts, self.parts.settings, self.state.step
        best, warning = False, ""
        if settings.evaluates(step):
            evaluations = await interrupt.during(self._evaluate(step))
            pending = pending | metrics.eval_metrics(evaluations)
            pending["perf/seconds/eval"] = p.phases.step["eval"]
            warning = fallen(self.state, records(evaluations), settings.steps, p.store.path)
            self.state, best = compared(self.state, evaluations)
        self.state = self.state.replace(pending=None, seconds=dict(p.phases.total))
        p.monitor.step(step, pending)
        if warning:
            p.monitor.message(warning, "warning")
        keep = best and settings.checkpoint.keep_best
        if keep or (settings.checkpoint.every and step % settings.checkpoint.every == 0):
            await self.save()
        if keep:
            p.store.mark_best(step)

    async def _evaluate(self, step: int) -> list[Evaluation]:
        self.parts.monitor.stage("eval", 0, 0)
        evaluations = await self.parts.evaluate(f"evaluation at step {step}")
        self.parts.monitor.rollouts(step, evaluation_rows(step, evaluations))
        return evaluations

    async def save(self) -> None:
        """A checkpoint of the last whole step, unless this process has just written it."""
        p, step = self.parts, self.state.step
        if self._saved == self.state:
            return
        with p.phases("checkpoint"):
            p.monitor.stage("checkpoint")
            state, loop = self.state, asyncio.get_running_loop()

            def trainer(path: Path) -> None:
                asyncio.run_coroutine_threadsafe(p.trainer.save(path), loop).result()

            files: dict[str, Writer] = {"trainer": trainer, "state.json": state.encode()}
            if p.replay:
                files[REPLAY] = p.replay.encode()
            await asyncio.to_thread(p.store.save, step, files, {"ledger": state.ledger})
            p.ledger.record("checkpoint", step=step, position=state.ledger)
            p.ledger.commit()
        self._saved = self.state


def split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Consecutive shares, as even as can be; fewer where there are fewer items than parts."""
    parts = min(parts, len(items))
    cuts = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [items[a:b] for a, b in pairwise(cuts)]

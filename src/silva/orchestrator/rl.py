"""The reinforcement learning loop: one, for every recipe.

            tasks ──> Buffer.collect ──> groups ──to_samples──> rows ─with_advantages─> rows with advantages
              ^         (rollouts)                                                     │
              │                                                                        v
     engine.load <────────── trainer.publish <── optim_step <── forward_backward <── normalise
                                   │                            (updates_per_step times)
                                   v
                  evaluate (every n) ──> metrics ──> checkpoint (every n) ──> next step

Each step waits for: its rollouts, its updates, then (when due) its evaluation and its checkpoint; nothing of
the next step begins before the publish (staleness 0). The ledger is written before each effect, the
checkpoint after all of them; a killed run goes on from its last checkpoint and repeats what came after, bit
for bit. Components never reference this module.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from silva.algorithms.aggregation import normalise
from silva.algorithms.compose import next_state, with_advantages
from silva.algorithms.settings import Algorithm
from silva.config.sections import Checkpoint, Eval, Limits
from silva.errors import CheckpointError
from silva.evaluation.evaluator import Evaluation, Standing, evaluate, records, standing
from silva.monitoring.fall import fall
from silva.monitoring.monitor import Monitor
from silva.orchestrator import numbers, silence
from silva.orchestrator.activity import Activity
from silva.orchestrator.buffer import Batch, Buffer
from silva.orchestrator.collapse import collapse_metrics
from silva.orchestrator.interrupt import Interrupt, Interrupted
from silva.orchestrator.schedule import optim_params
from silva.orchestrator.state import RunState
from silva.ports import crash_point
from silva.protocols import Engine, TaskSet, Trainer
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Policy
from silva.rollouts.faults import tally
from silva.rollouts.samples import next_states, to_samples
from silva.storage.checkpoints import CheckpointStore, Writer
from silva.storage.ledger import Ledger
from silva.storage.rollouts import RolloutRow
from silva.trainer.settings import LocalTrainerSettings
from silva.types import Group, OptimParams, Sample, Signals


@dataclass(frozen=True)
class Settings:
    """The part of the configuration the loop reads."""

    steps: int
    seed: int
    eval: Eval
    limits: Limits
    redo: int
    checkpoint: Checkpoint
    trainer: LocalTrainerSettings
    temperature: float  # of the rollouts, as configured
    collapse_every: int

    @property
    def updates(self) -> int:
        """Of the whole run: where schedules end."""
        return self.steps * self.trainer.updates_per_step


@dataclass(frozen=True)
class Parts:
    """Everything the loop joins; constructed in commands/train.py."""

    settings: Settings
    recipe: Algorithm
    trainer: Trainer
    engine: Engine
    buffer: Buffer
    tasksets: Mapping[str, TaskSet]
    renderer: Renderer
    ledger: Ledger
    store: CheckpointStore
    monitor: Monitor
    activity: Activity
    phases: numbers.Phases


class Loop:
    """Runs `parts` from `state` to the last step; `state` is where the run stands after each whole step."""

    def __init__(self, parts: Parts, state: RunState):
        self.parts, self.state = parts, state
        self._saved: RunState | None = None  # that of the newest checkpoint written by this process
        self._failures: Counter[str] = Counter()  # errors of training episodes, of this process
        self._played = 0
        self._silent = False  # whether a step that taught nothing has been explained

    async def run(self, begun: Callable[[], None] = lambda: None) -> RunState:
        """Train to the last step; `begun` is called before the first one.

        Raises:
            Interrupted: after Ctrl-C, with a checkpoint of the last whole step on disk.
        """
        with Interrupt() as interrupt:
            try:
                await self._begin(interrupt)
                begun()
                while self.state.step < self.parts.settings.steps:
                    await self._step(interrupt)
                    interrupt.check()
            except Interrupted:
                await self.save()
                raise
        await self.save()
        self._say_failures()
        return self.state

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
            p.monitor.step(0, numbers.eval_metrics(evaluations) | self._perf())

    async def _step(self, interrupt: Interrupt) -> None:
        p, step = self.parts, self.state.step + 1
        p.phases.step.clear()
        with p.phases("rollout"):
            p.monitor.stage("rollout", 0, p.buffer.groups)
            temperature = self.state.controllers.get("temperature", p.settings.temperature)
            batch = await interrupt.during(p.buffer.collect(step, temperature))
        with p.phases("train"):
            samples = await self._with_advantages(batch)
            diagnosis = await self._diagnosis(step, batch)
            updates = await self._train(step, batch.kept, samples)
        taught = self._noticed(batch, samples)
        every = p.recipe.reference_refresh
        if every and step % every == 0:
            await p.trainer.refresh_reference()
        with p.phases("publish"):
            if updates:
                snapshot = await p.trainer.publish()
                p.ledger.record("published", version=snapshot.version)
                p.ledger.commit()
                crash_point("publish")
                await p.engine.load(snapshot)
        p.monitor.rollouts(step, rollout_rows(batch, samples))
        means = numbers.mean_of_updates(updates)
        metrics = numbers.batch_metrics(batch) | numbers.advantage_metrics(samples) | means
        controllers = next_state(
            p.recipe, self.state.controllers, batch.groups,
            {name.removeprefix("train/"): value for name, value in means.items()}, p.settings.temperature,
        )  # fmt: skip
        metrics |= diagnosis | {f"control/{name}": value for name, value in controllers.items()}
        generated = sum(t.tokens("policy") for g in batch.groups for t in g.trajectories)
        # The numbers wait in the state until the step's evaluation is done, however often it is interrupted.
        self.state = self.state.replace(
            step=step,
            tasks=dict(p.buffer.stream.position),
            passed=dict(p.buffer.stream.passed),
            pools=dict(p.buffer.stream.pools),
            ledger=p.ledger.position,
            controllers=controllers,
            tokens_generated=self.state.tokens_generated + generated,
            tokens_trained=self.state.tokens_trained + sum(len(s) for s in samples),
            steps_trained=self.state.steps_trained + taught,
            updates=self.state.updates + len(updates),
            seconds=dict(p.phases.total),
            pending=metrics | self._perf(generated),
        )
        await self._finish_step(self.state.pending or {}, interrupt)

    async def _with_advantages(self, batch: Batch) -> list[Sample]:
        """The rows of the step with their advantages, from what the trainer knows before its first update."""
        p, rows = self.parts, to_samples(batch.kept)
        if not rows:
            return []
        await p.engine.sleep()
        ends = next_states(batch.kept, p.engine.capabilities.context) if p.recipe.bootstraps else []
        signals = await p.trainer.score([*rows, *ends], p.recipe.needs) if p.recipe.needs else Signals()
        values = signals.values[len(rows) :] if ends and signals.values else ()
        ahead = {end.trajectory: float(row[-1]) for end, row in zip(ends, values, strict=True)}
        return with_advantages(
            p.recipe, rows, batch.kept, signals.first(len(rows)), self.state.controllers, bootstrap=ahead
        )

    async def _diagnosis(self, step: int, batch: Batch) -> dict[str, float]:
        p = self.parts
        every = p.settings.collapse_every
        if not every or step % every:
            return {}
        found = await collapse_metrics(p.trainer, batch.groups)
        return {f"collapse/{name}": value for name, value in found.items()}

    async def _train(
        self, step: int, groups: Sequence[Group], samples: Sequence[Sample]
    ) -> list[dict[str, float]]:
        p, results = self.parts, []
        for update, part in enumerate(split(groups, p.settings.trainer.updates_per_step)):
            keys = {g.key for g in part}
            rows = [s for s in samples if s.group in keys]
            rows = normalise(rows, p.recipe.aggregation, constant=self._constant(part))
            p.ledger.record("trained", step=step, update=update, groups=[g.key for g in part])
            p.ledger.commit()
            p.monitor.stage("train", update, p.settings.trainer.updates_per_step)
            loss = p.recipe.loss_spec(self.state.controllers)
            metrics = dict(await p.trainer.forward_backward(rows, loss))
            metrics |= await p.trainer.optim_step(*self._optim_params(self.state.updates + update))
            for key, whose in (("nonfinite", ""), ("critic/nonfinite", " of the critic")):
                if metrics.get(key):
                    p.monitor.message(
                        f"step {step}: update{whose} skipped, its loss or gradient was not finite", "warning"
                    )
            results.append(metrics)
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

    async def _finish_step(self, metrics: dict[str, float], interrupt: Interrupt) -> None:
        """Evaluate when due, log the step, save when due."""
        p, settings, step = self.parts, self.parts.settings, self.state.step
        best, fallen = False, ""
        if step == settings.steps or (settings.eval.every and step % settings.eval.every == 0):
            evaluations = await interrupt.during(self._evaluate(step))
            metrics = (
                metrics | numbers.eval_metrics(evaluations) | {"perf/seconds/eval": p.phases.step["eval"]}
            )
            rows = records(evaluations)
            fallen = self._fallen(rows)
            found, before = standing(evaluations), self.state.best
            best = found is not None and found.beats(Standing(**before) if before else None)
            self.state = self.state.replace(
                eval_last=rows,
                eval_best=rows if best else self.state.eval_best,
                best=asdict(found) if best and found else before,
                best_step=step if best else self.state.best_step,
                seconds=dict(p.phases.total),
            )
        self.state = self.state.replace(pending=None)
        p.monitor.step(step, metrics)
        if fallen:
            p.monitor.message(fallen, "warning")
        keep = best and settings.checkpoint.keep_best
        if keep or (settings.checkpoint.every and step % settings.checkpoint.every == 0):
            await self.save()
        if keep:
            p.store.mark_best(step)

    def _fallen(self, now: list[dict[str, Any]]) -> str:
        """Warns if held-out results fell clearly below their best: once, and again at the end."""
        state, path = self.state, self.parts.store.path
        peaks = [(0, state.eval_before or []), (state.best_step or 0, state.eval_best or [])]
        known = fall(state.eval_last or [], peaks, path)
        return "" if known and state.step < self.parts.settings.steps else fall(now, peaks, path)

    async def _evaluate(self, step: int) -> list[Evaluation]:
        p, settings = self.parts, self.parts.settings
        p.monitor.stage("eval", 0, 0)
        with p.phases("eval"):
            evaluations = await evaluate(
                p.tasksets,
                Policy(p.engine, p.renderer, settings.eval.sampling),
                p.renderer,
                settings.eval,
                settings.limits,
                seed=settings.seed,
                redo=settings.redo,
                watch=p.activity,
                on_episode=lambda done, total, label: p.monitor.stage("eval", done, total, label),
            )
        p.monitor.rollouts(step, eval_rows(step, evaluations))
        for note in filter(None, (e.note() for e in evaluations)):
            p.monitor.message(f"evaluation at step {step}: {note}", "warning")
        return evaluations

    def _noticed(self, batch: Batch, samples: Sequence[Sample]) -> bool:
        """Whether the step taught something. Counts its failures; explains the first step that taught
        nothing."""
        p, played = self.parts, [t for g in batch.groups for t in g.trajectories]
        self._played += len(played)
        self._failures.update(t.error or "" for t in played if t.failure is not None)
        taught = silence.teaches(p.recipe, samples)
        if not taught and not self._silent:
            self._silent = True
            p.monitor.message(silence.explain(p.recipe, batch, p.buffer.group_size), "warning")
        return taught

    def _say_failures(self) -> None:
        if self._failures:
            self.parts.monitor.message(
                f"{self._failures.total()} of {self._played} training episodes failed and were left out: "
                f"{tally(self._failures.elements())}",
                "warning",
            )

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
            await asyncio.to_thread(p.store.save, step, files, {"ledger": state.ledger})
            p.ledger.record("checkpoint", step=step, position=state.ledger)
            p.ledger.commit()
        self._saved = self.state

    def _perf(self, generated: int = 0) -> dict[str, float]:
        phases = self.parts.phases.step
        metrics = {f"perf/seconds/{name}": seconds for name, seconds in phases.items()}
        if generated and phases["rollout"]:
            metrics["perf/tokens_per_second"] = generated / phases["rollout"]
        return metrics | {"perf/peak_memory_bytes": numbers.peak_memory_bytes()}


def split(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """Consecutive shares, as even as can be; fewer where there are fewer groups than parts."""
    parts = min(parts, len(groups))
    cuts = [len(groups) * i // parts for i in range(parts + 1)] if parts else [0]
    return [groups[a:b] for a, b in pairwise(cuts)]


def rollout_rows(batch: Batch, samples: Sequence[Sample]) -> list[RolloutRow]:
    """Every rollout of the step with its fate."""
    advantages = {s.trajectory: float(s.advantages[-1]) for s in samples if s.advantages is not None}
    reasons = {d.group.key: d.reason for d in batch.dropped}
    rows = []
    for group in batch.groups:
        for t in group.trajectories:
            common: dict[str, Any] = dict(
                step=batch.step,
                task=group.task.id,
                environment=group.task.environment,
                group=group.key,
                trajectory=t,
            )
            if t.failure is not None:
                rows.append(RolloutRow(status="failed", reason=f"{t.failure}: {t.error}", **common))
            elif group.key in reasons:
                rows.append(RolloutRow(status="dropped", reason=reasons[group.key], **common))
            else:
                rows.append(RolloutRow(status="trained", advantage=advantages.get(t.id), **common))
    return rows


def eval_rows(step: int, evaluations: Sequence[Evaluation]) -> list[RolloutRow]:
    return [
        RolloutRow(
            step=step, task=task.id, environment=e.environment, group=f"eval:{task.id}", trajectory=t,
            status="eval", reason=t.error or "",
        )
        for e in evaluations
        for task, t in e.episodes
    ]  # fmt: skip


def restore(store: CheckpointStore, ledger: Ledger) -> tuple[RunState, Path | None]:
    """Where to go on: the newest whole checkpoint, or the beginning. The ledger is rolled back to it.

    Raises:
        CheckpointError: a checkpoint's state cannot be read.
    """
    newest = store.newest()
    if newest is None:
        if store.skipped:
            raise CheckpointError(
                "no checkpoint of this run is whole, so it cannot go on:\n  "
                + "\n  ".join(store.skipped)
                + "\nPut one back, or start again with --overwrite."
            )
        if ledger.position:
            ledger.roll_back(0, 0)
        return RunState(), None
    step, path = newest
    state = RunState.decode((path / "state.json").read_bytes())
    if state.step != step:
        raise CheckpointError(f"{path}: state.json says step {state.step}, expected {step}")
    if ledger.position != state.ledger:
        ledger.roll_back(state.ledger, step)
    return state, path / "trainer"

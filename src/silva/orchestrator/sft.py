"""The supervised loop: one update a step on what is shown to the policy.

    ┌─> rows      a batch of dialogues, or of scripted play      (supervised.py, scripted.py)
    │   train     one optimizer step
    │   evaluate  held-out rows and held-out tasks, when due
    └── save      RunState, when due

A first Ctrl-C gives up an evaluation at once; an update and a checkpoint are completed. The checkpoint after
all effects: a killed run goes on from its last one, and what came after is repeated, bit for bit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from silva.config.schema import RunConfig
from silva.evaluation.evaluator import Evaluation, records, rollout_rows
from silva.monitoring.monitor import Monitor
from silva.orchestrator import metrics
from silva.orchestrator.evaluations import compared, fallen, stalled
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.phases import Phases
from silva.orchestrator.saving import save_checkpoint
from silva.orchestrator.state import Batches, RunState
from silva.orchestrator.supervised import Supervision, held_out_loss
from silva.protocols import Engine, Trainer
from silva.signals import Interrupted
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger
from silva.types import Sample


@dataclass(frozen=True)
class SupervisedParts:
    """What the loop joins.

    held_out: rows whose loss is measured; there may be none.
    evaluate: plays the held-out tasks; None where there are none.
    patience: evaluations in a row without a better one that end the run; 0: it is never ended so.
    learnt: whether the policy needs no more after a step.
    """

    config: RunConfig
    trainer: Trainer
    engine: Engine
    batches: Batches
    how: Supervision
    held_out: Sequence[Sample]
    evaluate: Callable[[str], Awaitable[list[Evaluation]]] | None
    ledger: Ledger
    store: CheckpointStore
    monitor: Monitor
    phases: Phases
    patience: int = 0
    learnt: Callable[[int], Awaitable[bool]] | None = None


class SupervisedLoop:
    """Runs `parts` from `state` to the last step; `state` is where the run stands after each whole step."""

    def __init__(self, parts: SupervisedParts, state: RunState) -> None:
        self.parts, self.state = parts, state
        self._saved: RunState | None = None  # that of the newest checkpoint written by this process
        if "batches" in state.parts:
            parts.batches.load(state.parts["batches"])
            parts.phases.load(state.parts["seconds"])

    async def run(self, begun: Callable[[], None] = lambda: None) -> RunState:
        """Train to the last step; `begun` is called when a step is done.

        Raises:
            Interrupted: after Ctrl-C, with a checkpoint of the last whole step on disk.
        """
        p, every = self.parts, self.parts.config.eval.every
        with Interrupt() as interrupt:
            try:
                await self._begin(interrupt)
                while not self.state.ended and not stalled(self.state, p.patience, every):
                    await self._step(interrupt)
                    begun()
                    interrupt.check()
            except Interrupted:
                await self.save()
                raise
        if stalled(self.state, p.patience, every):
            p.monitor.message(
                f"stopped after step {self.state.step} of {p.how.steps}: {p.patience} evaluations in a row "
                f"were not better than that at step {self.state.best_step} (data.early_stop)"
            )
        elif self.state.step < p.how.steps:
            p.monitor.message(
                f"stopped after step {self.state.step} of {p.how.steps}: the policy succeeds often enough "
                "(warm_start.stop_success)"
            )
        await self.save()
        return self.state

    async def _begin(self, interrupt: Interrupt) -> None:
        """The evaluation before training, or the one an interrupt cut short."""
        p, state = self.parts, self.state
        p.monitor.stage("start")
        if state.pending is not None:
            await self._finish_step(state.pending, interrupt)
        elif state.eval_before is None:
            evaluations = await interrupt.during(self._evaluate(0))
            before = records(evaluations)
            self.state = state.replace(eval_before=before, eval_last=before, parts=self._parts())
            if evaluations:
                p.monitor.step(0, metrics.eval_metrics(evaluations) | metrics.perf_metrics(p.phases.step))

    async def _step(self, interrupt: Interrupt) -> None:
        p, step = self.parts, self.state.step + 1
        p.phases.step.clear()
        with p.phases("rows"):
            rows = await interrupt.during(p.batches.draw(step))
        with p.phases("train"):
            p.monitor.stage("train", step, p.how.steps)
            found = await p.how.update(p.trainer, rows, self.state.updates) if rows else {}
            ended = step == p.how.steps or (p.learnt is not None and await p.learnt(step))
        tokens = sum(map(len, rows))
        self.state = self.state.replace(
            step=step,
            ended=ended,
            ledger=p.ledger.position,
            parts=self._parts(),
            tokens_in_rows=self.state.tokens_in_rows + tokens,
            tokens_trained=self.state.tokens_trained + int(found.get("trained_tokens", 0)),
            steps_trained=self.state.steps_trained + bool(found),
            updates=self.state.updates + bool(found),
            pending={f"train/{name}": value for name, value in found.items()}
            | {"train/rows": float(len(rows)), "train/tokens": float(tokens)}
            | metrics.perf_metrics(p.phases.step),
        )
        await self._finish_step(self.state.pending or {}, interrupt)

    async def _finish_step(self, pending: dict[str, float], interrupt: Interrupt) -> None:
        """Evaluate when due, log the step, save when due."""
        p, config, step = self.parts, self.parts.config, self.state.step
        best, warning, every = False, "", config.eval.every
        if self.state.ended or (every and step % every == 0):
            evaluations = await interrupt.during(self._evaluate(step))
            pending = pending | metrics.eval_metrics(evaluations)
            pending |= {f"perf/seconds/{name}": p.phases.step[name] for name in ("validation", "eval")}
            warning = fallen(self.state, records(evaluations), p.how.steps, p.store.path)
            self.state, best = compared(self.state, evaluations)
        self.state = self.state.replace(pending=None, parts=self._parts())
        p.monitor.step(step, pending)
        if warning:
            p.monitor.message(warning, "warning")
        keep, every = best and config.checkpoint.keep_best, config.checkpoint.every
        if keep or (every and step % every == 0):
            await self.save()
        if keep:
            p.store.mark_best(step)

    async def _evaluate(self, step: int) -> list[Evaluation]:
        """Of the policy as it is now, on held-out rows and held-out tasks."""
        p, evaluations = self.parts, list[Evaluation]()
        if p.held_out:
            with p.phases("validation"):
                p.monitor.stage("validation")
                evaluations.append(await held_out_loss(p.trainer, p.held_out))
        if p.evaluate:
            await p.engine.load(await p.trainer.publish())
            p.monitor.stage("eval", 0, 0)
            evaluations += await p.evaluate(f"evaluation at step {step}")
            p.monitor.rollouts(step, rollout_rows(step, evaluations))
        return evaluations

    def _parts(self) -> dict[str, object]:
        return {"batches": self.parts.batches.state(), "seconds": self.parts.phases.state()}

    async def save(self) -> None:
        """A checkpoint of the last whole step, unless this process has just written it."""
        p = self.parts
        if self._saved == self.state:
            return
        with p.phases("checkpoint"):
            p.monitor.stage("checkpoint")
            await save_checkpoint(p.store, p.ledger, p.trainer, self.state, {})
        self._saved = self.state

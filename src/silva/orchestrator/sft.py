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
from typing import Any

from silva.config.schema import RunConfig
from silva.evaluation.evaluator import Evaluation, rollout_rows
from silva.monitoring.monitor import Monitor
from silva.orchestrator import metrics
from silva.orchestrator.ending import StepEnd
from silva.orchestrator.evaluations import stalled
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.phases import Phases
from silva.orchestrator.probe import WeightSync
from silva.orchestrator.state import Batches, RunState
from silva.orchestrator.supervised import Supervision, held_out_loss
from silva.protocols import Trainer
from silva.signals import Interrupted
from silva.storage.checkpoints import CheckpointStore
from silva.storage.ledger import Ledger
from silva.types import Sample


@dataclass(frozen=True)
class SupervisedParts:
    """What the loop joins.

    held_out: rows whose loss is measured; there may be none.
    evaluate: plays the held-out tasks; None if there are none.
    patience: evaluations in a row without a better one that end the run; 0: it is never ended so.
    learnt: whether the policy needs no more after a step.
    """

    config: RunConfig
    sync: WeightSync
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

    @property
    def trainer(self) -> Trainer:
        return self.sync.trainer

    @property
    def steps(self) -> int:
        return self.how.steps

    def state(self) -> dict[str, Any]:
        return {"batches": self.batches.state(), "seconds": self.phases.state()}


class SupervisedLoop:
    """Runs `parts` from `state` to the last step; `state` is where the run stands after each whole step."""

    def __init__(self, parts: SupervisedParts, state: RunState) -> None:
        self.parts, self.state = parts, state
        self._end = StepEnd(parts, self._evaluate, timed=("validation", "eval"))
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
                self.state = await self._end.begin(self.state, interrupt)
                while not self.state.ended and not stalled(self.state, p.patience, every):
                    await self._step(interrupt)
                    begun()
                    interrupt.check()
            except Interrupted:
                await self._end.save(self.state)
                raise
        if stalled(self.state, p.patience, every):
            p.monitor.message(
                f"stopped after step {self.state.step} of {p.steps}: {p.patience} evaluations in a row "
                f"were not better than that at step {self.state.best_step} (data.early_stop)"
            )
        elif self.state.step < p.steps:
            p.monitor.message(
                f"stopped after step {self.state.step} of {p.steps}: the policy succeeds often enough "
                "(warm_start.stop_success)"
            )
        await self._end.save(self.state)
        return self.state

    async def _step(self, interrupt: Interrupt) -> None:
        p, step = self.parts, self.state.step + 1
        p.phases.step.clear()
        with p.phases("rows"):
            rows = await interrupt.during(p.batches.draw(step))
        with p.phases("train"):
            p.monitor.stage("train", step, p.steps)
            found = await p.how.update(p.trainer, rows, self.state.updates) if rows else {}
            ended = step == p.steps or (p.learnt is not None and await p.learnt(step))
        tokens = sum(map(len, rows))
        self.state = self.state.replace(
            step=step,
            ended=ended,
            ledger=p.ledger.position,
            parts=p.state(),
            tokens_in_rows=self.state.tokens_in_rows + tokens,
            tokens_trained=self.state.tokens_trained + int(found.get("trained_tokens", 0)),
            steps_trained=self.state.steps_trained + bool(found),
            updates=self.state.updates + bool(found),
            pending=metrics.mean_of_updates([found])
            | {"train/rows": float(len(rows)), "train/tokens": float(tokens)}
            | p.batches.metrics()
            | metrics.perf_metrics(p.phases.step, updates=[found]),
        )
        self.state = await self._end.finish(self.state, interrupt)

    async def _evaluate(self, step: int) -> list[Evaluation]:
        """Evaluate the policy as it is now on held-out rows and held-out tasks."""
        p, evaluations = self.parts, list[Evaluation]()
        if p.held_out:
            with p.phases("validation"):
                p.monitor.stage("validation")
                evaluations.append(await held_out_loss(p.trainer, p.held_out))
        if p.evaluate:
            await p.sync.publish()
            p.monitor.stage("eval", 0, 0)
            evaluations += await p.evaluate(f"evaluation at step {step}")
            p.monitor.rollouts(step, rollout_rows(step, evaluations))
        return evaluations

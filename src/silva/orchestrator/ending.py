"""How a step ends in both loops: it is evaluated when due, logged, and saved when due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silva.evaluation.evaluator import Evaluation, records
from silva.orchestrator import metrics
from silva.orchestrator.evaluations import compared, fallen
from silva.orchestrator.interrupt import Interrupt
from silva.orchestrator.state import RunState
from silva.storage.checkpoints import Writer

if TYPE_CHECKING:
    from silva.orchestrator.parts import Parts
    from silva.orchestrator.sft import SupervisedParts


class StepEnd:
    """Takes the state of a loop at the end of a step, and gives it back evaluated and saved.

    Args:
        evaluate: the policy as it is at a step.
        timed: phases of an evaluation, whose seconds are metrics of the step.
        others: files of a checkpoint beside those of trainer and loop.
    """

    def __init__(
        self,
        parts: Parts | SupervisedParts,
        evaluate: Callable[[int], Coroutine[Any, Any, list[Evaluation]]],
        timed: Sequence[str] = ("eval",),
        others: Callable[[], Mapping[str, Writer]] = dict,
    ) -> None:
        self.parts, self._evaluate, self._timed, self._others = parts, evaluate, timed, others
        self._saved: RunState | None = None  # that of the newest checkpoint written by this process

    async def begin(self, state: RunState, interrupt: Interrupt) -> RunState:
        """The evaluation before training, or the one an interrupt cut short."""
        p = self.parts
        p.monitor.stage("start")
        if state.best_step == state.step and p.config.checkpoint.keep_best:
            p.store.mark_best(state.step)  # killed between the checkpoint and its mark
        if state.pending is not None:
            return await self.finish(state, interrupt)
        if state.eval_before is not None:
            return state
        evaluations = await interrupt.during(self._evaluate(0))
        before = records(evaluations)
        if evaluations:
            p.monitor.step(0, metrics.eval_metrics(evaluations) | metrics.perf_metrics(p.phases.step))
        return state.replace(eval_before=before, eval_last=before, parts=p.state())

    async def finish(self, state: RunState, interrupt: Interrupt) -> RunState:
        """The state after a step whose numbers are `state.pending`."""
        p, config, step, pending = self.parts, self.parts.config, state.step, state.pending or {}
        best, warning, every = False, "", config.eval.every
        if state.ended or step == p.steps or (every and step % every == 0):
            evaluations = await interrupt.during(self._evaluate(step))
            pending = pending | metrics.eval_metrics(evaluations)
            pending |= {f"perf/seconds/{name}": p.phases.step[name] for name in self._timed}
            warning = fallen(state, records(evaluations), p.steps, p.store.path)
            state, best = compared(state, evaluations)
        state = state.replace(pending=None, parts=p.state())
        p.monitor.step(step, pending)
        if warning:
            p.monitor.message(warning, "warning")
        keep, every = best and config.checkpoint.keep_best, config.checkpoint.every
        if keep or (every and step % every == 0):
            await self.save(state)
        if keep:
            p.store.mark_best(step)
        return state

    async def save(self, state: RunState) -> None:
        """A checkpoint, unless this process has just written it; in a thread: the parts stay alive."""
        p, loop = self.parts, asyncio.get_running_loop()
        if self._saved == state:
            return

        def of_trainer(path: Path) -> None:
            asyncio.run_coroutine_threadsafe(p.trainer.save(path), loop).result()

        with p.phases("checkpoint"):
            p.monitor.stage("checkpoint")
            files: dict[str, Writer] = {"trainer": of_trainer, "state.json": state.encode(), **self._others()}
            await asyncio.to_thread(p.store.save, state.step, files, {"ledger": state.ledger})
            p.ledger.record("checkpoint", step=state.step, position=state.ledger)
            p.ledger.commit()
        self._saved = state

"""`silva sft`: only the warm start of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.assembly import connected
from silva.commands.checks import check_engine
from silva.commands.common import as_resolved, explained, export, measure, opened, warm_start
from silva.commands.outcome import Outcome, finish
from silva.config.diff import forbidden_changes
from silva.config.inputs import input_files
from silva.config.load import Resolved
from silva.config.saved import to_toml
from silva.errors import ConfigError
from silva.evaluation.evaluator import records
from silva.monitoring.monitor import Monitor
from silva.orchestrator import held_out
from silva.orchestrator.activity import Activity
from silva.orchestrator.interrupt import Interrupted
from silva.orchestrator.metrics import eval_metrics
from silva.orchestrator.phases import Phases
from silva.orchestrator.state import RunState
from silva.rollouts.actors import Policy
from silva.storage.ledger import Ledger
from silva.storage.run_folder import RunFolder


def supervise(config: str | Path | Mapping[str, Any] | Resolved, *, overwrite: bool = False) -> Outcome:
    """Only the warm start of a configuration: scripted play imitated, evaluated, exported.

    Raises:
        ConfigError: the configuration has no [warm_start].
    """
    resolved = as_resolved(config)
    check_engine(resolved.config)
    if resolved.config.warm_start is None:
        raise ConfigError("sft: the configuration has no [warm_start], so there is nothing to imitate")
    path = Path(resolved.config.output_dir) / resolved.config.name
    with (
        RunFolder.open(
            path,
            resume=False,
            overwrite=overwrite,
            config=resolved.data,
            may_change=forbidden_changes,
            files=input_files(resolved.data),
        ) as run,  # fmt: skip
        explained(run, "start again with --overwrite"),
    ):
        try:
            return asyncio.run(_supervise(resolved, run))
        except Interrupted:  # nothing of it is kept
            raise KeyboardInterrupt from None


async def _supervise(resolved: Resolved, run: RunFolder) -> Outcome:
    config = resolved.config
    ledger = Ledger.create(run.ledger)
    run.save_config(to_toml(resolved), resolved.data)
    phases = Phases()
    with Monitor(run.path, config.monitoring, name=config.name, total_steps=1) as monitor:
        async with opened(config, monitor, phases) as assembly:
            held_out.record(run.path, assembly.tasksets)
            run.note_machine(assembly.engine.machine)
            policy = Policy(assembly.engine, assembly.renderer, config.eval.sampling)
            activity = Activity(monitor)
            before = await measure(assembly, policy, activity, phases)
            monitor.step(0, eval_metrics(before))
            trainer = await connected(assembly.trainer())
            done = await warm_start(assembly, trainer, activity, phases, ledger)
            await assembly.engine.load(await trainer.publish())
            after = await measure(assembly, policy, activity, phases)
            monitor.step(1, eval_metrics(after))
            weights = run.weights / "step_0"
            run.begun()
            await export(trainer, weights)
            state = RunState(
                steps_trained=done.steps, tokens_in_rows=done.tokens_in_rows,
                tokens_trained=done.tokens_trained,
                eval_before=records(before), eval_last=records(after),
            )  # fmt: skip
            return finish(assembly, state, phases, run, monitor, weights)

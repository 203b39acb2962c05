"""`silva sft`: only the warm start of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silva.assembly import connected
from silva.commands.checks import check_engine
from silva.commands.common import as_resolved
from silva.commands.outcome import RunOutcome, finish
from silva.config.load import Resolved
from silva.errors import ConfigError
from silva.evaluation.evaluator import records
from silva.orchestrator.metrics import eval_metrics
from silva.run import claimed, opened
from silva.signals import Interrupted
from silva.storage.run_folder import RunFolder


def supervise(config: str | Path | Mapping[str, Any] | Resolved, *, overwrite: bool = False) -> RunOutcome:
    """Only the warm start of a configuration: scripted play imitated, evaluated, exported.

    Raises:
        ConfigError: the configuration has no [warm_start].
    """
    resolved = as_resolved(config)
    check_engine(resolved.config)
    if resolved.config.warm_start is None:
        raise ConfigError("sft: the configuration has no [warm_start], so there is nothing to imitate")
    with claimed(resolved, "start again with --overwrite", overwrite=overwrite) as folder:
        try:
            return asyncio.run(_supervise(resolved, folder))
        except Interrupted:  # nothing of it is kept
            raise KeyboardInterrupt from None


async def _supervise(resolved: Resolved, folder: RunFolder) -> RunOutcome:
    async with opened(resolved, folder, steps=1) as run:
        before = await run.measure()
        run.monitor.step(0, eval_metrics(before))
        trainer = await connected(run.assembly.trainer())
        done = await run.warm_start(trainer)
        await run.assembly.engine.load(await trainer.publish())
        after = await run.measure()
        run.monitor.step(1, eval_metrics(after))
        folder.begun()
        weights = await run.export(trainer, 0)
        state = run.state.replace(
            steps_trained=done.steps, tokens_in_rows=done.tokens_in_rows, tokens_trained=done.tokens_trained,
            eval_before=records(before), eval_last=records(after),
        )  # fmt: skip
        return finish(run, state, weights)

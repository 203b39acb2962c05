"""`silva sft`: supervised training on the dialogues of [data], or on the scripted play of [warm_start]."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from silva.assembly import connected
from silva.commands.checks import check_engine, check_ranks, check_trained
from silva.commands.common import as_resolved
from silva.commands.outcome import RunOutcome, earlier, finish, stopped
from silva.config.load import Resolved
from silva.config.schema import RunConfig
from silva.data.supervised import SupervisedStream
from silva.errors import ConfigError
from silva.orchestrator.scripted import ScriptedPlay
from silva.orchestrator.sft import SupervisedLoop, SupervisedParts
from silva.orchestrator.state import Batches
from silva.orchestrator.supervised import DataBatches, Supervision, supervised_sample
from silva.ports import derive
from silva.rendering.renderer import Renderer
from silva.run import Run, claimed, opened
from silva.signals import Interrupted
from silva.storage.run_folder import RunFolder
from silva.types import LossSpec, Sample


def supervise(
    config: str | Path | Mapping[str, Any] | Resolved,
    *,
    resume: bool = False,
    overwrite: bool = False,
    accept_files: bool = False,
) -> RunOutcome:
    """Supervised training from a TOML file, a table of keys, or a resolved configuration.

    Raises:
        ConfigError: the configuration has neither [data] nor [warm_start], or both.
        Interrupted: after Ctrl-C (KeyboardInterrupt if there is nothing to save, or after the second).
    """
    resolved = as_resolved(config)
    check_supervised(resolved.config)
    with claimed(
        resolved, "--resume goes on", resume=resume, overwrite=overwrite, accept_files=accept_files
    ) as folder:
        return earlier(folder) or asyncio.run(_supervise(resolved, folder))


def check_supervised(config: RunConfig) -> None:
    """Refuse at the start what cannot be done.

    Raises:
        CapabilityError, ConfigError: with the key to change.
    """
    check_engine(config)
    check_ranks(config)
    if (config.data is None) == (config.warm_start is None):
        got = "neither" if config.data is None else "both"
        raise ConfigError(f"silva sft: got {got} of [data] and [warm_start], expected one to learn from")
    if config.data:
        _check_stop(config)
    else:
        check_trained(config)


def _check_stop(config: RunConfig) -> None:
    """Refuse an early stop that nothing decides."""
    data, every = config.data, config.eval.every
    if data.early_stop and not (every and (data.validation or data.validation_path or config.environments)):
        raise ConfigError(
            f"data.early_stop = {data.early_stop}: counts evaluations, of which none comes before the last "
            "step; expected eval.every above 0, and data.validation, data.validation_path or [[environments]]"
        )


async def _supervise(resolved: Resolved, folder: RunFolder) -> RunOutcome:
    config = resolved.config
    known = config.warm_start.steps if config.warm_start else 0 if config.data.epochs else config.steps
    async with opened(resolved, folder, steps=known) as run:
        try:
            loop = await _prepare(run)
            state = await loop.run(folder.begun)
            if isinstance(loop.parts.batches, ScriptedPlay):
                run.imitated(loop.parts.batches)
            elif isinstance(loop.parts.batches, DataBatches) and loop.parts.batches.left_out:
                run.monitor.message(f"data: {loop.parts.batches.left_out}")
            return finish(run, state, await run.export(loop.parts.trainer, state.step))
        except Interrupted:
            stopped(run, "begins again")
            raise


async def _prepare(run: Run) -> SupervisedLoop:
    """The loop with everything in it; its weights are restored if the run goes on."""
    assembly, config = run.assembly, run.config
    batches, how, held_out = _data(run) if config.data else _scripted(run)
    if config.data and config.data.epochs:
        run.monitor.expect(how.steps)
    run.monitor.stage("open the trainer")
    trainer = await connected(assembly.trainer())
    sync = assembly.sync(trainer)
    if run.checkpoint is not None:
        await trainer.load(run.checkpoint / "trainer")
    parts = SupervisedParts(
        config=config,
        sync=sync,
        batches=batches,
        how=how,
        held_out=held_out,
        evaluate=run.measure if config.environments else None,
        ledger=run.ledger,
        store=run.store,
        monitor=run.monitor,
        phases=run.phases,
        patience=config.data.early_stop if config.data else 0,
        learnt=partial(batches.learnt, sync) if isinstance(batches, ScriptedPlay) else None,
    )
    return SupervisedLoop(parts, run.state)


def supervised_stream(config: RunConfig, renderer: Renderer) -> SupervisedStream:
    """The rows of [data] in the order of the run."""
    return SupervisedStream(config.data, renderer, derive(config.seed, "data"))


def data_batches(run: Run, *, beside: bool = False) -> DataBatches:
    """The batches of [data]; people are told how its rows are read."""
    run.monitor.stage("read the data")
    stream = supervised_stream(run.config, run.assembly.renderer)
    for note in stream.notes:
        run.monitor.message(note)
    return DataBatches(stream, run.config.data, beside=beside)


def _data(run: Run) -> tuple[Batches, Supervision, list[Sample]]:
    config, data, batches = run.config, run.config.data, data_batches(run)
    stream = batches.stream
    how = Supervision(
        stream.steps(data.dialogues_per_step, data.epochs) if data.epochs else config.steps,
        config.trainer.optimizer,
        LossSpec("cross_entropy", {"weighting": data.weighting}),
        data.aggregation,
    )
    held_out = [supervised_sample(row, f"validation/{i}") for i, row in enumerate(stream.validation())]
    return batches, how, held_out


def _scripted(run: Run) -> tuple[Batches, Supervision, list[Sample]]:
    warm = run.config.warm_start
    assert warm is not None
    return run.assembly.scripted(run.activity), Supervision(warm.steps, warm.optimizer), []

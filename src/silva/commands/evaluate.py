"""`silva eval`: held-out evaluation of a model, of a run's weights, or of scripted play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from silva.actors.policy import Policy
from silva.actors.script import Script
from silva.assembly import Assembly
from silva.commands.common import here
from silva.config.schema import RunConfig
from silva.config.sections import PretrainedModel
from silva.errors import ConfigError, NoSignalError
from silva.evaluation.evaluator import Evaluation, records
from silva.models.sources import pinned, run_of
from silva.monitoring.printable import printable, put
from silva.orchestrator.evaluations import held_out_changes
from silva.protocols import Actor
from silva.rendering.renderer import Renderer
from silva.run import loaded, say


def evaluate_config(
    config: RunConfig, *, policy: str = "model", weights: str | None = None
) -> list[Evaluation]:
    """Held-out evaluation of the model (or of `weights`), or of scripted play.

    Args:
        policy: model, expert or random: who plays.
        weights: a run's folder or a model folder in place of `[model]`.
    """
    config = here(config)  # services hold weights of their own
    if weights is not None:
        config = config.model_copy(update={"model": PretrainedModel(name=pinned(weights))})
        if config.engine.remote:
            raise ConfigError(
                f'--weights with engine.type = "{config.engine.type}": its servers have weights of their '
                'own; expected engine.type = "local"'
            )
    if config.engine.only_evaluates:
        if policy == "model":
            return asyncio.run(_evaluate_service(config))
        usual = type(config).model_fields["engine"].default  # scripted play samples nothing
        config = config.model_copy(update={"engine": usual})
    return asyncio.run(_evaluate(config, policy, run_of(weights)[0] if weights else None))


def report(evaluations: Sequence[Evaluation], *, as_json: bool) -> int:
    """Print them; the exit code says whether anything was measured."""
    rows = records(evaluations)
    if as_json:
        put(json.dumps(rows, indent=1))
    else:
        print_table(rows)
        for evaluation in evaluations:
            for note in evaluation.notes():
                put(note)
    return 0 if any(each.estimates for each in evaluations) else NoSignalError.exit_code


def print_table(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Rows of an evaluation, and under them what the episodes left out could change."""
    console = console or Console()

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def interval(row: Mapping[str, Any], key: str) -> str:
        return f"[{number(row[f'{key}_low'])}, {number(row[f'{key}_high'])}]"

    table, lines = Table("environment", "metric", "mean", "95 % interval", "n"), []
    for row in rows:
        name, known = printable(row["environment"]), row["ci_low"] is not None or row["mean"] is None
        table.add_row(name, printable(row["metric"]), number(row["mean"]),
                      interval(row, "ci") if known else "all equal", str(row["n"]))  # fmt: skip
        if row["left_out"]:
            lines.append(
                f"{name} {row['metric']}: {interval(row, 'bound')} with the {row['left_out']} left out"
            )
    console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


async def _evaluate(config: RunConfig, policy: str, run: Path | None) -> list[Evaluation]:
    console = Console(stderr=True)
    with loaded(config) as assembly:
        await assembly.connect()
        changes = held_out_changes(run, assembly.tasksets, config.eval.tasks) if run else []
        for note in (*assembly.data_notes, *assembly.notes, *changes):
            say(note, console)
        actor: Actor
        if policy == "model":
            actor = Policy(assembly.engine, assembly.renderer, config.eval.sampling)
        else:
            actor = Script(assembly.renderer, mistakes=float(policy == "random"))
        return await _play(assembly, actor, assembly.renderer, console)


async def _evaluate_service(config: RunConfig) -> list[Evaluation]:
    """Of a model behind an API: no model and no tokenizer is loaded here."""
    console, assembly = Console(stderr=True), Assembly(config)
    try:
        actor = config.engine.actor(assembly, config.eval.sampling)
        for note in assembly.data_notes:
            say(note, console)
        try:
            await actor.reach()
            return await _play(assembly, actor, None, console)
        finally:
            for note in actor.notes:
                say(note, console)
            await actor.close()
    finally:
        assembly.close()


async def _play(
    assembly: Assembly, actor: Actor, renderer: Renderer | None, console: Console
) -> list[Evaluation]:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("evaluating")
        return await assembly.evaluate(
            actor, renderer, lambda done, total, label: progress.update(bar, completed=done, total=total)
        )

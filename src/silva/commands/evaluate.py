"""`silva eval`: held-out evaluation of models, of a run's weights, of an API's model, or of scripted play.

    asked ──> jobs ──> evals/NAME, with what is finished ──> play what is missing ──> rows ──> summary, report

Not here: what the command line means (asked.py), the numbers, and how the folder is kept
(evaluation/store.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from silva.commands.asked import EvalRequest
from silva.commands.common import here
from silva.commands.kept import EVALS
from silva.commands.playing import kept, parts, play_missing, read_tasks
from silva.config.saved import to_toml
from silva.config.schema import RunConfig
from silva.errors import NoSignalError
from silva.evaluation.evaluator import Evaluation, jobs_of
from silva.evaluation.store import EvalFolder, free_name, identity, writing_to
from silva.evaluation.summary import Series, contents_of, evaluations_of, results, summary
from silva.monitoring.printable import printable, put
from silva.monitoring.report import Decode, write_report
from silva.monitoring.sinks.outlets import Outlets
from silva.orchestrator.evaluations import held_out_changes
from silva.orchestrator.metrics import eval_metrics
from silva.ports import FILES
from silva.run import say
from silva.storage.metrics import append_metrics


def evaluate(asked: EvalRequest) -> Series:
    """Play what is missing of an evaluation, and write its files; its numbers by step of the weights."""
    console, config = Console(stderr=True), here(asked.config)
    tasksets = read_tasks(config, console)
    jobs, steps = jobs_of(tasksets, config.eval), list(asked.models)
    this = identity(asked.resolved.data, models=asked.names, model=asked.model, weights=asked.weights,
                    files=asked.files, policy=asked.policy, jobs=jobs)  # fmt: skip
    given = asked.resolved.provenance
    usual = asked.usual_name if asked.overwrite else free_name(EVALS, asked.usual_name, this, given)
    path, toml = EVALS / (asked.name or usual), to_toml(asked.resolved)
    with EvalFolder.open(path, this, toml, overwrite=asked.overwrite, given=given) as store:
        missing = {step: count for step in steps if (count := store.missing(step, jobs))}
        total, decode = len(jobs) * len(steps), None
        if store.read_only:
            missing = {}
            say(f"{path}: it was finished before, and nothing may be written there: as it is", console)
        elif not missing and store.finished:
            say(f"{path}: it was finished before, so nothing is played; --overwrite plays it again", console)
        else:
            if sum(missing.values()) < total:
                say(
                    f"{path}: goes on, with {total - sum(missing.values())} of {total} episodes kept", console
                )
            with kept(store, steps, jobs, console):
                for note in held_out_changes(asked.run, tasksets, config.eval.tasks) if asked.run else ():
                    say(note, console)
                configs = {step: here(asked.config_of(step)) for step in missing}
                decode = asyncio.run(play_missing(jobs, configs, asked.policy, config.eval.sampling, tasksets,
                                                  store, console))  # fmt: skip
        rows = store.in_order(steps, jobs)
        series = evaluations_of(rows, config)
        if missing or not store.finished:
            tasks = contents_of(jobs)
            whole = summary(path.name, series, asked.names, config=config, spent=store.spent, tasks=tasks)
            store.write(rows, whole)
            write_shown(config, store, series, decode, console)
            store.done()
            written = [each.name for each in (store.episodes, store.summary, store.report) if each.exists()]
            say(f"{path}: {', '.join(written)}", console)
    return series


def evaluate_config(config: RunConfig, *, policy: str = "model") -> list[Evaluation]:
    """Evaluate one model and write no file.

    Args:
        policy: model, expert or random: who plays.
    """
    config, console = here(config), Console(stderr=True)

    async def play() -> list[Evaluation]:
        async with parts(config, policy, None, config.eval.sampling, console) as (
            assembly, actor, renderer, _,
        ):  # fmt: skip
            return await assembly.evaluate(actor, renderer, lambda done, total, label: None)

    return asyncio.run(play())


def report(series: Series, asked: EvalRequest, *, as_json: bool) -> int:
    """Print the numbers; the exit code says whether anything was measured."""
    rows = results(series, asked.names)
    if as_json:
        put(json.dumps(rows, indent=1))
    else:
        print_table(rows, samples=asked.config.eval.samples_per_task)
        for step, found in series.items():
            for evaluation in found:
                for note in evaluation.notes():
                    put(f"step {step}: {note}" if len(series) > 1 else note)
    measured = any(each.estimates for found in series.values() for each in found)
    return 0 if measured else NoSignalError.exit_code


def print_table(
    rows: Sequence[Mapping[str, Any]], console: Console | None = None, *, samples: int = 1
) -> None:
    """Rows of an evaluation, and under them what the episodes left out could change. Of a series, one row a
    step."""
    console = console or Console()
    steps = list(dict.fromkeys(row.get("step", 0) for row in rows))
    console.print(_of_series(rows, steps, samples) if len(steps) > 1 else _of_one(rows, samples))
    for row in rows:
        if row["bound_low"] is not None and row["left_out"]:
            of = f"step {row['step']}: " if len(steps) > 1 else ""
            line = (
                f"{of}{printable(row['environment'])} {printable(row['metric'])}: {_interval(row, 'bound')}"
            )
            console.print(f"{line} with the {row['left_out']} left out", markup=False, highlight=False,
                          soft_wrap=True)  # fmt: skip


def _of_one(rows: Sequence[Mapping[str, Any]], samples: int) -> Table:
    table = Table("environment", "metric", "mean", "95 % interval", "n")
    for row in rows:
        known = row["ci_low"] is not None or row["mean"] is None
        table.add_row(printable(row["environment"]), _metric(row, samples), _number(row["mean"]),
                      _interval(row, "ci") if known else "all equal", str(row["n"]))  # fmt: skip
    return table


def _of_series(rows: Sequence[Mapping[str, Any]], steps: Sequence[int], samples: int) -> Table:
    several = len({row["environment"] for row in rows}) > 1
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        column = (
            f"{printable(row['environment'])} {_metric(row, samples)}" if several else _metric(row, samples)
        )
        interval = f" {_interval(row, 'ci')}" if row["ci_low"] is not None else ""
        cells.setdefault(column, {})[row["step"]] = _number(row["mean"]) + interval
    table = Table("step", *cells)
    for step in steps:
        table.add_row(str(step), *(column.get(step, "-") for column in cells.values()))
    return table


def _metric(row: Mapping[str, Any], samples: int) -> str:
    mean = f" (avg@{samples})" if samples > 1 and row["metric"] == "success" else ""
    return printable(row["metric"]) + mean


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(row: Mapping[str, Any], key: str) -> str:
    return f"[{_number(row[f'{key}_low'])}, {_number(row[f'{key}_high'])}]"


def write_shown(
    config: RunConfig, store: EvalFolder, series: Series, decode: Decode | None, console: Console
) -> None:
    """What only shows the rows: metrics and TensorBoard by step, and the page with every transcript."""
    with writing_to(store.path):
        _write_shown(config, store, series, decode, partial(say, console=console))


def _write_shown(
    config: RunConfig,
    store: EvalFolder,
    series: Series,
    decode: Decode | None,
    complain: Callable[[str], None],
) -> None:
    for path in (store.metrics, store.tensorboard):
        FILES.remove_tree(path)
    sinks = Outlets(config.monitoring.model_copy(update={"sinks": ()}))
    sinks.open(store, store.path.name, {}, None, lambda text, level: complain(text))
    for step, found in series.items():
        metrics = eval_metrics(found)
        append_metrics(store.metrics, step, metrics)
        sinks.step(step, metrics)
    sinks.close(finished=True)
    if config.monitoring.report:
        write_report(store.path, decode)

"""`silva monitor`: what a run has come to, in the terminal: its numbers, its warnings, its worst episodes."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silva.commands.command import Given
from silva.errors import ConfigError, RecordError, RunFolderError
from silva.monitoring import wandb_runs
from silva.monitoring.followed import Followed, ListedRun, from_folder, runs_in
from silva.monitoring.numbers import LAST, numbers
from silva.monitoring.plots import write_plots
from silva.monitoring.printable import put

RUNS = Path("runs")
NUM_RUNS, MAX_SAMPLES, THRESHOLD = 10, 5, 0.5
Row = Mapping[str, Any]


def run(given: Given) -> int:
    given.only(1, "one run, or with --list one folder of runs")
    word = given.rest[0] if given.rest else ""
    if "--list" in given:
        return _list(word, _count(given, "--num-runs", NUM_RUNS), as_json="--json" in given)
    if "--num-runs" in given:
        raise ConfigError("--num-runs: it goes with --list")
    if "--metrics-only" in given and "--samples-only" in given:
        raise ConfigError("--metrics-only and --samples-only: got both, expected one")
    followed = find(word)
    samples, rows = list[Row](), list[dict[str, Any]]()
    if "--metrics-only" not in given:
        most, below = (
            _count(given, "--max-samples", MAX_SAMPLES),
            _number(given, "--reward-threshold", THRESHOLD),
        )
        samples = list(itertools.islice(failed(followed.samples, below), most))
    if "--samples-only" not in given:
        rows = numbers(followed.rows)
    plots = _plots(given, followed)
    if "--json" in given:
        found = {"name": followed.name, "state": followed.state, "metrics": rows, "samples": samples,
                 "warnings": [*followed.warnings], "plots": [str(path) for path in plots]}  # fmt: skip
        put(json.dumps(found, indent=1))
        return 0
    if "--samples-only" not in given:
        _show_numbers(followed, rows)
    if "--metrics-only" not in given:
        _show_samples(samples)
    if plots:
        put(f"{len(plots)} plots in {plots[0].parent}")
    return 0


def find(word: str) -> Followed:
    """The run that a word names: a folder, a name in runs/, W&B's files, or wandb:ENTITY/PROJECT/RUN; "" is
    the run in runs/ that changed last."""
    if word.startswith(wandb_runs.PREFIX):
        return _asked(lambda: wandb_runs.online(word.removeprefix(wandb_runs.PREFIX)), word)
    if not word:
        newest = runs_in(RUNS)
        if not newest:
            raise ConfigError(
                f"silva monitor: got no run, and there is none in {RUNS}/; expected a run's folder"
            )
        return from_folder(RUNS / newest[0].name)
    path = next((path for path in (Path(word).expanduser(), RUNS / word) if path.exists()), None)
    if path is None:
        raise ConfigError(
            f"silva monitor: got {word}, which is no folder, no run in {RUNS}/ and no "
            f"wandb:ENTITY/PROJECT/RUN"
        )
    file = wandb_runs.offline_file(path)
    return wandb_runs.offline(file) if file else from_folder(path)


def failed(samples: Iterable[Row], below: float) -> Iterable[Row]:
    """Those that have no result, or a raw reward below `below`."""
    return (row for row in samples if row["status"] == "failed" or row["reward"] < below)


def _list(word: str, most: int, *, as_json: bool) -> int:
    if word.startswith(wandb_runs.PREFIX):
        project = word.removeprefix(wandb_runs.PREFIX)
        found = _asked(lambda: list(itertools.islice(wandb_runs.runs_of(project), most)), word)
    else:
        found = runs_in(Path(word or RUNS).expanduser())[:most]
    if as_json:
        put(json.dumps([asdict(each) for each in found], indent=1))
        return 0
    if not found:
        put(f"no runs in {word or RUNS}")
    for each in found:
        put(_line(each))
    return 0


def _line(each: ListedRun) -> str:
    step = "-" if each.step is None else f"{each.step}" + (f" of {each.steps}" if each.steps else "")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.changed))
    return f"{each.name:<40} {each.state:<10} step {step:<12} {when}"


def _plots(given: Given, followed: Followed) -> list[Path]:
    if "--save-dir" not in given:
        return []
    folder = Path(given.options["--save-dir"]).expanduser()
    try:
        return write_plots(folder, followed.rows)
    except OSError as error:
        raise RunFolderError(f"--save-dir {folder}: cannot be written: {error.strerror}") from error


def _show_numbers(followed: Followed, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in followed.rows]
    state = f", {followed.state}" if followed.state else ""
    put(f"{followed.name}{state}: {f'step {max(steps)}' if steps else 'no step yet'}")
    wide = max((len(row["key"]) for row in rows), default=0)
    if rows:
        put(
            f"{'':<{wide}}"
            + "".join(f"{name:>11}" for name in ("first", "last", f"mean of {LAST}", "lowest", "highest"))
        )
    for row in rows:
        values = (row[key] for key in ("first", "last", "mean_of_last", "low", "high"))
        put(f"{row['key']:<{wide}}" + "".join(f"{value:>11.4g}" for value in values))
    for warning in followed.warnings:
        put(f"warning: {warning}")


def _show_samples(samples: Sequence[Row]) -> None:
    if not samples:
        put("no failed samples")
    for row in samples:
        put()
        put(f"step {row['step']}, {row['environment']}, {row['task']}: reward {row['reward']:.4g}, "
            f"{row['status']} ({row['reason']})")  # fmt: skip
        for part in ("prompt", "reply"):
            put(f"  {part}:")
            put("\n".join(f"    {line}" for line in str(row[part]).splitlines()))


def _asked(call: Any, word: str) -> Any:
    """What W&B answers; whatever goes wrong there in words."""
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:
        raise RecordError(f"{word}: W&B gave no answer: {type(error).__name__}: {error}") from error


def _count(given: Given, flag: str, usual: int) -> int:
    value = _number(given, flag, usual)
    if value < 0 or value != int(value):
        raise ConfigError(f"{flag}: got {given.options[flag]!r}, expected a whole number from 0 on")
    return int(value)


def _number(given: Given, flag: str, usual: float) -> float:
    text = given.options.get(flag, "")
    try:
        value = float(text) if text else float(usual)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{flag}: got {text!r}, expected a number")
    return value

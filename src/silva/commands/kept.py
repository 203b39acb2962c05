"""Evaluations that are there already: of evals/NAME, of a folder, or of a run, as contenders of a comparison.

lake-before             evals/lake-before, every step of a series
lake-series@step_200    one step of it
runs/lake@step_100      what a run measured at a step, or runs/lake@best; without one, at its last
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from silva.assembly import Assembly
from silva.commands.command import Given
from silva.commands.common import here
from silva.config.load import Resolved, load
from silva.config.schema import RunConfig
from silva.errors import ConfigError
from silva.evaluation.comparison import Contender
from silva.evaluation.evaluator import Job
from silva.evaluation.store import SYNTHESIS, conditions
from silva.evaluation.summary import contents_of, ranges_of, votes_of
from silva.models.sources import is_run, pinned
from silva.protocols import Split, TaskSet
from silva.registries import REGISTRIES
from silva.storage.layout import Layout
from silva.storage.plain import read_plain
from silva.storage.rollouts import RolloutRow, read_columns, read_rollouts, rollouts_in
from silva.types import Task

EVALS = Path("evals")
"""Holds a folder for each evaluation."""


@dataclass(frozen=True)
class Kept:
    """An evaluation as it is stored. `tasks`: digests of the contents, by environment and id; `models`: names
    by step."""

    name: str
    path: Path
    resolved: Resolved
    rows: list[RolloutRow]
    models: Mapping[int, str]
    tasks: Mapping[str, Mapping[str, str]]
    cost: float | None

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def contenders(self) -> list[Contender]:
        """One for each step."""
        decided = conditions(self.resolved.data)
        del decided["engine"]
        steps = sorted({row.step for row in self.rows})
        return [
            Contender(
                f"{self.name}@step_{step}" if len(steps) > 1 else self.name, self.models.get(step, ""),
                [row for row in self.rows if row.step == step], self.tasks, self.config.eval,
                votes_of(self.config.environments), ranges_of(self.config.environments), decided, self.cost,
            )
            for step in steps
        ]  # fmt: skip


def kept(name: str, *, trained: bool = False) -> Kept:
    """The evaluation of this name.

    Args:
        trained: in its place the rollouts that a run trained on at a step, or dropped.

    Raises:
        ConfigError: there is none, it is not finished, or it has no such step.
        RecordError: a file of it is damaged.
    """
    path, step = _found(name)
    resolved = load([f"@{Layout(path).config_toml}"], REGISTRIES, env={})
    files = Layout(path)
    if files.episodes.exists():
        if trained:
            raise ConfigError(f"--split train: {path} is an evaluation, of held-out tasks; expected a run")
        if not files.summary.exists():
            raise ConfigError(
                f"{name}: {files.summary} is missing; the command that made it writes it again from "
                "episodes.parquet, and plays nothing"
            )
        summary = read_plain(files.summary)
        models = {int(at): model for at, model in summary.get("models", {}).items()}
        rows, tasks = read_rollouts(files.episodes), summary.get("tasks")
        cost = summary.get("spent", {}).get("cost")
        if step is not None:
            rows = [row for row in rows if row.step == step]
    else:
        at = _played(path, name, step, trained)
        file = rollouts_in(files.rollouts)[at]
        rows = [row for row in read_rollouts(file) if (row.status != "eval") == trained]
        models, tasks, cost = {at: f"{path} in step {at}" if trained else f"{path}@step_{at}"}, None, None
    if not rows:
        raise ConfigError(f"{name}: {path} has no episodes of step {step}")
    if tasks is None:
        tasks = contents_of(jobs_of_rows(rows, Assembly(here(resolved.config)).tasksets))
    short = name if step is not None or path.parent.resolve() != EVALS.resolve() else path.name
    return Kept(short, path, resolved, rows, models, tasks, cost)


def folder_name(given: Given) -> str:
    """What --name says; "" if it is not there.

    Raises:
        ConfigError: it is more than a name.
    """
    name = given.options.get("--name", "")
    if name and (name in (".", "..") or not re.fullmatch(r"[\w.+@ -]{1,200}", name)):
        raise ConfigError(f"--name: got {name!r}, expected the name of one folder, such as lake-before")
    return name


def jobs_of_rows(
    rows: Iterable[RolloutRow],
    tasksets: Mapping[str, TaskSet],
    contents: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Job]:
    """The job of each row, with its task.

    Args:
        contents: digests that the tasks had when they were played, by environment and id.

    Raises:
        ConfigError: a task is gone, or has another content now.
    """
    tasks: dict[tuple[str, Split], dict[str, Task]] = {}
    jobs, changed = list[Job](), Counter[str]()
    for row in rows:
        split: Split = "eval" if row.status == "eval" else "train"
        if (row.environment, split) not in tasks:
            there = tasksets[row.environment].tasks(split) if row.environment in tasksets else ()
            tasks[row.environment, split] = {task.id: task for task in there}
        task = tasks[row.environment, split].get(row.task)
        if task is None or (contents and task.content() != contents[row.environment][row.task]):
            changed[row.environment] += 1
            continue
        sample = row.trajectory.id.rpartition("/")[2]
        jobs.append(Job(row.environment, task, int(sample) if sample.isdigit() else 0))
    if changed:
        words = ", ".join(f"{count} of {label}" for label, count in changed.items())
        raise ConfigError(
            f"tasks of these episodes are gone or have other contents now: {words}; the rows or settings of "
            "the environment have changed"
        )
    return jobs


def _found(name: str) -> tuple[Path, int | None]:
    """The folder, and the step that is asked for."""
    if name.endswith("@best"):
        name = pinned(name)
    front, _, at = name.rpartition("@")
    step = int(at.removeprefix("step_")) if front and at.removeprefix("step_").isdigit() else None
    base = front if step is not None else name
    for path in (EVALS / base, Path(base).expanduser()):
        files = Layout(path)
        if files.config_json.exists() and SYNTHESIS in read_plain(files.config_json):
            raise ConfigError(
                f"{name}: {path} is a synthesis, of training tasks; expected an evaluation or a run"
            )
        if files.journal.exists():
            raise ConfigError(
                f"{name}: {path} is not finished; the same silva eval command goes on with it, then compare"
            )
        if files.episodes.exists() or (is_run(path) and files.config_toml.exists()):
            return path, step
    there = [each.parent.name for each in sorted(EVALS.glob("*/episodes.parquet"))]
    near = get_close_matches(base, there, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; in {EVALS}/ there are {', '.join(there) or 'none'}"
    raise ConfigError(f"{name}: no evaluation of that name, no folder of one and no run{hint}")


def _played(run: Path, name: str, step: int | None, trained: bool) -> int:
    """The step of a run's evaluation, or of its training; the last one if none is asked for."""
    found = []
    for at, file in rollouts_in(Layout(run).rollouts).items():
        if any((row["status"] != "eval") == trained for row in read_columns(file, ["status"])):
            found.append(at)
    if not found:
        what = "rollouts of training" if trained else "episodes of an evaluation"
        raise ConfigError(f"{name}: {run} has no {what} (monitoring.rollouts = true)")
    if step is not None and step not in found:
        done = "has rollouts of training of" if trained else "was evaluated at"
        raise ConfigError(f"{name}: {run} {done} steps {', '.join(map(str, found))}")
    return found[-1] if step is None else step

"""`silva eval --regrade RUN_OR_EVAL --reward X`: stored episodes get another reward, and no model is called.
With `--split train` these are a run's rollouts of training.

    kept rows ──> tasks of the configuration, with the reward ──> RewardedDialogue.grade ──> evals/NAME

The dialogue is graded as it was shown. Episodes that never came to be graded (a limit, a fault) stay as they
are.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from silva.aio import gather
from silva.assembly import Assembly
from silva.commands.attack import reward_settings
from silva.commands.command import Given
from silva.commands.common import here
from silva.commands.compare import show
from silva.commands.evaluate import write_shown
from silva.commands.kept import EVALS, Kept, folder_name, jobs_of_rows, kept
from silva.config.field_types import plain
from silva.config.inputs import input_files
from silva.config.load import Resolved, load
from silva.config.saved import to_toml
from silva.data.recorded import messages_of
from silva.environments.bases.tool_dialogue import RewardedDialogue
from silva.errors import ConfigError, RewardError
from silva.evaluation.comparison import compare
from silva.evaluation.evaluator import Job
from silva.evaluation.store import EvalFolder, free_name, identity
from silva.evaluation.summary import contents_of, evaluations_of, summary
from silva.monitoring.printable import printable, put
from silva.protocols import TaskSet
from silva.registries import REGISTRIES
from silva.rollouts.state import regraded
from silva.run import say
from silva.storage.rollouts import RolloutRow
from silva.types import Trajectory

OWN = ("--regrade", "--reward", "--split", "--name", "--overwrite", "--json")
SPLITS = ("eval", "train")
AT_ONCE = 64  # episodes that are graded at the same time
GRADED = ("terminated", "truncated")


def run(given: Given) -> int:
    """Grade, write evals/NAME, and say what changed sides."""
    if "--reward" not in given:
        raise ConfigError("--regrade: with which reward? expected --reward NAME too, and its keys")
    keys = [f"{flag}={value}" if value else flag for flag, value in given.options.items() if flag not in OWN]
    split = given.options.get("--split", "eval")
    if split not in SPLITS:
        raise ConfigError(f"--split: got {split!r}, expected {' or '.join(SPLITS)}")
    before = kept(given.options["--regrade"], trained=split == "train")
    resolved = _with_reward(before, [given.options["--reward"], *keys, *given.rest])
    console, config = Console(stderr=True), here(resolved.config)
    config = config.model_copy(update={
        "environments": tuple(each.model_copy(update={"workers": 0}) for each in config.environments)
    })  # fmt: skip
    tasksets = Assembly(config).tasksets
    jobs = jobs_of_rows(before.rows, tasksets, before.tasks)
    rows = asyncio.run(_regrade(before.rows, jobs, tasksets))
    after = _write(given, before, resolved, rows, jobs, console)
    found = [compare(pair) for pair in zip(before.contenders(), after.contenders(), strict=True)]
    if "--json" in given:
        put(json.dumps(found, indent=1))
    else:
        for each in found:
            show(each)
        _show_episodes(before.rows, rows)
    return 0


def _with_reward(before: Kept, reward: Sequence[str]) -> Resolved:
    """The configuration with this reward in every environment that has one."""
    settings = plain(reward_settings(reward))
    data = copy.deepcopy(dict(before.resolved.data))
    for environment, entry in zip(before.config.environments, data["environments"], strict=True):
        if not hasattr(environment, "reward"):
            raise ConfigError(
                f"environment {environment.label}: its own rules grade it, so it takes no reward; expected "
                "environments with a key `reward`"
            )
        entry["reward"] = settings
    return load([], REGISTRIES, values=data, env={})


async def _regrade(
    rows: Sequence[RolloutRow], jobs: Sequence[Job], tasksets: dict[str, TaskSet]
) -> list[RolloutRow]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(row: RolloutRow, job: Job) -> RolloutRow:
        async with places:
            trajectory = await _graded(row.trajectory, job, tasksets[job.environment])
        return replace(row, trajectory=trajectory, reason=trajectory.error or "")

    return list(await gather(one(row, job) for row, job in zip(rows, jobs, strict=True)))


async def _graded(trajectory: Trajectory, job: Job, taskset: TaskSet) -> Trajectory:
    """A reward that cannot grade it leaves no result."""
    environment = taskset.environment(job.task)
    if not isinstance(environment, RewardedDialogue):
        raise ConfigError(
            f"environment {job.environment}: {type(environment).__name__} grades by rules of its own; "
            "expected one that is derived from RewardedDialogue, such as dataset"
        )
    if trajectory.failure is not None or trajectory.stop_reason not in GRADED or not trajectory.turns:
        return trajectory
    try:
        step = await environment.grade(
            messages_of(trajectory), terminated=trajectory.stop_reason == "terminated"
        )
    except RewardError as error:
        return replace(trajectory, failure="redo", error=f"reward: {error}")
    return regraded(trajectory, step)


def _write(
    given: Given,
    before: Kept,
    resolved: Resolved,
    rows: list[RolloutRow],
    jobs: Sequence[Job],
    console: Console,
) -> Kept:
    config = here(resolved.config)
    this = identity(resolved.data, models=before.models, model={}, weights={},
                    files=input_files(resolved.data), jobs=jobs,
                    policy=f"regraded: {before.path.resolve().name}")  # fmt: skip
    kind = given.options["--reward"].rpartition(":")[2]
    usual = f"{before.path.resolve().name}-{kind}" + "-train" * (given.options.get("--split") == "train")
    overwrite = "--overwrite" in given
    name = folder_name(given) or (usual if overwrite else free_name(EVALS, usual, this))
    if (EVALS / name).resolve() == before.path.resolve():
        raise ConfigError(f"--name {name}: holds the episodes that are graded; expected another name")
    with EvalFolder.open(EVALS / name, this, to_toml(resolved), overwrite=overwrite) as store:
        series, tasks = evaluations_of(rows, config), contents_of(jobs)
        whole = summary(store.path.name, series, before.models, config=config, spent={}, tasks=tasks)
        store.write(rows, whole)
        write_shown(config, store, series, None, console)
        store.done()
        say(f"{store.path}: {len(rows)} episodes, graded without a call of the model", console)
        for found in series.values():
            for note in (note for each in found for note in each.notes()):
                say(note, console)
    return Kept(store.path.name, store.path, resolved, rows, before.models, before.tasks, None)


def _show_episodes(before: Sequence[RolloutRow], after: Sequence[RolloutRow]) -> None:
    """Single episodes that changed sides, for a task may change with none of them alone."""
    flips = Counter(
        (a.trajectory.metrics.get("success", 0.0) >= 1, b.trajectory.metrics.get("success", 0.0) >= 1)
        for a, b in zip(before, after, strict=True)
    )
    put(
        printable(
            f"{len(after)} episodes: {flips[False, True]} are solved now, {flips[True, False]} no longer, "
            f"{flips[True, True]} still, {flips[False, False]} neither"
        )
    )

"""`silva synth`: rows to train on from episodes of training tasks, played by any model or by a script.

    asked ──> jobs ──> synth/NAME, with what is finished ──> play what is missing ──> select ──> its rows

Episodes are kept as those of an evaluation are (evaluation/store.py). Not here: which of them become rows
(synthesis/selection.py).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from silva import __version__
from silva.commands.asked import EvalRequest
from silva.commands.common import here
from silva.commands.playing import kept, play_missing, read_tasks
from silva.config.field_types import plain
from silva.config.saved import to_toml
from silva.config.sections import Synth
from silva.errors import ConfigError, CostLimit, NoSignalError, errors_about
from silva.evaluation.evaluator import Job, jobs_of
from silva.evaluation.store import SECTIONS, SYNTHESIS, EvalFolder, free_name, identity
from silva.monitoring.printable import put
from silva.rollouts.faults import tally
from silva.run import say
from silva.storage.rollouts import RolloutRow
from silva.synthesis.duplicates import EvaluationSets, NearDuplicates
from silva.synthesis.selection import Selection, Teacher, select

SYNTH = Path("synth")
"""Holds a folder for each synthesis."""
PLAYED = ("tasks", "samples_per_task", "sampling")
"""Keys of [synth] that decide the episodes; all others choose among them."""

Summary = Mapping[str, Any]


def synthesize(asked: EvalRequest) -> Summary:
    """Play what is missing, choose, and write; what summary.json holds.

    Raises:
        CostLimit: the cap is met. Rows are written of the episodes that ended before.
    """
    console, config = Console(stderr=True), here(asked.config)
    settings: Synth = config.synth or Synth()
    with errors_about("synth.decontaminate"):
        sets = EvaluationSets.named(settings.decontaminate, settings.ngram)
    if settings.near_duplicates:
        NearDuplicates(settings.near_duplicates)  # a missing package is said before anything is played
    tasksets = read_tasks(config, console, held_out=False)
    if empty := [label for label, each in tasksets.items() if getattr(each, "only_held_out", False)]:
        raise ConfigError(f"{', '.join(empty)}: all tasks are held out; expected eval_share below 1")
    jobs, (step,) = jobs_of(tasksets, settings), asked.models
    this = _identity(asked, settings, jobs)
    given, usual = asked.resolved.provenance, asked.usual_name
    usual = usual if asked.overwrite else free_name(SYNTH, usual, this, given, SYNTHESIS)
    path = SYNTH / (asked.name or usual)
    with EvalFolder.open(
        path, this, to_toml(asked.resolved), overwrite=asked.overwrite, given=given, what=SYNTHESIS
    ) as store:
        missing = store.missing(step, jobs)
        if not missing:
            say(f"{path}: all {len(jobs)} episodes were played before; rows are chosen from them", console)
        elif missing < len(jobs):
            say(f"{path}: goes on, with {len(jobs) - missing} of {len(jobs)} episodes kept", console)
        try:
            if missing:
                configs = {step: here(asked.config_of(step))}
                with kept(store, [step], jobs, console):
                    asyncio.run(play_missing(jobs, configs, asked.policy, settings.sampling, tasksets, store,
                                             console))  # fmt: skip
        except CostLimit:
            found = _write(store, jobs, asked, sets)
            say(f"{store.dialogues}: {found['rows']} rows of the episodes that ended before the cap was met; "
                "a larger engine.max_cost goes on", console)  # fmt: skip
            raise
        found = _write(store, jobs, asked, sets)
        store.done()
    return found


def report(found: Summary, asked: EvalRequest, *, as_json: bool) -> int:
    """Say what was written; the exit code says whether there is a row."""
    if as_json:
        put(json.dumps(found, indent=1))
    else:
        put(_said(found))
    return 0 if found["rows"] else NoSignalError.exit_code


def _identity(asked: EvalRequest, settings: Synth, jobs: Sequence[Job]) -> dict[str, Any]:
    played = {key: value for key, value in plain(settings).items() if key in PLAYED}
    sections = ["[synth]" if each == "eval" else each for each in SECTIONS]
    return identity({**asked.resolved.data, "[synth]": played}, models=asked.names, model=asked.model,
                    weights=asked.weights, files=asked.files, policy=asked.policy, jobs=jobs,
                    sections=sections)  # fmt: skip


def _write(store: EvalFolder, jobs: Sequence[Job], asked: EvalRequest, sets: EvaluationSets) -> Summary:
    config, sampled, (name,) = asked.config, asked.policy == "model", asked.names.values()
    paid = config.engine.prices if sampled and config.engine.only_evaluates else None
    teacher = Teacher(name, config.seed, sampled, paid)
    episodes = store.in_order(asked.models, jobs)
    chosen = select(episodes, config.synth or Synth(), sets, teacher)
    found = _summary(store, chosen, teacher, episodes)
    store.write(episodes, found, chosen.lines())
    return found


def _summary(
    store: EvalFolder, chosen: Selection, teacher: Teacher, episodes: Sequence[RolloutRow]
) -> Summary:
    played = Counter(each.environment for each in episodes)
    failed = [each.trajectory.error for each in episodes if each.trajectory.failure is not None]
    rows = Counter(row.episode.environment for row in chosen.rows)
    rewards = [row.episode.trajectory.raw_reward for row in chosen.rows]
    sets = {
        name: {
            "texts": count,
            "too_short": chosen.sets.too_short[name],
            "left_out": chosen.contaminated[name],
        }
        for name, count in chosen.sets.texts.items()
    }
    return {
        "name": store.path.name,
        "path": str(store.dialogues),
        "version": __version__,
        "model": teacher.name,
        "seed": teacher.seed,
        "episodes": sum(played.values()),
        "rows": len(chosen.rows),
        "mean_reward": fmean(rewards) if rewards else None,
        "left_out": chosen.left_out,
        "failures": tally(failed),
        "environments": {name: {"episodes": count, "rows": rows[name]} for name, count in played.items()},
        "lost": chosen.lost,
        **({"decontamination": {"ngram": chosen.sets.n, "sets": sets}} if sets else {}),
        **({"spent": dict(store.spent)} if store.spent else {}),
    }


def _said(found: Summary) -> str:
    reward = "" if found["mean_reward"] is None else f", mean reward {found['mean_reward']:.3f}"
    reasons = [f"{count} {reason}" for reason, count in found["left_out"].items() if count]
    lines = [f"{found['path']}: {found['rows']} rows of {found['episodes']} episodes{reward}"]
    lines += [f"left out: {', '.join(reasons)}"] if reasons else []
    lines += [f"failed: {found['failures']}"] if found["failures"] else []
    contamination = found.get("decontamination", {"sets": {}})
    lines += [
        f"against {name}: {each['left_out']} left out by {contamination['ngram']} words in a row that one of "
        f"its {each['texts']} questions has"
        + (f"; {each['too_short']} are too short" if each["too_short"] else "")
        for name, each in contamination["sets"].items()
    ]
    return "\n".join([*lines, *(f"in {count} rows {what}" for what, count in found["lost"].items())])

"""What an evaluation comes to, as `evals/NAME/summary.json` holds it; computed from the stored rows alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from silva import __version__
from silva.config.schema import RunConfig
from silva.evaluation.evaluator import Evaluation, Job, Vote, evaluation, records, success
from silva.evaluation.statistics import Range, estimate
from silva.storage.rollouts import RolloutRow
from silva.types import Trajectory

Series = Mapping[int, Sequence[Evaluation]]
"""Evaluations by step of the weights; 0 for weights that belong to no step."""


def tool_calls(trajectory: Trajectory) -> int:
    return sum(len(m.tool_calls) for turn in trajectory.turns for m in turn.messages if m.role == "assistant")


COUNTS: Mapping[str, Callable[[Trajectory], float]] = {
    "reward": lambda t: t.raw_reward,
    "turns": lambda t: len(t.turns),
    "tool_calls": tool_calls,
    "response_tokens": lambda t: t.tokens("policy"),
    "tokens": lambda t: t.tokens(),
}
"""Numbers of an episode, of which the summary has means."""
MOST_GROUPS = 6
"""Of episodes, by one of these numbers."""


def votes_of(environments: Iterable[Any]) -> dict[str, Vote]:
    """How the answers of each environment are counted, by its label; of those whose reward finds answers."""
    votes = {each.label: getattr(getattr(each, "reward", None), "vote", None) for each in environments}
    return {label: vote for label, vote in votes.items() if vote}


def ranges_of(environments: Iterable[Any]) -> dict[str, Range]:
    """Where the raw rewards of each environment can lie, by its label; of those that know it."""
    graded = {each.label: getattr(each, "reward", each) for each in environments}
    ranges = {label: getattr(each, "reward_range", None) for label, each in graded.items()}
    return {label: each for label, each in ranges.items() if each}


def contents_of(jobs: Iterable[Job]) -> dict[str, dict[str, str]]:
    """Digests of what the tasks are, by environment and id."""
    found: dict[str, dict[str, str]] = {}
    for job in jobs:
        tasks = found.setdefault(job.environment, {})
        if job.task.id not in tasks:
            tasks[job.task.id] = job.task.content()
    return found


def evaluations_of(rows: Iterable[RolloutRow], config: RunConfig) -> dict[int, list[Evaluation]]:
    """The numbers of stored episodes, by step and then by environment, in the order of the rows."""
    votes, ranges = votes_of(config.environments), ranges_of(config.environments)
    found: dict[int, dict[str, list[tuple[str, Trajectory]]]] = {}
    for row in rows:
        episodes = found.setdefault(row.step, {}).setdefault(row.environment, [])
        episodes.append((row.task, row.trajectory))
    return {
        step: [
            evaluation(label, episodes, config.eval, votes.get(label), ranges.get(label))
            for label, episodes in by_label.items()
        ]
        for step, by_label in found.items()
    }


def results(series: Series, models: Mapping[int, str]) -> list[dict[str, Any]]:
    """One object a metric, environment and step: EVALUATION_KEYS of storage/summary.py, step and model."""
    return [
        {"step": step, "model": models[step], **row}
        for step, found in series.items()
        for row in records(found)
    ]


def summary(
    name: str,
    series: Series,
    models: Mapping[int, str],
    *,
    config: RunConfig,
    spent: Mapping[str, Any],
    tasks: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """What the file holds.

    Args:
        spent: what a paid service has counted; {} for other actors, so that the same episodes give the same
            bytes.
        tasks: `contents_of` what was played.
    """
    return {
        "name": name,
        "version": __version__,
        "seed": config.seed,
        "models": {str(step): model for step, model in models.items()},
        "samples_per_task": config.eval.samples_per_task,
        "results": results(series, models),
        "episodes": [
            {"step": step, "environment": each.environment, **_episodes(each)}
            for step, found in series.items()
            for each in found
        ],
        **({"spent": dict(spent)} if spent else {}),
        "tasks": {label: dict(digests) for label, digests in tasks.items()},
    }


def _episodes(found: Evaluation) -> dict[str, Any]:
    """How they ended, and their means: of all with a result, and apart of those solved and not solved."""
    usable = [t for _, t in found.episodes if t.has_result]
    parts = {"all": usable}
    if "success" in found.estimates:
        parts["solved"] = [t for t in usable if success(t)]
        parts["unsolved"] = [t for t in usable if not success(t)]
    return {
        "count": len(found.episodes),
        "left_out": found.left_out,
        "stop_reasons": dict(sorted(Counter(t.stop_reason for _, t in found.episodes).items())),
        "means": {
            part: {"count": len(those), **{name: _mean(map(of, those)) for name, of in COUNTS.items()}}
            for part, those in parts.items()
        },
        "reward_against": {
            name: _correlation([of(t) for t in usable], [t.raw_reward for t in usable])
            for name, of in COUNTS.items()
            if name != "reward"
        },
        "by_count": {name: _groups(found, of) for name, of in COUNTS.items() if name != "reward"},
    }


def _groups(found: Evaluation, of: Callable[[Trajectory], float]) -> list[dict[str, Any]]:
    """The success of episodes (their reward if none is reported) in groups of similar `of`, the lowest first:
    one for each value if there are few, otherwise of about equally many episodes. Means are over tasks, as
    those of the whole. No group if all values are equal."""
    metric, worth = ("success", success) if "success" in found.estimates else ("reward", COUNTS["reward"])
    episodes = sorted(
        ((of(t), task, worth(t)) for task, t in found.episodes if t.has_result), key=lambda each: each[0]
    )
    values = [each[0] for each in episodes]
    starts = sorted({*values})
    if len(starts) < 2:
        return []
    if len(starts) > MOST_GROUPS:
        even = {values[len(values) * i // MOST_GROUPS] for i in range(MOST_GROUPS)}
        starts = sorted(even) if len(even) > 1 else starts[:2]  # nearly all have the lowest value
    groups = list[dict[str, Any]]()
    for low, after in pairwise([*starts, math.inf]):
        those, by_task = [each for each in episodes if low <= each[0] < after], dict[str, list[float]]()
        for _, task, value in those:
            by_task.setdefault(task, []).append(value)
        share = metric == "success" or None
        made = estimate([np.array(each) for each in by_task.values()], share=share, within=found.within)
        groups.append(
            {"from": low, "to": those[-1][0], "count": len(those), "at": _mean(each[0] for each in those),
             "metric": metric, "mean": made.mean, "ci_low": made.ci_low, "ci_high": made.ci_high}
        )  # fmt: skip
    return groups


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else None


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None if one of the two does not vary."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(x, y)[0, 1])

"""Held-out evaluation: every episode of the eval split, with a sampling and seeds of its own.

The seeds depend on the run's seed, the task and the sample alone, so evaluations before and after training
are paired. Failed episodes are counted apart and enter no mean. Not here: when to evaluate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from silva.config.sections import Eval, Limits
from silva.evaluation.statistics import Estimate, estimate, pass_at_k
from silva.ports import derive
from silva.protocols import TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Actor
from silva.rollouts.episode import play
from silva.types import Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """What came out for one environment."""

    environment: str
    estimates: Mapping[str, Estimate]  # metric -> estimate: success, reward, pass@k
    episodes: tuple[tuple[Task, Trajectory], ...]

    @property
    def failed(self) -> int:
        return sum(t.failure is not None for _, t in self.episodes)

    def rows(self) -> list[dict[str, Any]]:
        """As they stand in summary.json."""
        return [
            {"environment": self.environment, "metric": metric, "mean": e.mean, "ci_low": e.ci_low,
             "ci_high": e.ci_high, "n": e.n}
            for metric, e in self.estimates.items()
        ]  # fmt: skip


def success(trajectory: Trajectory) -> float:
    """1 or 0; an episode cut off before its environment decided is no success."""
    return float(trajectory.metrics.get("success", 0.0) >= 1.0)


def records(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """All of them as summary.json holds them: one object a metric of each world."""
    return [row for e in evaluations for row in e.rows()]


async def evaluate(
    tasksets: Mapping[str, TaskSet],
    actor: Actor,
    renderer: Renderer,
    settings: Eval,
    limits: Limits,
    *,
    seed: int,
    on_episode: Callable[[int, int, str], None] = lambda done, total, environment: None,
    concurrency: int = 256,
) -> list[Evaluation]:
    """Play `settings.tasks` held-out tasks of every environment, `settings.samples_per_task` times each."""
    k = settings.samples_per_task
    jobs = [
        (label, taskset, task, sample)
        for label, taskset in tasksets.items()
        for task in list(taskset.tasks("eval"))[: settings.tasks]
        for sample in range(k)
    ]
    places, done = asyncio.Semaphore(concurrency), 0

    async def one(label: str, taskset: TaskSet, task: Task, sample: int) -> Trajectory:
        nonlocal done
        async with places:
            trajectory = await play(
                replace(task, seed=derive(task.seed, sample)),
                taskset,
                actor,
                renderer,
                limits,
                id=f"eval:{task.id}/{sample}",
                seed=derive(seed, "eval", label, task.id, sample),
            )
        done += 1
        on_episode(done, len(jobs), label)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(*job)) for job in jobs]
    except ExceptionGroup as errors:  # the others were cancelled; the first is what went wrong
        raise errors.exceptions[0] from None
    played = [(job[0], job[2], task.result()) for job, task in zip(jobs, running, strict=True)]
    return [
        _evaluation(label, [(task, t) for name, task, t in played if name == label], k) for label in tasksets
    ]


def _evaluation(label: str, episodes: Sequence[tuple[Task, Trajectory]], k: int) -> Evaluation:
    by_task: dict[str, list[Trajectory]] = {}
    for task, trajectory in episodes:
        if trajectory.failure is None:
            by_task.setdefault(task.id, []).append(trajectory)
    if not by_task:
        return Evaluation(label, {}, tuple(episodes))
    solved = [np.array([success(t) for t in ts]) for ts in by_task.values()]
    estimates = {
        "success": estimate(solved),
        "reward": estimate([np.array([t.raw_reward for t in ts]) for ts in by_task.values()]),
    }
    whole = [s for s in solved if len(s) == k]
    if k > 1 and whole:
        for size in dict.fromkeys((k // 2, k)):
            if size > 1:
                estimates[f"pass@{size}"] = estimate(
                    [np.array([pass_at_k(k, int(s.sum()), size)]) for s in whole]
                )
    return Evaluation(label, estimates, tuple(episodes))

"""Held-out evaluation: every episode of the eval split, with a sampling and seeds of its own.

The seeds depend on the run's seed, the task and the sample alone, so evaluations before and after training
are paired. How an episode counts:

    it came to an end, or to its last turn        its success and its reward
    it met a limit (context, tokens, time of      not solved, with the reward it had collected until then
    a step) that the policy is responsible for
    no result, or one that must not be used; a    tried again where that may help (`redo`), then left out
    prompt longer than an episode may be

Episodes that are left out are counted, and every share comes with two bounds: its value
if all of them had failed, and if all of them had been solved. Not here: when to evaluate.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from silva.aio import gather
from silva.config.sections import ContextSettings, EpisodeLimits, Eval, Synth
from silva.evaluation.statistics import Estimate, Range, estimate, maj_at_k, pass_at_k
from silva.ports import derive
from silva.protocols import Actor, Attempt, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.context import FULL
from silva.rollouts.episode import play, tries
from silva.rollouts.faults import UNWATCHED, Watch, tally
from silva.storage.rollouts import RolloutRow
from silva.types import Task, Trajectory

Key = tuple[str, str]
"""An episode: its environment and the id of its trajectory."""
Purpose = Literal["eval", "synth"]
"""Held-out tasks are played to be measured, training tasks to become rows."""
Vote = Callable[[str], str | None]
"""The final answer of a reply, equal if answers are equal (`RewardSettings.vote`)."""
NLL = "nll"
"""The metric of held-out rows, in nats a token; lower is better."""
MANY_CUT = 0.1
"""A larger share of episodes that end with a reply cut off is said."""


@dataclass(frozen=True)
class Evaluation:
    """The results for one environment.

    estimates: by metric: success (if the environment reports it), reward, pass@k, maj@k; empty if every
        episode is left out. Of held-out rows: `NLL`.
    bounds: (low, high) by metric, for shares only: the range of a reward is not always known.
    within: where its rewards can lie, if that is known.
    """

    environment: str
    estimates: Mapping[str, Estimate]
    bounds: Mapping[str, tuple[float, float]]
    episodes: tuple[tuple[str, Trajectory], ...]  # with the id of the task, in the order of the jobs
    within: Range | None = None

    @property
    def left_out(self) -> int:
        return sum(not t.has_result for _, t in self.episodes)

    def rows(self) -> list[dict[str, Any]]:
        """As they stand in summary.json."""
        if not self.estimates:
            return [self._row("reward", None)]
        return [self._row(metric, estimate) for metric, estimate in self.estimates.items()]

    def notes(self) -> list[str]:
        """How many episodes are left out and why, and how many ended in the middle of a reply."""
        found, count = [], len(self.episodes)
        if self.left_out:
            why = tally(t.error for _, t in self.episodes if not t.has_result)
            found.append(
                f"{self.left_out} of {count} held-out episodes gave no usable result and are left out: {why}"
            )
        cut = sum(bool(t.has_result and t.turns and t.turns[-1].cut) for _, t in self.episodes)
        if cut > MANY_CUT * count:
            found.append(
                f"{cut} of {count} held-out episodes ended with a reply that was cut off for lack of room, "
                "perhaps before its answer: raise rollout.limits.max_turn_tokens (or max_episode_tokens)"
            )
        return [f"{self.environment}: {note}" for note in found]

    def _row(self, metric: str, found: Estimate | None) -> dict[str, Any]:
        low, high = self.bounds.get(metric, (None, None))
        known = found and not math.isnan(found.ci_low)
        return {
            "environment": self.environment, "metric": metric,
            "mean": found and found.mean, "n": found.n if found else 0,
            "ci_low": found.ci_low if found and known else None,
            "ci_high": found.ci_high if found and known else None,
            "left_out": self.left_out, "bound_low": low, "bound_high": high,
        }  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """Decides which evaluation of a run is the best. A share counts with its lower bound, so episodes that
    are left out never help.

    by_success: how many environments are judged by success; the others are judged by their mean reward.
    value: the mean over all environments.
    left_out: episodes left out in environments that are judged by reward, which has no lower bound.
    """

    by_success: int
    value: float
    left_out: int

    def beats(self, other: Standing | None) -> bool:
        """A success reported for the first time cannot be compared with earlier rewards, and wins."""
        if other is None:
            return True
        return self.left_out <= other.left_out and (self.by_success, self.value) > (
            other.by_success,
            other.value,
        )


def standing(evaluations: Sequence[Evaluation]) -> Standing | None:
    """None if nothing is evaluated, or all episodes of an environment are left out. What is played decides,
    and the loss on held-out rows only if nothing is."""
    evaluations = [e for e in evaluations if NLL not in e.estimates] or evaluations
    if not evaluations or not all(e.estimates for e in evaluations):
        return None
    shares = [e.bounds["success"][0] for e in evaluations if "success" in e.estimates]
    others = [e for e in evaluations if "success" not in e.estimates]
    values = shares + [-e.estimates[NLL].mean if NLL in e.estimates else e.estimates["reward"].mean
                       for e in others]  # fmt: skip
    return Standing(len(shares), sum(values) / len(values), sum(e.left_out for e in others))


def success(trajectory: Trajectory) -> float:
    """1 or 0; 0 if the episode was cut off before the environment decided."""
    return float(trajectory.failure is None and trajectory.metrics.get("success", 0.0) >= 1.0)


def reports_success(trajectories: Iterable[Trajectory]) -> bool:
    """Whether the environment of these episodes knows success: one of them reports it.

    If all were cut off before the environment ended them, this cannot be known. They then count as not
    solved, as in an environment that reports success at the end.
    """
    played = list(trajectories)
    if any("success" in t.metrics for t in played):
        return True
    return not any(t.failure is None and t.stop_reason in ("terminated", "truncated") for t in played)


def rollout_rows(step: int, evaluations: Sequence[Evaluation]) -> list[RolloutRow]:
    """All episodes, for the file of rollouts."""
    return [
        rollout_row(step, e.environment, task, trajectory)
        for e in evaluations
        for task, trajectory in e.episodes
    ]


def rollout_row(step: int, environment: str, task: str, trajectory: Trajectory) -> RolloutRow:
    return RolloutRow(
        step, task, environment, f"eval:{task}", trajectory, "eval", reason=trajectory.error or ""
    )


def records(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """All of them as summary.json holds them: one object a metric of each environment."""
    return [row for e in evaluations for row in e.rows()]


@dataclass(frozen=True, slots=True)
class Job:
    """One episode of an evaluation: who plays it is not said here."""

    environment: str
    task: Task
    sample: int
    purpose: Purpose = "eval"

    @property
    def id(self) -> str:
        """The id of its trajectory."""
        return f"{self.purpose}:{self.task.id}/{self.sample}"

    @property
    def key(self) -> Key:
        return self.environment, self.id


def jobs_of(tasksets: Mapping[str, TaskSet], settings: Eval | Synth) -> list[Job]:
    """`settings.tasks` tasks of every environment, `settings.samples_per_task` times each: held-out ones, or
    for a synthesis those of the training split."""
    purpose: Purpose = "eval" if isinstance(settings, Eval) else "synth"
    return [
        Job(label, task, sample, purpose)
        for label, taskset in tasksets.items()
        for task in taskset.tasks("eval" if purpose == "eval" else "train")[: settings.tasks]
        for sample in range(settings.samples_per_task)
    ]


async def evaluate(
    tasksets: Mapping[str, TaskSet],
    actor: Actor,
    renderer: Renderer | None,
    settings: Eval,
    limits: EpisodeLimits,
    *,
    ranges: Mapping[str, Range] = {},
    **how: Any,
) -> list[Evaluation]:
    """Play all jobs of the settings.

    Args:
        ranges: where rewards can lie, by environment.
        how: other arguments of `play_jobs`.
    """
    jobs = jobs_of(tasksets, settings)
    played = list(zip(jobs, await play_jobs(jobs, tasksets, actor, renderer, limits, **how), strict=True))
    return [
        evaluation(label, [(job.task.id, t) for job, t in played if job.environment == label], settings,
                   within=ranges.get(label))
        for label in tasksets
    ]  # fmt: skip


async def play_jobs(
    jobs: Sequence[Job],
    tasksets: Mapping[str, TaskSet],
    actor: Actor,
    renderer: Renderer | None,
    limits: EpisodeLimits,
    *,
    seed: int,
    redo: int = 1,
    on_episode: Callable[[int, int, str], None] = lambda done, total, environment: None,
    watch: Watch = UNWATCHED,
    context: ContextSettings = FULL,
    known: Mapping[Key, Trajectory] = {},
    keep: Callable[[Job, Trajectory], None] = lambda job, trajectory: None,
    concurrency: int = 256,
) -> list[Trajectory]:
    """Play all jobs, each to its end; the episodes are in the order of the jobs.

    Args:
        redo: how often an episode that gave no result is tried again.
        context: what the actor is shown of an episode: as in training.
        known: episodes that are not played, as they were before.
        keep: gets every other one as soon as it has ended, in any order.
    """
    places, done = asyncio.Semaphore(concurrency), sum(job.key in known for job in jobs)

    async def one(job: Job) -> Trajectory:
        nonlocal done
        if job.key in known:
            return known[job.key]
        first = derive(seed, job.purpose, job.environment, job.task.id, job.sample)
        async with places:
            trajectory = await tries(
                redo,
                lambda attempt: play(
                    job.task, tasksets[job.environment], actor, renderer, limits, id=job.id,
                    seed=derive(first, attempt) if attempt else first, watch=watch, context=context,
                ),
            )  # fmt: skip
        keep(job, trajectory)
        done += 1
        on_episode(done, len(jobs), job.environment)
        return trajectory

    return await gather(one(job) for job in jobs)


def evaluation(
    label: str,
    episodes: Sequence[tuple[str, Trajectory]],
    settings: Eval,
    vote: Vote | None = None,
    within: Range | None = None,
) -> Evaluation:
    """The numbers for one environment, from the id of the task of each episode, and the episode; with `vote`,
    maj@k too. `within`: where rewards can lie."""
    k, sizes = settings.samples_per_task, settings.pass_sizes
    by_task: dict[str, list[Trajectory]] = {}
    for task, trajectory in episodes:
        by_task.setdefault(task, []).append(trajectory)
    usable = [[t for t in ts if t.has_result] for ts in by_task.values() if any(t.has_result for t in ts)]
    if not usable:
        return Evaluation(label, {}, {}, tuple(episodes), within)
    rewards = {"reward": estimate([np.array([t.raw_reward for t in ts]) for ts in usable], within=within)}
    if not reports_success(t for ts in usable for t in ts):
        return Evaluation(label, rewards, {}, tuple(episodes), within)
    shares = _shares([[success(t) for t in ts] for ts in usable], k, sizes)
    low, high = (
        _shares([[success(t) if t.has_result else left for t in ts] for ts in by_task.values()], k, sizes)
        for left in (0.0, 1.0)
    )
    bounds = {metric: (_mean(low[metric]), _mean(high[metric])) for metric in shares}
    if vote is not None:
        shares |= majorities(by_task.values(), k, sizes, vote)
    found = {metric: estimate(values, share=True) for metric, values in shares.items()}
    found = {"success": found.pop("success"), **rewards, **found}
    return Evaluation(label, found, bounds, tuple(episodes), within)


def _shares(solved: Sequence[Sequence[float]], k: int, sizes: Sequence[int]) -> dict[str, list[np.ndarray]]:
    """By metric, the samples of each task. A task that lacks one of its k samples has no pass@k."""
    shares = {"success": [np.array(values) for values in solved]}
    whole = [values for values in solved if len(values) == k]
    return shares | {
        f"pass@{size}": [np.array([pass_at_k(k, int(sum(values)), size)]) for values in whole]
        for size in sizes
        if whole
    }


def majorities(
    episodes: Iterable[Sequence[Trajectory]], k: int, sizes: Sequence[int], vote: Vote
) -> dict[str, list[np.ndarray]]:
    """maj@k by metric, from the episodes of each task; of tasks with k results, of which some answer."""
    whole = [ts for ts in episodes if sum(t.has_result for t in ts) == k]
    ballots = [([_answer(t, vote) for t in ts], [success(t) for t in ts]) for ts in whole]
    if not any(answer is not None for answers, _ in ballots for answer in answers):
        return {}
    return {
        f"maj@{size}": [np.array([maj_at_k(answers, right, size)]) for answers, right in ballots]
        for size in sizes
        if size > 1
    }


def _answer(trajectory: Trajectory, vote: Vote) -> str | None:
    """The answer in its last reply; an episode that did not end with one has none."""
    if trajectory.stop_reason != "terminated" or not trajectory.turns:
        return None
    return vote(Attempt(trajectory.turns[-1].messages).reply)


def _mean(values_by_task: Sequence[np.ndarray]) -> float:
    return float(np.mean([values.mean() for values in values_by_task]))

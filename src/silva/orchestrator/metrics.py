"""The numbers of a step. Raw, shaped and normalised rewards stay apart; what depends on speed is in perf/."""

from __future__ import annotations

import math
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from silva.algorithms.diagnostics import explained_variance, response_metrics, thought_share
from silva.evaluation.evaluator import Evaluation, reports_success, success
from silva.orchestrator.buffer import Batch
from silva.routes import balance
from silva.types import Group, Sample, Trajectory, Turn


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards over every usable episode of the step, the dropped groups' too: what the policy earns."""
    played = [(g.task.environment, t) for g in batch.groups for t in g.trajectories]
    used = [(name, t) for name, t in played if t.failure is None]
    reasons = Counter(d.reason for d in batch.dropped)
    metrics: dict[str, float] = {
        "groups/trained": len(batch.kept),
        **{f"groups/{reason}": reasons[reason] for reason in ("zero_variance", "failed", *sorted(reasons))},
        "trajectories/played": len(played),
        "trajectories/failed": len(played) - len(used),
    }
    if used:
        metrics |= {
            "reward/raw": _mean([t.raw_reward for _, t in used]),
            "reward/shaped": _mean([t.shaped_reward for _, t in used]),
            "rollout/turns": _mean([len(t.turns) for _, t in used]),
            "rollout/rows": _mean([sum(turn.fresh for turn in t.turns) for _, t in used]),
            "rollout/response_tokens": _mean([t.tokens("policy") for _, t in used]),
        }
        found = response_metrics(turn for _, t in used for turn in t.turns)
        metrics |= {f"response/{name}": value for name, value in found.items()}
    metrics |= forest_metrics(batch.groups) | routing_metrics(batch.groups)
    for name in dict.fromkeys(name for name, _ in used):
        mine = [t for other, t in used if other == name]
        metrics[f"reward/{name}/raw"] = _mean([t.raw_reward for t in mine])
        if reports_success(mine):
            metrics[f"success/{name}"] = _mean([success(t) for t in mine])
        metrics |= {f"environment/{name}/{key}": value for key, value in _reported(mine).items()}
    for reason, count in Counter(t.stop_reason for _, t in played).items():
        metrics[f"stop/{reason}"] = count / len(played)
    return metrics


def routing_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How evenly replies were spread over experts, if the engine records it."""
    replies = (segment for group in groups for turn in group.turns for segment in turn.reply)
    routes = [each.routes for each in replies if each.source == "policy" and each.routes is not None]
    if not routes:
        return {}
    busiest, entropy = balance(routes)
    return {"routing/busiest_expert": busiest, "routing/entropy": entropy}


def forest_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What was played, each turn once; and where trajectories were forked, what that saved.

    `forest/sampled_share`: tokens sampled by tokens of all replies, 1 where nothing is shared.
    `forest/unique_leaves`: share of trajectories whose tokens no other one of the group has.
    `forest/fork_turn`, `forest/depth`: mean turn of a fork, and mean number of forks behind a leaf.
    """
    turns = [turn for group in groups for turn in group.turns]
    calls = sum(len(message.tool_calls) for turn in turns for message in turn.messages[-1:])
    sampled = sum(_sampled(turn) for turn in turns)
    metrics = {"rollout/steps": float(len(turns)), "rollout/sampled_tokens": float(sampled)}
    if calls:
        metrics["rollout/tool_calls"] = float(calls)
    forked = [t for group in groups for t in group.trajectories if t.fork_turn is not None]
    if not forked:
        return metrics
    leaves = [t for group in groups for t in group.trajectories]
    parents = {t.id: t.parent for t in leaves}
    return metrics | {
        "forest/branches": len(forked) / len(leaves),
        "forest/fork_turn": _mean([t.fork_turn or 0 for t in forked]),
        "forest/depth": _mean([_depth(t.id, parents) for t in leaves]),
        "forest/sampled_share": sampled / max(1, sum(t.tokens("policy") for t in leaves)),
        "forest/unique_leaves": sum(map(_unique, groups)) / len(leaves),
    }


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Advantages of trained tokens, as the loss will see them, and how good a critic was."""
    trained = [s.loss_weights > 0 for s in samples]
    values = [s.advantages[t] for s, t in zip(samples, trained, strict=True) if s.advantages is not None]
    if not values:
        return {}
    joined = np.concatenate(values)
    metrics = {"advantage/std": float(np.std(joined)), "advantage/max": float(joined.max())}
    learned = [
        (s.returns[t], s.values[t])
        for s, t in zip(samples, trained, strict=True)
        if s.returns is not None and s.values is not None
    ]
    if learned:
        returns, before = (torch.from_numpy(np.concatenate(rows)) for rows in zip(*learned, strict=True))
        explained = explained_variance(returns, before)
        metrics |= {} if math.isnan(explained) else {"critic/explained_variance": explained}
    return metrics


def eval_metrics(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for e in evaluations:
        for metric, estimate in e.estimates.items():
            key = f"eval/{e.environment}/{metric}"
            metrics[key] = estimate.mean
            if not math.isnan(estimate.ci_low):
                metrics |= {f"{key}_ci_low": estimate.ci_low, f"{key}_ci_high": estimate.ci_high}
            if e.left_out and metric in e.bounds:
                low, high = e.bounds[metric]
                metrics |= {f"{key}_bound_low": low, f"{key}_bound_high": high}
        if e.left_out:
            metrics[f"eval/{e.environment}/left_out"] = e.left_out
        if turns := [turn for _, trajectory in e.episodes for turn in trajectory.turns]:
            metrics[f"eval/{e.environment}/thoughts"] = thought_share(turns)
    return metrics


def mean_of_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """`train/...`: sums for counts, else the mean over the step's updates. Without what is in `perf/`."""
    updates = _with_all_ages(updates)
    keys = dict.fromkeys(key for u in updates for key in u if not key.startswith("perf/"))
    values = {key: [u[key] for u in updates if key in u] for key in keys}
    sums = ("trained_tokens", "nonfinite", "critic/nonfinite")
    return {f"train/{key}": float(sum(v)) if key in sums else _mean(v) for key, v in values.items()}


def _with_all_ages(updates: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Where an update has tokens of older versions, all have the same ages: 0 for those that they lack.

    An update that tells of no age has tokens of age 0 only.
    """
    if not any("/age" in key for u in updates for key in u):
        return list(updates)
    told = [
        u
        if any("/age" in key for key in u)
        else u
        | {"share/age0": 1.0}
        | {f"{name}/age0": u[name] for name in ("clipped", "masked") if name in u}
        for u in updates
    ]
    nothing = {key: 0.0 for u in told for key in u if "/age" in key}
    return [nothing | u for u in told]


def perf_metrics(
    seconds: Mapping[str, float], generated: int = 0, updates: Sequence[Mapping[str, float]] = ()
) -> dict[str, float]:
    """Seconds by phase, tokens sampled a second, model FLOPs utilisation (MFU) of `updates`, and memory."""
    metrics = {f"perf/seconds/{name}": value for name, value in seconds.items()}
    if generated and seconds.get("rollout"):
        metrics["perf/tokens_per_second"] = generated / seconds["rollout"]
    at_peak = sum(update.get("perf/seconds_at_peak", 0.0) for update in updates)
    if at_peak and seconds.get("train"):
        metrics["perf/mfu"] = at_peak / seconds["train"]
    return metrics | {"perf/peak_memory_bytes": peak_memory_bytes()}


def engine_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What sharing and drafts did between two `Engine.counts`, and what it cost; nothing where there is none.

    `shared_tokens` is a share of the tokens of replies but their first ones, which prompts give.
    `seconds_saved` is an estimate: the time that steps without drafts would have taken for the same tokens,
    less the time that was taken.
    """
    done = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in _COUNTS if name in after}
    decoded, shared = done.get("decode_tokens", 0.0), done.get("shared_tokens", 0.0)
    metrics = {"perf/shared_tokens": shared / decoded} if shared and decoded else {}
    if "cost" in after:
        metrics["perf/cost"] = done["cost"]
    if not done.get("drafted_tokens"):
        return metrics
    saved = after["seconds_saved"] - before.get("seconds_saved", 0.0)
    return metrics | {
        "perf/drafts/drafted_tokens": done["drafted_tokens"],
        "perf/drafts/accepted_tokens": done["accepted_tokens"],
        "perf/drafts/tokens_per_step": decoded / max(decoded - done["accepted_tokens"], 1.0),  # of a request
        "perf/drafts/seconds_saved": saved,
    }


_COUNTS = ("cost", "drafted_tokens", "accepted_tokens", "decode_tokens", "shared_tokens")


def peak_memory_bytes() -> int:
    """Highest resident memory of this process, or highest allocated on the GPU where there is one."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: there a child begins with the peak of the process that started it
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _sampled(turn: Turn) -> int:
    return sum(segment.count for segment in turn.segments if segment.source == "policy")


def _depth(trajectory: str, parents: Mapping[str, str | None]) -> int:
    """A parent that was played again is a root under another seed, and not among the leaves."""
    parent = parents.get(trajectory)
    return 0 if parent is None else 1 + _depth(parent, parents)


def _unique(group: Group) -> int:
    """Trajectories whose tokens no other one of the group has."""
    counts = Counter(tuple(s.tokens for turn in t.turns for s in turn.segments) for t in group.trajectories)
    return list(counts.values()).count(1)


def _reported(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    keys = dict.fromkeys(k for t in trajectories for k in t.metrics if k != "success")
    return {k: _mean([t.metrics[k] for t in trajectories if k in t.metrics]) for k in keys}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))

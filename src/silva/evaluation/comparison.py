"""Evaluations of the same tasks side by side: each metric, differences in pairs, and what changed sides.

A task is the same if its content is (`Task.content`), whatever its id. Not here: where evaluations come from,
and how a comparison is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from silva.config.diff import changed_keys
from silva.config.sections import Eval
from silva.errors import ConfigError
from silva.evaluation.evaluator import Vote, evaluation, majorities, reports_success, success
from silva.evaluation.paired import difference, holm
from silva.evaluation.statistics import Range, estimate, pass_at_k
from silva.evaluation.summary import COUNTS
from silva.protocols import Attempt
from silva.storage.rollouts import RolloutRow
from silva.storage.summary import finite
from silva.types import Trajectory

HALF = 0.5
"""A task is solved by a model that solves it in this share of its samples, or more."""
MAX_REPLY = 20_000  # characters of a reply that is shown
MORE_CHANGES = 200  # of one pair
TaskKey = tuple[str, int]
"""A task: the digest of its content, and which of those that have the same one."""
Episodes = Mapping[TaskKey, list[Trajectory]]
Values = Mapping[TaskKey, np.ndarray]
"""For each task, one number a sample."""


@dataclass(frozen=True)
class Contender:
    """One model's evaluation.

    contents: digests of its tasks, by environment and id.
    conditions: what of its configuration decided the episodes, except the model.
    cost: what a paid service has counted.
    """

    name: str
    model: str
    rows: Sequence[RolloutRow]
    contents: Mapping[str, Mapping[str, str]]
    settings: Eval
    votes: Mapping[str, Vote] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    cost: float | None = None

    def episodes(self) -> dict[str, dict[TaskKey, list[Trajectory]]]:
        """The episodes by environment and task, in the order of the samples."""
        keys = {label: _numbered(digests) for label, digests in self.contents.items()}
        found: dict[str, dict[TaskKey, list[Trajectory]]] = {}
        for row in self.rows:
            tasks = found.setdefault(row.environment, {})
            tasks.setdefault(keys[row.environment][row.task], []).append(row.trajectory)
        return found


def compare(contenders: Sequence[Contender], *, shared: bool = False) -> dict[str, Any]:
    """All as plain JSON: `contenders`, `metrics`, `differences` from the first, `changes` of sides, `notes`.

    Args:
        shared: compare the tasks that all of them have, if they differ.

    Raises:
        ConfigError: the tasks differ, or none is shared.
    """
    played = [each.episodes() for each in contenders]
    played, notes = _of_shared_tasks(contenders, played, shared)
    metrics, differences, changes = [], list[dict[str, Any]](), list[dict[str, Any]]()
    for label in played[0]:
        sides = [each[label] for each in played]
        values = _values(label, contenders, sides)
        for metric, by_side in values.items():
            metrics.append(_metric(label, metric, contenders, by_side))
            for other in range(1, len(contenders)):
                differences.append(_difference(label, metric, contenders, by_side, other))
        for other in range(1, len(contenders)):
            changes += _changes(label, contenders, sides, other)
    _adjust(differences)
    result = {
        "contenders": [_about(each, sides) for each, sides in zip(contenders, played, strict=True)],
        "metrics": metrics, "differences": differences, "changes": changes,
        "notes": [*notes, *_conditions(contenders)],
    }  # fmt: skip
    return finite(result)  # type: ignore[no-any-return]


Sides = list[dict[str, dict[TaskKey, list[Trajectory]]]]


def _of_shared_tasks(contenders: Sequence[Contender], played: Sides, shared: bool) -> tuple[Sides, list[str]]:
    labels = [label for label in played[0] if all(label in each for each in played)]
    counts = [
        f"{name.name}: " + ", ".join(f"{label} {len(tasks)}" for label, tasks in each.items())
        for name, each in zip(contenders, played, strict=True)
    ]
    common = {label: [key for key in played[0][label] if all(key in each[label] for each in played)]
              for label in labels}  # fmt: skip
    number = sum(map(len, common.values()))
    alone = {label for each in played for label in each} - {*labels}
    if not number:
        raise ConfigError(
            f"these evaluations share no task, so they cannot be compared ({'; '.join(counts)} tasks); "
            "expected evaluations of the same environments, by name, with the same contents"
        )
    if alone or any(len(each[label]) != len(common[label]) for each in played for label in labels):
        words = f"these have different tasks ({'; '.join(counts)} tasks), of which {number} are shared"
        if not shared:
            raise ConfigError(f"{words}; --shared compares these")
        found = [{label: {key: each[label][key] for key in keys} for label, keys in common.items() if keys}
                 for each in played]  # fmt: skip
        return found, [f"{words}: only these are compared"]
    return played, []


def _values(
    label: str, contenders: Sequence[Contender], sides: Sequence[Episodes]
) -> dict[str, list[Values]]:
    """For each metric and contender, the samples of its tasks; those without a usable result are left out."""
    usable = [
        {key: [t for t in ts if t.has_result] for key, ts in tasks.items() if any(t.has_result for t in ts)}
        for tasks in sides
    ]
    found = dict[str, list[Values]]()
    if all(reports_success(t for ts in tasks.values() for t in ts) for tasks in usable):
        found["success"] = [_samples(tasks, success) for tasks in usable]
        found |= _of_groups(label, contenders, sides)
    for name, of in COUNTS.items():
        found[name] = [_samples(tasks, of) for tasks in usable]
    return {name: each for name, each in found.items() if all(each)}


def _samples(tasks: Episodes, of: Any) -> Values:
    return {key: np.array([of(t) for t in ts], float) for key, ts in tasks.items()}


def _of_groups(
    label: str, contenders: Sequence[Contender], sides: Sequence[Episodes]
) -> dict[str, list[Values]]:
    """pass@k and maj@k for every k that all of them were asked for; of tasks with all their samples."""
    sizes = [k for k in contenders[0].settings.pass_sizes
             if all(k in each.settings.pass_sizes for each in contenders)]  # fmt: skip
    found = dict[str, list[Values]]()
    for each, tasks in zip(contenders, sides, strict=True):
        n, vote = each.settings.samples_per_task, each.votes.get(label)
        whole = {key: ts for key, ts in tasks.items() if sum(t.has_result for t in ts) == n}
        for k in sizes:
            right = {
                key: np.array([pass_at_k(n, int(sum(map(success, ts))), k)]) for key, ts in whole.items()
            }
            found.setdefault(f"pass@{k}", []).append(right)
        if vote is not None:
            for metric, values in majorities(whole.values(), n, sizes, vote).items():
                found.setdefault(metric, []).append(dict(zip(whole, values, strict=True)))
    return {metric: values for metric, values in found.items() if len(values) == len(contenders)}


def is_share(metric: str) -> bool:
    return metric == "success" or metric.startswith(("pass@", "maj@"))


def _metric(
    label: str, metric: str, contenders: Sequence[Contender], by_side: Sequence[Values]
) -> dict[str, Any]:
    share = None if metric == "reward" else is_share(metric)  # as an evaluation has it
    rows = [
        estimate(list(values.values()), share=share, within=_range(label, metric, each))
        for each, values in zip(contenders, by_side, strict=True)
    ]
    named = [{"name": each.name, **asdict(row)} for each, row in zip(contenders, rows, strict=True)]
    return {"environment": label, "metric": metric, "share": is_share(metric), "estimates": named}


def _range(label: str, metric: str, contender: Contender) -> Range | None:
    return contender.ranges.get(label) if metric == "reward" else None


def _difference(
    label: str, metric: str, contenders: Sequence[Contender], by_side: Sequence[Values], other: int
) -> dict[str, Any]:
    """Compares the tasks that both have; `p_holm` follows."""
    a, b = by_side[0], by_side[other]
    keys = [key for key in a if key in b]
    row = {"environment": label, "metric": metric, "a": contenders[0].name, "b": contenders[other].name}
    if not keys:
        return row | {"mean": None, "ci_low": None, "ci_high": None, "p": None, "n": 0, "p_holm": None}
    sides = (_range(label, metric, contenders[0]), _range(label, metric, contenders[other]))
    within = sides[0] if sides[0] == sides[1] else None  # two rewards are no scale to compare on
    found = difference([a[key] for key in keys], [b[key] for key in keys], share=is_share(metric),
                       within=within)  # fmt: skip
    p = found.p if is_share(metric) or metric == "reward" else None
    return row | asdict(found) | {"p": p, "p_holm": None}


def _adjust(differences: Sequence[dict[str, Any]]) -> None:
    """All p-values of a comparison are one family."""
    tested = [each for each in differences if each["p"] is not None]
    for each, p in zip(tested, holm([each["p"] for each in tested]), strict=True):
        each["p_holm"] = p


def _changes(
    label: str, contenders: Sequence[Contender], sides: Sequence[Episodes], other: int
) -> list[dict[str, Any]]:
    """Tasks that one of the first and this contender solves and the other does not, the clearest first."""
    found = list[dict[str, Any]]()
    ids = {key: task for task, key in _numbered(contenders[0].contents[label]).items()}
    for key in sides[0]:
        a, b = ([t for t in side[key] if t.has_result] for side in (sides[0], sides[other]))
        if not a or not b or not any("success" in t.metrics for t in (*a, *b)):
            continue
        right = [sum(map(success, ts)) for ts in (a, b)]
        shares = [right[0] / len(a), right[1] / len(b)]
        if (shares[0] >= HALF) != (shares[1] >= HALF):
            found.append({
                "environment": label, "task": ids[key], "a": contenders[0].name, "b": contenders[other].name,
                "solved_a": int(right[0]), "of_a": len(a), "solved_b": int(right[1]), "of_b": len(b),
                "question": _question(a[0]), "reply_a": _usual(a, shares[0]), "reply_b": _usual(b, shares[1]),
                "gain": shares[1] - shares[0],
            })  # fmt: skip
    return sorted(found, key=lambda each: -abs(each["gain"]))[:MORE_CHANGES]


def _question(trajectory: Trajectory) -> str:
    shown = trajectory.turns[0].messages if trajectory.turns else ()
    return next((m.content[:MAX_REPLY] for m in shown if m.role == "user"), "")


def _usual(samples: Sequence[Trajectory], share: float) -> str:
    """The first reply of the kind that puts its model on this side: one that solves the task, or one that
    does not."""
    return _reply(next(t for t in samples if bool(success(t)) == (share >= HALF)))


def _reply(trajectory: Trajectory) -> str:
    return Attempt(trajectory.turns[-1].messages).reply[:MAX_REPLY] if trajectory.turns else ""


def _about(contender: Contender, sides: Mapping[str, Episodes]) -> dict[str, Any]:
    all_of = [(str(key), t) for tasks in sides.values() for key, ts in tasks.items() for t in ts]
    left_out = {
        label: evaluation(label, [(str(key), t) for key, ts in tasks.items() for t in ts], contender.settings)
        for label, tasks in sides.items()
    }
    return {
        "name": contender.name, "model": contender.model, "episodes": len(all_of),
        "left_out": {label: each.left_out for label, each in left_out.items()},
        "bounds": {label: dict(each.bounds) for label, each in left_out.items() if each.left_out},
        "samples_per_task": contender.settings.samples_per_task, "cost": contender.cost,
    }  # fmt: skip


def _conditions(contenders: Sequence[Contender]) -> list[str]:
    """What else than the model is not the same."""
    first, found = contenders[0], []
    for each in contenders[1:]:
        keys = changed_keys(first.conditions, each.conditions)
        if keys:
            more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
            found.append(f"{first.name} and {each.name} also differ in {', '.join(keys[:6])}{more}")
    return found


def _numbered(digests: Mapping[str, str]) -> dict[str, TaskKey]:
    """Keys of tasks by id: equal contents are told apart by their order."""
    seen = Counter[str]()
    keys = {}
    for task, digest in digests.items():
        keys[task] = (digest, seen[digest])
        seen[digest] += 1
    return keys

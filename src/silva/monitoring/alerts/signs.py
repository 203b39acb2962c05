"""Signs in the numbers of training steps that a run goes wrong, before its evaluations say so.

Each compares the last `WINDOW` steps with the first ones, or with a bound, and is quiet about a policy that
solves its tasks: such a one is sure of itself and has nothing left to learn. Signs are no proof:
docs/monitoring.md has the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median, pvariance
from typing import Any

from silva.monitoring.alerts.foretold import is_planned, seconds_of

WINDOW = 10  # steps
SOLVED = 0.8  # of training episodes

SURE = 0.1, 0.1  # entropy below this share of the first steps', and below so many nats a token
FELL = 4.0, 0.5, 0.1  # rewards: standard errors, share of what had been gained, and of the best value
SPIKE, SPIKES = 10.0, 3  # times the median norm before, in so many steps
MISMATCH = 0.1  # nats a token between trainer and sampler
FAILED = 0.1  # share of episodes without a result
CUT, REPEATED, GREW = 0.5, 0.5, 0.25  # share of replies; and how much larger than at first
TEACHING = 0.2  # share of groups that are trained on
SLOWER = 3.0, 5.0  # times the seconds of a step at first, and seconds more: others may use the machine
OFF = 1.5  # times the seconds of a step that were foretold
LONGER = 3.0  # times the tokens of a rollout at first
NO_INFORMATION = 0.1  # share of what replies could say of their prompt

Row = Mapping[str, Any]
Rows = Sequence[Row]


class Signs:
    """Those of one run. A sign is told once, and again only if it has been away for `WINDOW` steps."""

    def __init__(self, rows: Rows = (), planned: float = 0.0) -> None:
        """`rows`: of steps that an earlier process has made, whose signs have been told.

        Args:
            planned: seconds of a step that were foretold; 0: nothing was.
        """
        self._signs = dict(SIGNS)
        if planned:
            self._signs["plan"] = partial(plan, planned)
        self._rows: list[Row] = []
        self._seen: dict[str, int] = {}
        for row in rows:
            self.step(row)

    def step(self, row: Row) -> list[str]:
        """What people are told after the step of this row; rows of evaluations alone say nothing."""
        if row.get("reward/raw") is None and row.get("trajectories/played") is None:
            return []
        self._rows.append(row)
        told = []
        for name, sign in self._signs.items():
            text = sign(self._rows)
            if text and self._seen.get(name, -WINDOW - 1) < len(self._rows) - WINDOW:
                told.append(text)
            if text:
                self._seen[name] = len(self._rows)
        return told


def entropy(rows: Rows) -> str:
    first, now = _ends(rows, "train/entropy")
    if solved(rows) or rising(rows) or math.isnan(now) or now >= min(SURE[0] * first, SURE[1]):
        return ""
    return (
        f"entropy fell from {first:.3g} to {now:.3g} nats a token, and rewards do not rise: the policy says "
        "the same whatever it is asked. Try algorithm.entropy_coef or kl_coef above 0, a lower "
        "trainer.optimizer.lr, or a higher rollout.sampling.temperature; the last good weights are the best "
        "checkpoint"
    )


def reward(rows: Rows) -> str:
    values = _values(rows, "reward/raw")
    if len(values) < 3 * WINDOW:
        return ""
    parts = [values[i : i + WINDOW] for i in range(len(values) % WINDOW, len(values), WINDOW)]
    best, now, start = max(parts, key=fmean), parts[-1], fmean(parts[0])
    error = math.sqrt((pvariance(best) + pvariance(now)) / WINDOW)
    drop = fmean(best) - fmean(now)
    if drop <= max(FELL[0] * error, FELL[1] * (fmean(best) - start), FELL[2] * abs(fmean(best))):
        return ""
    return (
        f"reward in training fell from {fmean(best):.3g} to {fmean(now):.3g} (means of {WINDOW} steps). Try "
        "a lower trainer.optimizer.lr, fewer updates_per_step, or algorithm.kl_coef above 0, from the best "
        "checkpoint"
    )


def gradient(rows: Rows) -> str:
    values = _values(rows, "train/grad_norm")
    if len(values) < 2 * WINDOW:
        return ""
    usual = median(values[:-WINDOW])
    high = [value for value in values[-WINDOW:] if value > SPIKE * usual]
    if len(high) < SPIKES or not usual:
        return ""
    return (
        f"gradients are {max(high) / usual:.0f} times as large as usual ({len(high)} of the last {WINDOW} "
        "steps): in runs over several turns a collapse often follows. Try a lower trainer.optimizer.lr or "
        "max_grad_norm"
    )


def mismatch(rows: Rows) -> str:
    values = _values(rows[-WINDOW:], "train/mismatch_kl")
    if len(values) < WINDOW or fmean(values) < MISMATCH:
        return ""
    return (
        f"trainer and sampler disagree by {fmean(values):.3g} nats a token: a step moves the policy far, or "
        "the sampler computes something else. Try a lower trainer.optimizer.lr, fewer updates_per_step or a "
        "lower rollout.max_async_level; with another engine compare dtypes and kernels of both sides"
    )


def failures(rows: Rows) -> str:
    failed, played = (_values(rows[-WINDOW:], f"trajectories/{name}") for name in ("failed", "played"))
    if len(played) < WINDOW or sum(failed) <= FAILED * sum(played):
        return ""
    return (
        f"{sum(failed):.0f} of {sum(played):.0f} episodes of the last {WINDOW} steps gave no result, and the "
        "policy learns from the rest only. run.log has the first error of each kind; limits of time and "
        "tools come first"
    )


def cut(rows: Rows) -> str:
    first, now = _ends(rows, "response/cut")
    if math.isnan(now) or now < CUT or now < first + GREW:
        return ""
    return (
        f"{now:.0%} of the replies are cut off for lack of room, {first:.0%} at first. Try a higher "
        "rollout.limits.max_turn_tokens, or a reward that charges for length"
    )


def repetition(rows: Rows) -> str:
    first, now = _ends(rows, "response/repetition")
    if math.isnan(now) or now < REPEATED or now < first + GREW:
        return ""
    return (
        f"replies repeat themselves: {now:.0%} of what they say stood in them before, {first:.0%} at first. "
        "Try algorithm.kl_coef above 0, a lower trainer.optimizer.lr, or a reward for short replies"
    )


def teaching(rows: Rows) -> str:
    groups = [
        (
            row.get("groups/trained", 0),
            sum(v for k, v in row.items() if k.startswith("groups/") and v is not None),
        )
        for row in rows[-WINDOW:]
    ]
    trained, played = (sum(column) for column in zip(*groups, strict=True))
    if len(rows) < WINDOW or solved(rows) or learned(rows) or not played or trained >= TEACHING * played:
        return ""
    return (
        f"only {trained:.0f} of {played:.0f} groups of the last {WINDOW} steps taught something: in the "
        "others all episodes earned the same. Try a larger rollout.group_size, algorithm.max_refills, or "
        "tasks of another difficulty"
    )


def plan(planned: float, rows: Rows) -> str:
    """Beside `time`, which a plan without a probe leaves to the first steps."""
    now = median(map(seconds_of, rows[-WINDOW:]))
    if len(rows) < WINDOW or not is_planned(rows[-1]) or now < OFF * planned:
        return ""
    return (
        f"a step takes {now:.3g} s, {planned:.3g} s were foretold: the run ends later than was planned. "
        "perf/seconds/... says which phase it is"
    )


def time(rows: Rows) -> str:
    seconds = list(map(seconds_of, rows))
    if len(seconds) < 2 * WINDOW or not (first := median(seconds[:WINDOW])):
        return ""
    now = median(seconds[-WINDOW:])
    if now < max(SLOWER[0] * first, first + SLOWER[1]):
        return ""
    lengths = _ends(rows, "rollout/response_tokens")
    grown = (
        f"; a rollout has {lengths[1]:.0f} tokens, {lengths[0]:.0f} at first"
        if lengths[1] > 1.2 * lengths[0]
        else ""
    )
    return (
        f"a step takes {now:.3g} s, {first:.3g} s at first{grown}: the run ends later than was planned. "
        "perf/seconds/... says which phase it is"
    )


def length(rows: Rows) -> str:
    first, now = _ends(rows, "rollout/response_tokens")
    before, after = _ends(rows, "reward/raw")
    if math.isnan(now) or not first or now < LONGER * first or not after <= before:
        return ""
    return (
        f"rollouts have grown from {first:.0f} to {now:.0f} tokens and earn no more ({before:.3g} at first, "
        f"{after:.3g} now). Try a reward that charges for length, or algorithm.kl_coef above 0"
    )


def information(rows: Rows) -> str:
    key, bound = "collapse/mutual_information", "collapse/mutual_information_bound"
    known = [row for row in rows if row.get(key) is not None and row.get(bound)]
    if not known or solved(rows) or known[-1][key] >= NO_INFORMATION * known[-1][bound]:
        return ""
    if known[0][key] < NO_INFORMATION * known[0][bound]:  # it was so from the beginning
        return ""
    return (
        f"replies hardly depend on their prompts any more: {known[-1][key]:.3g} nats of mutual information "
        f"of at most {known[-1][bound]:.3g}, {known[0][key]:.3g} at first. Try fewer steps on one batch, "
        "algorithm.kl_coef above 0, or filters by variance of rewards (docs/algorithms.md)"
    )


SIGNS: Mapping[str, Callable[[Rows], str]] = {
    sign.__name__: sign
    for sign in (
        entropy,
        reward,
        gradient,
        mismatch,
        failures,
        cut,
        repetition,
        teaching,
        time,
        length,
        information,
    )
}


def solved(rows: Rows) -> bool:
    """Whether most training episodes of the last steps were solved, where environments report it."""
    shares = [
        v for row in rows[-WINDOW:] for k, v in row.items() if k.startswith("success/") and v is not None
    ]
    return bool(shares) and fmean(shares) >= SOLVED


def rising(rows: Rows) -> bool:
    """Whether rewards of the last steps are clearly above those of the steps before."""
    return _higher(_values(rows, "reward/raw")[-2 * WINDOW :])


def learned(rows: Rows) -> bool:
    """Whether they are clearly above those of the first steps: what is left to learn may be little."""
    return _higher(_values(rows, "reward/raw"))


def _higher(values: Sequence[float]) -> bool:
    if len(values) < 2 * WINDOW:
        return False
    first, now = values[:WINDOW], values[-WINDOW:]
    return fmean(now) - fmean(first) > 2 * math.sqrt((pvariance(first) + pvariance(now)) / WINDOW)


def _ends(rows: Rows, key: str) -> tuple[float, float]:
    """Means of the first and of the last `WINDOW` steps; NaN where there are not so many."""
    values = _values(rows, key)
    if len(values) < 2 * WINDOW:
        return math.nan, math.nan
    return fmean(values[:WINDOW]), fmean(values[-WINDOW:])


def _values(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None and math.isfinite(row[key])]

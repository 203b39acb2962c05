"""What a run says of its steps and episodes, to people.

    episodes ──> Activity    what they wait for; once each: a kind of fault, an environment that blocks
    steps ─────> Notices     the first one that taught nothing, and why; skipped updates; failed episodes

Counts are elsewhere (metrics, the notes of evaluations).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from silva.algorithms.settings import Algorithm
from silva.monitoring.monitor import Monitor
from silva.orchestrator.buffer import Batch
from silva.rollouts.faults import Watch, kind, tally
from silva.types import Group, Sample

MOST_KINDS = 20  # so that errors whose text never repeats do not fill the terminal
MANY_CUT = 0.25  # if a larger share of the replies is cut off, that comes first
NOTHING = "no token had an advantage other than 0 in any step"
WARN_AFTER = 1.0  # seconds for which an environment has blocked the event loop


class Activity(Watch):
    """Turns the progress of episodes into heartbeats, and faults into messages."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self.waiting: dict[str, str] = {}
        self._counts: Counter[str] = Counter()  # of its values: there may be tens of thousands
        self.done, self.total = 0, 0
        self._kinds: set[tuple[str, str]] = set()
        self._blocked: defaultdict[str, list[float]] = defaultdict(list)

    def turn(self, episode: str, waiting_for: str | None) -> None:
        if (before := self.waiting.pop(episode, None)) is not None:
            self._counts[before] -= 1
        if waiting_for is not None:
            self.waiting[episode] = waiting_for
            self._counts[waiting_for] += 1
        self._show()

    def groups(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._show()

    def fault(self, environment: str, error: str, trace: str) -> None:
        found = (environment, kind(error))
        if found in self._kinds or len(self._kinds) == MOST_KINDS:
            return
        self._kinds.add(found)
        where = " (traceback in run.log)" if trace else ""
        self.monitor.message(f"{environment}: an episode failed: {error}{where}", "warning")
        if trace:
            self.monitor.log(f"{environment}: the first fault of its kind:\n{trace}", "warning")
        if len(self._kinds) == MOST_KINDS:
            self.monitor.message("further kinds of errors are only counted", "warning")

    def blocked(self, environment: str, call: str, seconds: float) -> None:
        times = self._blocked[environment]
        warned = sum(times) >= WARN_AFTER
        times.append(seconds)
        if warned or sum(times) < WARN_AFTER:
            return
        self.monitor.message(
            f"{environment}: {call} blocks the event loop, {max(times):.1f} s at a time: no other episode "
            "runs in that time. Make long calls with `await asyncio.to_thread(...)`, or use an async "
            "library.",
            "warning",
        )

    def _show(self) -> None:
        counts = [f"{count} {name}" for name, count in sorted(self._counts.items()) if count]
        self.monitor.stage("rollout", self.done, self.total, ", ".join(counts))


class Notices:
    """Of one process."""

    def __init__(self, monitor: Monitor, recipe: Algorithm):
        self.monitor, self.recipe = monitor, recipe
        self._failures: Counter[str] = Counter()  # errors of training episodes
        self._played = 0
        self._silent = False  # whether a step that taught nothing has been explained
        self._estimated = False  # whether it has been said what the run may cost

    def step(self, batch: Batch, samples: Sequence[Sample]) -> bool:
        """Whether the step taught something. The first one that did not is explained."""
        played = [t for g in batch.groups for t in g.trajectories]
        self._played += len(played)
        self._failures.update(t.error or "" for t in played if t.failure is not None)
        taught = teaches(self.recipe, samples)
        if not taught and not self._silent:
            self._silent = True
            self._warn(explain(self.recipe, batch))
        return taught

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, whose in (("nonfinite", ""), ("critic/nonfinite", " of the critic")):
            if metrics.get(key):
                self._warn(f"step {step}: update{whose} skipped, its loss or gradient was not finite")

    def cost(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """What the steps to come may cost, once."""
        spent = metrics.get("perf/cost")
        if spent is None or self._estimated or step == steps:
            return
        self._estimated = True
        self.monitor.message(
            f"step {step} cost {spent:.4g} by the prices in [engine]: {steps - step} more like it cost about "
            f"{spent * (steps - step):.4g}, evaluations not counted"
        )

    def end(self) -> None:
        if self._failures:
            self._warn(self._failed())

    def failing(self, most: float) -> str:
        """Why a run ends in which too many episodes give no result."""
        return (
            f"more than {most:.0%} of the episodes gave no result in each of the last steps "
            f"(rollout.max_failed = {most:g}): {self._failed()}. What is trained on the rest is not what was "
            "asked for. The last step has a checkpoint: mend the cause, then --resume"
        )

    def _failed(self) -> str:
        return (
            f"{self._failures.total()} of {self._played} training episodes failed and were left out: "
            f"{tally(self._failures.elements())}"
        )

    def _warn(self, text: str) -> None:
        self.monitor.message(text, "warning")


def teaches(recipe: Algorithm, samples: Sequence[Sample]) -> bool:
    """Whether the loss of these rows depends on what was played.

    If not, an entropy bonus or the pull towards the reference may still change the policy.
    """
    if recipe.imitates:
        return bool(samples)
    return any(s.advantages is not None and bool(s.advantages[s.loss_weights > 0].any()) for s in samples)


def explain(recipe: Algorithm, batch: Batch) -> str:
    """One or two sentences on why the rows of a batch teach nothing."""
    counts = Counter(d.reason for d in batch.dropped)
    if batch.kept:
        what = "trained on rows whose advantages are all 0"
    else:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        what = f"trained nothing, since all {len(batch.dropped)} groups were left out ({reasons})"
    if counts["too_easy"] or counts["too_hard"]:
        advice = f"algorithm.difficulty_range = {list(recipe.difficulty_range or ())} may be too narrow."
    else:
        only_failed = counts["failed"] and len(counts) == 1
        advice = "Every episode failed." if only_failed else same_rewards(batch.groups)
    return f"step {batch.step} {what}. {advice}"


def share_cut(groups: Sequence[Group]) -> float:
    """Of the replies: how many ended for lack of room."""
    turns = [turn for group in groups for turn in group.turns]
    return sum(turn.cut for turn in turns) / max(1, len(turns))


def same_rewards(groups: Sequence[Group]) -> str:
    """What to change if the episodes of each of these groups earned the same."""
    cut = share_cut(groups)
    first = (
        f"{cut:.0%} of the replies were cut off for lack of room (response/cut), perhaps before an answer: "
        "first raise rollout.limits.max_turn_tokens (or max_episode_tokens). "
    )
    rewards = [t.raw_reward for group in groups for t in group.scored]
    mean = sum(rewards) / max(1, len(rewards))
    return (first if cut > MANY_CUT else "") + (
        f"The episodes of a task all earned the same reward ({mean:.3g} on average): raise "
        "rollout.group_size or algorithm.max_refills, choose easier or harder tasks, or begin with "
        "[warm_start]."
    )

"""What a run says of its steps: the first one that taught nothing, skipped updates, failed episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from silva.algorithms.settings import Algorithm
from silva.monitoring.monitor import Monitor
from silva.orchestrator import silence
from silva.orchestrator.buffer import Batch
from silva.rollouts.faults import tally
from silva.types import Sample


class Notices:
    """Of one process."""

    def __init__(self, monitor: Monitor, recipe: Algorithm):
        self.monitor, self.recipe = monitor, recipe
        self._failures: Counter[str] = Counter()  # errors of training episodes
        self._played = 0
        self._silent = False  # whether a step that taught nothing has been explained

    def step(self, batch: Batch, samples: Sequence[Sample]) -> bool:
        """Whether the step taught something. The first one that did not is explained."""
        played = [t for g in batch.groups for t in g.trajectories]
        self._played += len(played)
        self._failures.update(t.error or "" for t in played if t.failure is not None)
        taught = silence.teaches(self.recipe, samples)
        if not taught and not self._silent:
            self._silent = True
            self._warn(silence.explain(self.recipe, batch))
        return taught

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, whose in (("nonfinite", ""), ("critic/nonfinite", " of the critic")):
            if metrics.get(key):
                self._warn(f"step {step}: update{whose} skipped, its loss or gradient was not finite")

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

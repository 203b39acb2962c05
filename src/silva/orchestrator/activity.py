"""What happens in episodes, for people: what they wait for, what failed, which environment blocks.

Everything is reported once: the first fault of each kind, with its traceback in run.log, and an environment
that blocks for too long. Counts are elsewhere (metrics, the notes of evaluations).
"""

from __future__ import annotations

from collections import defaultdict

from silva.monitoring.monitor import Monitor
from silva.rollouts.faults import Watch, kind

MOST_KINDS = 20  # so that errors whose text never repeats do not fill the terminal
TOLD_AFTER = 1.0  # seconds for which an environment has blocked the event loop


class Activity(Watch):
    """Turns the progress of episodes into heartbeats, and faults into messages."""

    def __init__(self, monitor: Monitor):
        self.monitor = monitor
        self.waiting: dict[str, str] = {}
        self.done, self.total = 0, 0
        self._kinds: set[tuple[str, str]] = set()
        self._blocked: defaultdict[str, list[float]] = defaultdict(list)

    def turn(self, episode: str, waiting_for: str | None) -> None:
        if waiting_for is None:
            self.waiting.pop(episode, None)
        else:
            self.waiting[episode] = waiting_for
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
        told = sum(times) >= TOLD_AFTER
        times.append(seconds)
        if told or sum(times) < TOLD_AFTER:
            return
        self.monitor.message(
            f"{environment}: {call} blocks the event loop, {max(times):.1f} s at a time: no other episode "
            "runs in that time. Make long calls with `await asyncio.to_thread(...)`, or use an async "
            "library.",
            "warning",
        )

    def _show(self) -> None:
        names = sorted(set(self.waiting.values()))
        counts = [f"{list(self.waiting.values()).count(name)} {name}" for name in names]
        self.monitor.stage("rollout", self.done, self.total, ", ".join(counts))

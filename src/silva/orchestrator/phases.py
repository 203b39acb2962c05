"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Phases:
    """Wall-clock seconds by phase: of the step, and of the whole run (kept over a resume).

    `during` of its name is entered for as long as a phase lasts.
    """

    def __init__(self, during: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()):
        self._during = during
        self.total: defaultdict[str, float] = defaultdict(float)
        self.step: defaultdict[str, float] = defaultdict(float)

    def state(self) -> dict[str, float]:
        return dict(self.total)

    def load(self, state: Mapping[str, float]) -> None:
        """Add what the run took until its checkpoint; this process has loaded its parts already."""
        for name, seconds in state.items():
            self.total[name] += seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with self._during(name):
                yield
        finally:
            seconds = time.perf_counter() - began
            self.step[name] += seconds
            self.total[name] += seconds

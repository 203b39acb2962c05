"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Phases:
    """Wall-clock seconds by phase: of the step, and of the whole run (kept over a resume).

    `during` of its name is entered for as long as a phase lasts.
    """

    def __init__(
        self,
        total: dict[str, float] | None = None,
        during: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ):
        self._during = during
        self.total: defaultdict[str, float] = defaultdict(float, total or {})
        self.step: defaultdict[str, float] = defaultdict(float)

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

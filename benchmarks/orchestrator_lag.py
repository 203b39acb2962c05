"""For orchestrator.py: how late the event loop is while many episodes are live."""

from __future__ import annotations

import asyncio
import gc
import selectors
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
from common import Row
from orchestrator_play import Case, play_all, repeated_tasks, replies
from scripted_engine import ScriptedEngine

from silva import process
from silva.rendering.renderer import Renderer
from silva.types import Completion, SamplingParams, Task

LIVE = 512  # episodes while lag is measured
LATENCY = (0.2, 0.6)  # seconds an answer takes meanwhile
TICK = 0.002


class DedicatedCore(asyncio.SelectorEventLoop):
    """An event loop whose time is the CPU time of this process, and waiting, which passes at once.

    So lag is what a core of its own would show, whatever else the machine does.
    """

    def __init__(self) -> None:
        super().__init__(_Waits(self))
        self.waited = 0.0

    def time(self) -> float:
        return time.process_time() + self.waited


class _Waits(selectors.DefaultSelector):
    def __init__(self, loop: DedicatedCore) -> None:
        super().__init__()
        self._loop, self._threads = loop, threading.active_count()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or threading.active_count() > self._threads:  # a tool is at work
            return super().select(0.001)
        self._loop.waited += timeout
        return super().select(0)


class Paced(ScriptedEngine):
    """Answers after a while, drawn by the turn's seed; with `beat` together with all others, on a beat."""

    def __init__(self, case: Case, renderer: Renderer, beat: float) -> None:
        super().__init__(replies(case, renderer))
        self.beat, self.asked, self.started = beat, 0, float("inf")

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        self.asked += 1
        now = asyncio.get_running_loop().time()
        if self.asked == LIVE:
            self.started = now
        low, high = LATENCY
        wait = self.beat - now % self.beat if self.beat else low + (high - low) * (params.seed % 1024) / 1024
        await asyncio.sleep(wait)
        return await super().sample(tokens, params, session=session)


def lag(case: Case, repeats: int) -> list[Row]:
    tasks, _ = repeated_tasks(case, 4 * LIVE)
    spread, frozen, together = [], [], []
    for _ in range(repeats):
        spread.append(_lags(case, tasks))
        with process.loaded():
            frozen.append(_lags(case, tasks))
        together.append(_lags(case, tasks, beat=LATENCY[0]))
    found = [
        (spread, "p99", "answers spread", ""),
        (spread, "longest", "answers spread", ""),
        (frozen, "p99", "answers spread, start-up frozen", "< 20"),
        (frozen, "longest", "answers spread, start-up frozen", ""),
        (together, "p99", "all answers at once", ""),
        (frozen, "start", "all starts at once, start-up frozen", ""),
    ]
    rows = []
    for runs, which, how, target in found:
        value = statistics.median(lags[which] for lags in runs) * 1000
        rows.append(Row(case.name, f"{which} of lag, {LIVE} live, {how}", value, "ms", target=target))
    return rows


def _lags(case: Case, tasks: Sequence[Task], beat: float = 0.0) -> dict[str, float]:
    """Seconds: p99 and longest once all episodes have asked for an answer; `start`: the longest before."""
    renderer = Renderer(case.tokenizer)
    engine = Paced(case, renderer, beat)
    ticks: list[tuple[float, float]] = []

    async def run() -> None:
        watching = asyncio.create_task(probe(ticks))
        await play_all(case, renderer, tasks, LIVE, engine, [])
        watching.cancel()

    gc.collect()
    with asyncio.Runner(loop_factory=DedicatedCore) as runner:
        runner.run(run())
    start = [late for due, late in ticks if due < engine.started]
    after = [late for due, late in ticks if due >= engine.started]
    return {"p99": float(np.percentile(after, 99)), "longest": max(after), "start": max(start, default=0.0)}


async def probe(ticks: list[tuple[float, float]]) -> None:
    """When each tick was due and how late it came; those that passed unseen count too."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += TICK
        await asyncio.sleep(max(0.0, due - loop.time()))
        now = loop.time()
        ticks.append((due, now - due))
        while due + TICK < now:
            due += TICK
            ticks.append((due, now - due))

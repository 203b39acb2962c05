"""For orchestrator.py --live: what 10,000 to 100,000 live episodes cost the process that keeps the books.

Everything of a step that is neither model nor trainer is that of `silva rl`: tasks are drawn and issued,
episodes played, whom they wait for is counted, groups sealed in a ledger on disk. Each number of episodes
has a process of its own, and all of them are live at once. Answers take so long that the core is busy `BUSY`
of the time (Little's law: latency = live * CPU of a turn / BUSY; that CPU is measured with few before).
Log-probabilities and tokens are objects of their own in every answer, as those are that come from a server.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from common import Row
from orchestrator_lag import DedicatedCore, probe
from orchestrator_play import GROUP, LIMITS, Case, replies
from scripted_engine import ScriptedEngine

from silva import process
from silva.algorithms.recipes import Grpo
from silva.monitoring.monitor import Monitor
from silva.monitoring.settings import Monitoring
from silva.orchestrator.buffer import Batch, Buffer
from silva.orchestrator.notices import Activity
from silva.orchestrator.tasks import Source, TaskStream
from silva.orchestrator.work import WorkQueue
from silva.rendering.renderer import Renderer
from silva.rollouts.linear import Linear
from silva.rollouts.settings import LinearRolloutSettings
from silva.storage.ledger import Ledger
from silva.types import Completion, SamplingParams

BUSY = 0.5
FEW = 200  # episodes from which the latency is reckoned


class Served(ScriptedEngine):
    """Answers as a server does, `latency` seconds later, half as many or half as many more by the seed.

    Attributes:
        started: seconds of the loop's clock when every episode had asked for its first answer.
        resident: bytes of the process when the episodes were half played.
    """

    def __init__(self, case: Case, renderer: Renderer, live: int, half: int, latency: float) -> None:
        super().__init__(replies(case, renderer))
        self.requests = _Forgets()
        self.live, self.half, self.latency, self.asked = live, half, latency, 0
        self.started, self.resident = float("inf"), 0

    async def sample(self, tokens: Sequence[int], params: SamplingParams, *, session: str = "") -> Completion:
        self.asked += 1
        if self.asked == self.live:
            self.started = asyncio.get_running_loop().time()
        if self.asked == self.half:
            self.resident = resident()
        if self.latency:
            await asyncio.sleep(self.latency * (0.5 + params.seed % 1024 / 1024))
        found = await super().sample(tokens, params, session=session)
        own = tuple(-0.5 - place / 4096 for place in range(len(found.tokens)))
        apart = (tuple(number - step for number in own) for step in (0.0, 0.25, 0.5))
        logprobs, raw, entropies = apart
        ids = tuple(token + 0 for token in found.tokens)
        return replace(found, tokens=ids, logprobs=logprobs, raw_logprobs=raw, entropies=entropies)


class _Forgets(list):  # type: ignore[type-arg]
    """The engine's log of requests would be most of the memory."""

    def append(self, _: object) -> None:
        pass


def live_rows(case: Case, live: int, turns: int) -> list[Row]:
    """turns: of an episode at most."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(_measured, case, live, turns).result()


def _measured(case: Case, live: int, most: int) -> list[Row]:
    name = f"{case.name}, {live:,} live"
    few = min(live, FEW)
    cpu, batch, *_ = _step(case, few, most, latency=0.0)
    latency = live * cpu / _turns(batch) / BUSY
    del batch
    cpu, batch, engine, (before, ticks) = _step(case, live, most, latency)
    kept, half, cost = resident() - before, engine.resident - before, cpu / _turns(batch)
    late = [late for due, late in ticks if due >= engine.started]
    start = max((late for due, late in ticks if due < engine.started), default=0.0)
    return [
        Row(name, "turns on one core", 1 / cost, "/s"),
        Row(name, "cost of a turn", cost * 1e6, "µs"),
        Row(name, "memory of a live episode, half played", half / live / 1024, "KiB"),
        Row(name, "memory of an episode that is kept", kept / live / 1024, "KiB"),
        Row(name, f"p50 of lag, core {BUSY:.0%} busy", float(np.percentile(late, 50)) * 1e3, "ms"),
        Row(name, f"p99 of lag, core {BUSY:.0%} busy", float(np.percentile(late, 99)) * 1e3, "ms"),
        Row(name, f"longest lag, core {BUSY:.0%} busy", max(late) * 1e3, "ms"),
        Row(name, "longest lag while all begin", start * 1e3, "ms"),
    ]


def _turns(batch: Batch) -> int:
    return sum(len(t.turns) for group in batch.groups for t in group.trajectories)


def _step(
    case: Case, live: int, most: int, latency: float
) -> tuple[float, Batch, Served, tuple[int, list[tuple[float, float]]]]:
    """Play one step of `live` episodes: CPU seconds, its batch, the engine, memory before and ticks."""
    with tempfile.TemporaryDirectory() as folder, process.loaded():
        ticks = list[tuple[float, float]]()
        renderer = Renderer(case.tokenizer)
        engine = Served(case, renderer, live, int(live * most / 2), latency)
        collecting = _buffer(case, renderer, engine, Path(folder), live, most)
        gc.collect()
        before, began = resident(), time.process_time()

        played = list[Batch]()  # no result of `run`: asyncio makes a text of that in the end

        async def run() -> None:
            watching = asyncio.create_task(probe(ticks)) if latency else None
            played.append(await collecting.collect(0, 1.0))
            if watching:
                watching.cancel()

        with asyncio.Runner(loop_factory=DedicatedCore if latency else None) as runner:
            runner.run(run())
        return time.process_time() - began, played[0], engine, (before, ticks)


def _buffer(case: Case, renderer: Renderer, engine: Served, folder: Path, live: int, most: int) -> Buffer:
    """As `silva rl` has it, around an engine without a model."""
    limits = LIMITS.model_copy(update={"max_turns": most})
    settings = LinearRolloutSettings(groups_per_step=live // GROUP, group_size=GROUP, limits=limits)
    monitor = Monitor(folder, Monitoring(terminal="off"), name="live", total_steps=1)
    activity, ledger = Activity(monitor), Ledger.create(folder / "ledger.jsonl")
    rollout = Linear(settings, engine, renderer, seed=0, on_turn=activity.turn, watch=activity)
    tasks = case.settings.model_copy(update={"train_size": live}).taskset()
    stream = TaskStream([Source("lake", tasks, 1.0)], 0)
    batch = settings.groups_per_step
    work = WorkQueue(stream, rollout, ledger, batch=batch, steps=0, on_played=activity.groups)
    recipe = Grpo.model_validate({"drop_zero_variance": False})
    return Buffer(work, recipe, ledger, settings)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

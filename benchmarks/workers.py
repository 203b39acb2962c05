"""Environments that compute for 5 ms a step: in the process of the event loop, and in worker processes.

    .venv/bin/python benchmarks/workers.py --json workers.json          about 2 minutes
    .venv/bin/python benchmarks/workers.py --live 100                   a few seconds

All episodes are live at once; each takes 3 steps. Lag is how late a timer of the event loop fires, in
wall-clock time. The limit for steps a second is the machine's cores, each busy for 5 ms a step.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, machine, parser, results, write

from silva.environments.process.worker import settings_of
from silva.environments.process.workers import Workers
from silva.types import Message

TYPE = f"{Path(__file__).parent}/environments/busy_lake.py:BusyLake"
WORK = 0.005  # seconds of CPU a step, as in busy_lake.py
STEPS = 3
TICK = 0.005
REPLY = Message("assistant", "<think>Next: Left.</think><answer>Left</answer>")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--live", type=int, default=1000, help="episodes at once (default 1,000)")
    options.add_argument("--repeats", type=int, default=3, help="interleaved measurements (default 3)")
    given = options.parse_args()
    cores = os.cpu_count() or 1
    speed, words = machine()
    found: dict[int, list[dict[str, float]]] = {0: [], 1: [], cores: []}
    for _ in range(given.repeats):
        for workers, runs in found.items():
            runs.append(asyncio.run(measure(workers, given.live)))
    rows = [speed]
    for workers, runs in found.items():
        case = f"{given.live:,} live, {f'{workers} workers' if workers else 'in the event loop'}"
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rate = middle.pop("steps")
        at_best = (workers or 1) / WORK
        rows.append(Row(case, "steps", rate, "/s", "cores x 5 ms", rate / at_best))
        target = "< 20" if workers else ""
        rows += [Row(case, f"{name} of lag", value * 1000, "ms", target=target if name == "p99" else "")
                 for name, value in middle.items()]  # fmt: skip
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


async def measure(workers: int, live: int) -> dict[str, float]:
    """Steps a second; p99 and longest lag in seconds."""
    settings = settings_of(TYPE)(type=TYPE, workers=workers, train_size=live, eval_size=4)
    taskset: Any = Workers(settings) if workers else settings.taskset()
    tasks = taskset.tasks("train")[:live]
    await episode(taskset, tasks[0])  # starts one worker; the other one starts within the measurement
    late: list[float] = []
    probe = asyncio.create_task(_probe(late))
    began = time.perf_counter()
    await asyncio.gather(*(episode(taskset, task) for task in tasks))
    seconds = time.perf_counter() - began
    probe.cancel()
    if workers:
        taskset.close()
    return {"steps": live * STEPS / seconds, "p99": float(np.percentile(late, 99)), "longest": max(late)}


async def episode(taskset: Any, task: Any) -> None:
    environment = taskset.environment(task)
    await environment.reset()
    for _ in range(STEPS):
        step = await environment.step(REPLY)
        if step.terminated or step.truncated:
            break
        await asyncio.sleep(0)  # as an engine would be waited for
    await environment.close()


async def _probe(late: list[float]) -> None:
    """How late each tick comes; those that passed unseen count too."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += TICK
        await asyncio.sleep(max(0.0, due - loop.time()))
        late.append(loop.time() - due)
        while due + TICK < loop.time():
            due += TICK
            late.append(loop.time() - due)


if __name__ == "__main__":
    raise SystemExit(main())

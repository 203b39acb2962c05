"""What the rollout path costs without a model: environments, rendering, limits, records and the event loop.

    .venv/bin/python benchmarks/orchestrator.py --json orchestrator.json     about 15 minutes
    .venv/bin/python benchmarks/orchestrator.py --quick                      one environment, under a minute
    .venv/bin/python benchmarks/orchestrator.py --live 10000,30000,100000    see orchestrator_live.py

Whole episodes are played through the strategy `linear`; the engine answers at once, with replies drawn by
the seed of each turn. The same episodes are played with 1, 100 and 10,000 of them live, in turns; all
records are kept, as those of a step are. Costs are CPU time of this process on one core, so that other load
on the machine does not count; medians over the repeats. Where the time goes is sampled every millisecond.
Lag is how late a timer of the event loop fires. The peer is verifiers (`make peers PEERS=verifiers`), its
loop in one process around the same FrozenLake, tokenizer, replies and number of live episodes; see
peers/verifiers_loop.py.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import silva  # noqa: F401  # isort: skip  (before torch, which reads at its start what this sets)
import torch
from common import Row, machine, parser, results, write
from orchestrator_lag import lag
from orchestrator_live import live_rows
from orchestrator_play import LIMITS, Case, Played, cases, play, repeated_tasks

from silva import process
from silva.models.loading import PACKAGED, resolve
from silva.rendering.renderer import Renderer
from silva.rollouts.samples import to_samples

HERE = Path(__file__).parent
PEER_LIVE = 100
PARTS = {
    "/silva/rendering/": "rendering and tokens",
    "/transformers/": "rendering and tokens",
    "/jinja2/": "rendering and tokens",
    "/silva/environments/": "environment",
    "/silva/tools/": "environment",
    "/gymnasium/": "environment",
    "/silva/rollouts/": "episode and records",
    "/silva/types.py": "episode and records",
    "/silva/ports.py": "episode and records",
    "/silva/engines/": "engine",
    "/asyncio/": "asyncio",
}
COLLECTION = "garbage collection"


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--quick", action="store_true", help="one environment, bytes, 1,000 episodes, no peer"
    )
    options.add_argument("--episodes", type=int, help="episodes of a measurement (default 10,000)")
    options.add_argument("--repeats", type=int, help="interleaved measurements of each case (default 3)")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument(
        "--live", type=_sizes_of, help="only the books: a step of so many episodes, all live"
    )
    options.add_argument("--turns", type=int, default=5, help="of a live episode, at most (default 5)")
    options.add_argument("--peer-python", type=Path, default=HERE.parent / ".peers/verifiers/bin/python",
                         help="Python of an environment with benchmarks/peers/verifiers.txt")  # fmt: skip
    given = options.parse_args()
    episodes = given.episodes or (1000 if given.quick else 10_000)
    repeats = given.repeats or (1 if given.quick else 3)
    _one_core()
    speed, words = machine()
    rows = [speed]
    if given.live:
        played = next(case for case in cases(given.quick) if given.only in case.name)
        for live in given.live:
            rows += live_rows(played, live, given.turns)
            write(rows, given.json)
        print(words, "", results(rows[1:]), sep="\n")
        return 0
    for case in cases(given.quick):
        if given.only not in case.name:
            continue
        print(f"... {case.name}", file=sys.stderr, flush=True)
        rows += measure(case, episodes, repeats)
        rows += lag(case, repeats)
        if "SmolLM2" in case.name and "frozen_lake" in case.name:
            rows += peer(case, given.peer_python, episodes // 10, repeats)
        write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


def measure(case: Case, episodes: int, repeats: int) -> list[Row]:
    tasks, drawing = repeated_tasks(case, episodes)
    few, many = min(100, episodes // 10), episodes
    rows = _sizes(case, play(case, tasks[: episodes // 10], few))
    rows.append(Row(case.name, "cost of drawing a task", drawing, "µs"))
    costs: dict[int, list[float]] = {1: [], few: [], many: []}
    frozen, digests = [], set()
    for _ in range(repeats):
        for width, found in costs.items():
            played = play(case, tasks, width)
            found.append(played.cost)
            digests.add(played.digest)
            del played
        with process.loaded():
            frozen.append(play(case, tasks, many).cost)
    if len(digests) > 1:  # a tool ran into its limit of time, on a machine that was very busy
        print(f"{case.name}: the episodes were not the same every time", file=sys.stderr)
    for width, found in costs.items():
        cost = statistics.median(found)
        rows.append(Row(case.name, f"turns on one core, {width:,} live", 1e6 / cost, "/s"))
        flat = (f"{few:,} live", _ratio(costs[few], found), ">= 0.77") if width == many else ()
        rows.append(Row(case.name, f"cost of a turn, {width:,} live", cost, "µs", *flat))
    cost, less = statistics.median(frozen), _ratio(costs[many], frozen)
    name = f"cost of a turn, {many:,} live, start-up frozen"
    rows.append(Row(case.name, name, cost, "µs", f"{many:,} live", less))
    for width in (few, many):
        profile = Profile()
        play(case, tasks, width, profile)
        total = sum(profile.seconds.values())
        rows += [
            Row(case.name, f"share, {width:,} live: {part}", seconds / total, "")
            for part, seconds in profile.seconds.most_common()
        ]
    return rows


def _sizes(case: Case, played: Played) -> list[Row]:
    trajectories = [t for group in played.groups for t in group.trajectories]
    began = time.process_time()
    to_samples(played.groups)
    cost = (time.process_time() - began) / played.turns * 1e6
    return [
        Row(case.name, "turns of an episode", played.turns / len(trajectories), ""),
        Row(case.name, "tokens of an episode", sum(t.tokens() for t in trajectories) / len(trajectories), ""),
        Row(case.name, "cost of a turn in a training row (to_samples)", cost, "µs"),
    ]


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


class Profile:
    """CPU seconds by part of the code: the innermost frame that belongs to one, every millisecond."""

    def __init__(self) -> None:
        self.seconds: Any = Counter()  # float seconds, which typeshed denies a Counter
        self._parts: dict[str, str | None] = {}
        self._last = self._collecting = self._collected = 0.0

    def __enter__(self) -> Profile:
        gc.callbacks.append(self._collect)
        self._last = time.process_time()
        signal.signal(signal.SIGALRM, self._sample)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.callbacks.remove(self._collect)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        if self._collecting:  # the next sample will tell them apart
            return
        now = time.process_time()
        self.seconds[COLLECTION] += self._collected
        self.seconds[self._part(frame)] += now - self._last - self._collected
        self._last, self._collected = now, 0.0

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.process_time()
        else:
            self._collected += time.process_time() - self._collecting
            self._collecting = 0.0

    def _part(self, frame: FrameType | None) -> str:
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._parts:
                self._parts[file] = next((part for path, part in PARTS.items() if path in file), None)
            if part := self._parts[file]:
                return part
            frame = frame.f_back
        return "other"


def peer(case: Case, python: Path, episodes: int, repeats: int) -> list[Row]:
    if not python.exists():
        print(f"left out: verifiers ({python} is not there)", file=sys.stderr)
        return []
    tasks, _ = repeated_tasks(case, episodes)
    job = {
        "tokenizer": resolve(PACKAGED),
        "live": PEER_LIVE,
        "turns": LIMITS.max_turns,
        "replies": [Renderer(case.tokenizer).encode_reply(text) for text in case.replies],
        "tasks": [[task.id, task.seed, task.data] for task in tasks],
    }
    rows = []
    for renderer in ("qwen3", "default"):
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(play(case, tasks, PEER_LIVE).cost)
            answer = _ask(python, {**job, "renderer": renderer})
            theirs.append(answer["seconds"] / answer["turns"] * 1e6)
        against = f"verifiers {answer['version']}, its renderer {renderer}"
        rows += [
            Row(case.name, f"turns of an episode, {against}", answer["turns"] / episodes, ""),
            Row(case.name, f"cost of a turn, {against}", statistics.median(theirs), "µs"),
            Row(case.name, f"cost of a turn, {PEER_LIVE} live", statistics.median(ours), "µs", against,
                _ratio(theirs, ours)),
        ]  # fmt: skip
    return rows


def _ask(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    command = [python, HERE / "peers" / "verifiers_loop.py"]
    done = subprocess.run(command, input=json.dumps(job), text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _sizes_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    sys.exit(main())

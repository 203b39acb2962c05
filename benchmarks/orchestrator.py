"""What the rollout path costs without a model: environments, rendering, limits, records and the event loop.

    .venv/bin/python benchmarks/orchestrator.py --json orchestrator.json     about 15 minutes
    .venv/bin/python benchmarks/orchestrator.py --quick                      byte tokenizer, under a minute

Whole episodes are played through the strategy `linear`; the engine answers at once, with replies drawn by
the seed of each turn. The same episodes are played with 1, 100 and 10,000 of them live, in turns; all
records are kept, as those of a step are. Costs are CPU time of this process on one core, so that other load
on the machine does not count; medians over the repeats. Where the time goes is sampled every millisecond.
Lag is how late a timer of the event loop fires. The peer is verifiers (`make peers PEERS=verifiers`), its
loop in one process around the same FrozenLake, tokenizer, replies and number of live episodes; see
peers/verifiers_loop.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from common import Row, machine, parser, results, write
from transformers import AutoTokenizer

from silva.config.sections import Limits
from silva.engines.scripted import ScriptedEngine
from silva.environments.calculator import Calculator
from silva.environments.frozen_lake import FrozenLake
from silva.ledger import token_digest
from silva.models.loading import PACKAGED, resolve
from silva.models.tiny import tiny_tokenizer
from silva.rendering.renderer import Renderer
from silva.rollouts.linear import Linear
from silva.rollouts.samples import to_samples
from silva.rollouts.settings import LinearRollout
from silva.types import Completion, Group, SamplingParams, Task

HERE = Path(__file__).parent
GROUP = 8  # episodes of one task
LIMITS = Limits()
LIVE = 512  # episodes while lag is measured
LATENCY = (0.2, 0.6)  # seconds an answer takes meanwhile
TICK = 0.002
PEER_LIVE = 100

MOVES = tuple(
    f"<think>Next: {move}.</think><answer>{move}</answer>" for move in ("Left", "Down", "Right", "Up")
)
CALLS = (
    *(
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{sum}"}}}}\n</tool_call>'
        for sum in ("12 + 7", "98 - 45", "(3 + 4) * 5")
    ),
    "The answer is 19.",
)

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


@dataclass(frozen=True)
class Case:
    """A world with the replies its players draw from."""

    name: str
    settings: Any
    replies: Sequence[str]
    tokenizer: Any


@dataclass(frozen=True)
class Played:
    groups: Sequence[Group]
    seconds: float  # of CPU

    @property
    def turns(self) -> int:
        return sum(len(t.turns) for group in self.groups for t in group.trajectories)

    @property
    def digest(self) -> str:
        """Of every token and reward, whatever order the episodes ended in."""
        trajectories = sorted((t for group in self.groups for t in group.trajectories), key=lambda t: t.id)
        tokens = token_digest(s.tokens for t in trajectories for turn in t.turns for s in turn.segments)
        return f"{tokens} {[t.raw_reward for t in trajectories]}"

    @property
    def cost(self) -> float:
        """Microseconds a turn."""
        return self.seconds / self.turns * 1e6


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="byte tokenizer, 1,000 episodes, no peer")
    options.add_argument("--episodes", type=int, help="episodes of a measurement (default 10,000)")
    options.add_argument("--repeats", type=int, help="interleaved measurements of each case (default 3)")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument("--peer-python", type=Path, default=HERE.parent / ".peers/verifiers/bin/python",
                         help="Python of an environment with benchmarks/peers/verifiers.txt")  # fmt: skip
    given = options.parse_args()
    episodes = given.episodes or (1000 if given.quick else 10_000)
    repeats = given.repeats or (1 if given.quick else 3)
    _one_core()
    speed, words = machine()
    rows = [speed]
    for case in cases(given.quick):
        if given.only not in case.name:
            continue
        print(f"... {case.name}", file=sys.stderr, flush=True)
        rows += measure(case, episodes, repeats)
        rows += lag(case, repeats)
        if "SmolLM2" in case.name and "frozen_lake" in case.name:
            rows += peer(case, given.peer_python, episodes // 10, repeats)
    print(words, "", results(rows[1:]), sep="\n")
    write(rows, given.json)
    return 0


def cases(quick: bool) -> list[Case]:
    tokenizers: dict[str, Any] = {"bytes": tiny_tokenizer()}
    if not quick:
        tokenizers["SmolLM2"] = AutoTokenizer.from_pretrained(resolve(PACKAGED))
    worlds: dict[str, tuple[Any, Sequence[str]]] = {
        "frozen_lake": (FrozenLake(train_size=1 << 20), MOVES),
        "calculator": (Calculator(train_size=1 << 20), CALLS),
    }
    return [
        Case(f"{world}, {name}", settings, replies, tokenizer)
        for name, tokenizer in tokenizers.items()
        for world, (settings, replies) in worlds.items()
    ]


# --- cost


def measure(case: Case, episodes: int, repeats: int) -> list[Row]:
    tasks, drawing = _tasks(case, episodes)
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
        with _frozen():
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


def play(case: Case, tasks: Sequence[Task], live: int, profile: Profile | None = None) -> Played:
    """Play one episode of every task, `live` of them at a time, with nothing in any cache."""
    renderer, groups = Renderer(case.tokenizer), []
    engine = ScriptedEngine(_replies(case, renderer))
    gc.collect()
    began = time.process_time()
    with profile or contextlib.nullcontext():
        asyncio.run(_play(case, renderer, tasks, live, engine, groups))
    return Played(groups, time.process_time() - began)


async def _play(
    case: Case,
    renderer: Renderer,
    tasks: Sequence[Task],
    live: int,
    engine: ScriptedEngine,
    groups: list[Group],
) -> None:
    engine.requests = deque(maxlen=0)  # type: ignore[assignment]  # its log would be most of the memory
    taskset = case.settings.taskset()
    strategy = Linear(LinearRollout(group_size=1, limits=LIMITS), renderer, seed=0)
    waiting = iter(enumerate(tasks))

    async def work() -> None:
        for number, task in waiting:
            async for group in strategy.run(task, taskset, engine, key=f"s0g{number}"):
                groups.append(group)

    await asyncio.gather(*(work() for _ in range(live)))


def _tasks(case: Case, episodes: int) -> tuple[list[Task], float]:
    """GROUP times each task, and microseconds to draw one."""
    drawn = case.settings.taskset().tasks("train")
    count = -(-episodes // GROUP)
    began = time.process_time()
    tasks = drawn[:count]
    cost = (time.process_time() - began) / count * 1e6
    return [task for task in tasks for _ in range(GROUP)][:episodes], cost


def _replies(case: Case, renderer: Renderer) -> Callable[[Sequence[int], SamplingParams], Sequence[int]]:
    encoded = [tuple(renderer.encode_reply(text)) for text in case.replies]
    return lambda context, params: encoded[params.seed % len(encoded)]


class Profile:
    """CPU seconds by part of the code: the innermost frame that belongs to one, every millisecond."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
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


# --- lag


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
        super().__init__(_replies(case, renderer))
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
    tasks, _ = _tasks(case, 4 * LIVE)
    spread, frozen, together = [], [], []
    for _ in range(repeats):
        spread.append(_lags(case, tasks))
        with _frozen():
            frozen.append(_lags(case, tasks))
        together.append(_lags(case, tasks, beat=LATENCY[0]))
    found = [
        (spread, "p99", "answers spread", "< 20"),
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
        probe = asyncio.create_task(_probe(ticks))
        await _play(case, renderer, tasks, LIVE, engine, [])
        probe.cancel()

    gc.collect()
    with asyncio.Runner(loop_factory=DedicatedCore) as runner:
        runner.run(run())
    start = [late for due, late in ticks if due < engine.started]
    after = [late for due, late in ticks if due >= engine.started]
    return {"p99": float(np.percentile(after, 99)), "longest": max(after), "start": max(start, default=0.0)}


async def _probe(ticks: list[tuple[float, float]]) -> None:
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


# --- the peer


def peer(case: Case, python: Path, episodes: int, repeats: int) -> list[Row]:
    if not python.exists():
        print(f"left out: verifiers ({python} is not there)", file=sys.stderr)
        return []
    tasks, _ = _tasks(case, episodes)
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


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What is alive now is left out of garbage collection, as a program may do once it has loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    sys.exit(main())

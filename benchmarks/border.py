"""What does a border between processes cost? Steps, weight updates and requests, local against services.

    .venv/bin/python benchmarks/border.py --json border.json            tiny and SmolLM2-135M, 10 minutes
    .venv/bin/python benchmarks/border.py --only SmolLM2 --threads 2
    .venv/bin/python benchmarks/border.py --quick                       tiny only, a minute
    .venv/bin/python benchmarks/border.py --updates                     only updates of weights, a minute

A step: `silva rl` with everything in one process, then with a trainer and an inference server of their own,
at level 0, so that both compute the same and one after the other. Runs take turns. The first step of each
is left out, and step i is compared with step i; ratios are medians over these pairs. Both must have the
same metrics.
A weight update: the trainer writes its parameters (write) and makes a digest of them (digest); the server
verifies, lays out for its kernels and copies them (load) and scores 32 tokens with them (probe), while the
trainer scores another 32 (ask); the server's numbers for these are compared (compare). Seconds of the
processors are those of both processes; a pause is how long the engine takes no step meanwhile, seen at one in
this process. Once with files on the disk of TMPDIR, once in shared memory. Of files there, writing and
reading are compared with copies into and out of a block of `multiprocessing.shared_memory`, which is the
least that a border takes.
Requests: prompts of 64 tokens, new in each round, with answers of 16, to the engine in this process and to
the same engine behind a Unix socket, in turns. The answers must be the same.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import CONFIGS, Row, machine, parser, results, write
from safetensors.torch import load_file

from silva.assembly import Assembly
from silva.config.load import load
from silva.engines.local.engine import LocalEngine
from silva.engines.remote.engine import HttpEngine
from silva.engines.remote.settings import ClientSettings
from silva.engines.remote.wire import ServedResult, SilvaDialect
from silva.models.snapshots import save_parameters, weight_folder
from silva.orchestrator.probe import Probe
from silva.process import PARENT
from silva.protocols import Engine
from silva.registries import REGISTRIES
from silva.run import loaded
from silva.scratch import MEMORY, private_folder
from silva.storage.metrics import read_metrics
from silva.types import Completion, SamplingParams, Snapshot, TokenScores
from silva.wire.transport import Peer

SHORT = ("--eval.every=0", "--eval.tasks=8", "--checkpoint.every=0", "--monitoring.terminal=off",
         "--monitoring.report=false", "--monitoring.tensorboard=false")  # fmt: skip
PHASES = ("rollout", "train", "publish")
PARTS = ("write", "digest", "load", "ask", "probe", "compare", "pause", "write, CPU", "digest, CPU")
PROMPT, ANSWER = 64, 16  # tokens
AT_ONCE = (1, 8, 64)
NOTHING_LEARNED = 3  # exit code of a run that is too short to learn


@dataclass(frozen=True)
class Case:
    """`steps`: timed ones of a run; `requests`: by how many more than are at once, in a round."""

    name: str
    flags: tuple[str, ...]
    steps: int = 0
    requests: int = 0


CASES = (
    Case("tiny", (f"@{CONFIGS / 'smoke.toml'}", "--warm-start.steps=20"), 6, 4),
    Case("SmolLM2-135M", (f"@{CONFIGS / 'quickstart.toml'}",), 2, 1),
    Case("SmolLM2-135M, LoRA", (f"@{CONFIGS / 'quickstart.toml'}", "--model.lora.rank=16")),
)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="the tiny model, one pair of short runs")
    options.add_argument("--updates", action="store_true", help="only updates of weights")
    options.add_argument("--only", default="", help="only cases whose name contains this")
    options.add_argument("--repeats", type=int, default=2, help="pairs of runs, of rounds 3 more (default 2)")
    options.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    given = options.parse_args()
    cases = [case for case in CASES if given.only in case.name]
    if not cases:
        names = ", ".join(repr(case.name) for case in CASES)
        options.error(f"argument --only: no case contains {given.only!r} (names: {names})")
    if given.updates:
        cases = [replace(case, steps=0, requests=0) for case in cases]
    if given.quick:
        cases, given.repeats = [replace(CASES[0], steps=2, requests=1)], 1
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    speed, words = machine()
    rows = [speed]
    for case in cases:
        print(f"... {case.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="border-") as work:
            flags = (*case.flags, *SHORT, f"--output-dir={work}")
            if case.steps:
                rows += steps(case, flags, Path(work), given.repeats, given.threads)
            rows += beside_a_server(case, flags, Path(work), given.repeats + 3, given.threads)
        write(rows, given.json)
    print(words, f"{given.threads} threads in each process", "", results(rows[1:]), sep="\n")
    return 0


def steps(case: Case, flags: Sequence[str], work: Path, repeats: int, threads: int) -> list[Row]:
    """Whole runs in turns."""
    found: dict[str, list[Mapping[str, float]]] = {"local": [], "services": []}
    for repeat in range(repeats):
        for kind in ("local", "services") if repeat % 2 == 0 else ("services", "local"):
            found[kind] += run(f"{kind}_{repeat}", kind, case, flags, work, threads)
    pairs = list(zip(found["local"], found["services"], strict=True))
    differing = sum(_outside_perf(local) != _outside_perf(services) for local, services in pairs)
    rows = [Row(case.name, "steps whose metrics differ", differing, f"of {len(pairs)}", target="0")]
    for what in ("step", *PHASES):
        mine, theirs = ([_seconds(row, what) for row in found[kind]] for kind in ("services", "local"))
        ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        rows += [
            Row(case.name, f"{what}, services", statistics.median(mine), "s", "local", ratio),
            Row(case.name, f"{what}, local", statistics.median(theirs), "s"),
        ]
    return rows


def run(
    name: str, kind: str, case: Case, flags: Sequence[str], work: Path, threads: int
) -> list[Mapping[str, float]]:
    """The metrics of a run's steps but the first."""
    placed = (f"--placement.type={kind}", f"--placement.threads={threads}")
    line = [
        sys.executable,
        "-m",
        "silva",
        "rl",
        *flags,
        f"--name={name}",
        f"--steps={case.steps + 1}",
        *placed,
    ]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in (0, NOTHING_LEARNED):
        sys.exit(f"{' '.join(line)} ended with status {done.returncode}:\n{done.stdout}")
    return [row for row in read_metrics(work / name / "metrics.jsonl") if row["step"] > 1]


def _seconds(row: Mapping[str, float], what: str) -> float:
    return sum(row[f"perf/seconds/{phase}"] for phase in (PHASES if what == "step" else (what,)))


def _outside_perf(row: Mapping[str, float]) -> Mapping[str, float]:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


class Timed(SilvaDialect):
    """Notes how long loads and probes take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.server = 0  # process id

    @property
    def used(self) -> float:
        """Seconds of processors, of both processes."""
        own = Path(f"/proc/{self.server}/task").glob("*/schedstat")
        return time.process_time() + sum(int(each.read_text().split()[0]) for each in own) / 1e9

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        used = self.used
        yield
        self.seconds[what].append(time.perf_counter() - began)
        self.seconds[f"{what}, CPU"].append(self.used - used)

    async def load(self, peer: Peer, snapshot: Snapshot, timeout: float) -> None:
        with self.clock("load"):
            await super().load(peer, snapshot, timeout)

    async def score(
        self,
        peer: Peer,
        tokens: Sequence[int],
        start: int,
        version: int,
        adapter: Path | None = None,
        top: int = 0,
    ) -> ServedResult[TokenScores]:
        with self.clock("probe"):
            return await super().score(peer, tokens, start, version, adapter, top)


def beside_a_server(case: Case, flags: Sequence[str], work: Path, rounds: int, threads: int) -> list[Row]:
    """An engine and a trainer here, and a server of the same configuration."""
    argv = [*flags, f"--placement.threads={threads}"]
    config = load(argv, REGISTRIES).config
    socket = work / "inference.sock"
    line = [sys.executable, "-m", "silva", "inference", *argv, "--unix", str(socket)]
    with (work / "inference.log").open("w") as log:
        server = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, PARENT: str(os.getpid())})
    try:
        with loaded(config) as assembly:
            return asyncio.run(_measured(case, assembly, f"unix:{socket}", work, rounds, server.pid))
    finally:
        server.kill()  # a part listens to no SIGTERM
        server.wait()


async def _measured(
    case: Case, assembly: Assembly, address: str, work: Path, rounds: int, server: int
) -> list[Row]:
    dialect = Timed()
    dialect.server = server
    client = HttpEngine([Peer(address, name="inference")], ClientSettings(), dialect)
    await client.connect()
    try:
        rows = []
        for at_once in AT_ONCE if case.requests else ():
            rows += await requests(case, assembly, client, at_once, rounds)
        rows += await updates(case, assembly, client, dialect, work, rounds)
        with private_folder("weights", parent=MEMORY) as memory:
            found = await updates(case, assembly, client, dialect, memory, rounds)
            rows += [replace(row, metric=f"{row.metric}, shared memory") for row in found]
            rows.append(assembly.compute.run(copies, case, assembly, memory, rounds))
        return rows
    finally:
        await client.close()


async def requests(case: Case, assembly: Assembly, client: Engine, at_once: int, rounds: int) -> list[Row]:
    """Requests a second of both engines in turns, after a round that is left out."""
    count, vocabulary = at_once * case.requests + 4, assembly.renderer.vocabulary
    sides: tuple[Engine, Engine] = (assembly.engine, client)
    rates: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        prompts = np.random.default_rng((number, at_once)).integers(0, vocabulary, (count, PROMPT)).tolist()
        answers: list[list[Completion]] = [[], []]
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            answers[side] = await _ask(sides[side], prompts, at_once)
            rates[side].append(count / (time.perf_counter() - began))
        if [each.tokens for each in answers[0]] != [each.tokens for each in answers[1]]:
            sys.exit(f"{case.name}: the server's answers are other ones than the engine's in this process")
    direct, http = (found[1:] for found in rates)
    ratio = statistics.median(b / a for a, b in zip(direct, http, strict=True))
    what = f"requests, {at_once} at once"
    return [
        Row(case.name, f"{what}, http", statistics.median(http), "/s", "called directly", ratio),
        Row(case.name, f"{what}, direct", statistics.median(direct), "/s"),
    ]


async def _ask(engine: Engine, prompts: Sequence[Sequence[int]], at_once: int) -> list[Completion]:
    slots = asyncio.Semaphore(at_once)

    async def one(index: int) -> Completion:
        async with slots:
            return await engine.sample(prompts[index], SamplingParams(max_tokens=ANSWER, seed=index))

    return await asyncio.gather(*(one(index) for index in range(len(prompts))))


async def updates(
    case: Case, assembly: Assembly, client: Engine, dialect: Timed, work: Path, rounds: int
) -> list[Row]:
    """From the trainer's parameters to a server that samples from them, by part; the first is left out."""
    trainer: Any = assembly.trainer(recipe=True)
    compare = Probe(assembly.renderer.vocabulary, assembly.config.model.dtype)
    dialect.seconds.clear()
    size = 0

    async def ask() -> None:
        with dialect.clock("ask"):
            await compare.ask(trainer)

    for _ in range(rounds + 1):
        snapshot = await trainer.publish()
        path = work / f"version_{snapshot.version}"
        with dialect.clock("update"):
            with dialect.clock("write"):
                assembly.compute.run(save_parameters, assembly.model, path)
            with dialect.clock("digest"):
                loading = replace(snapshot, folder=weight_folder(path))
            await asyncio.gather(client.load(loading), ask())
            probed = dialect.seconds["probe"][:]
            with dialect.clock("compare"):
                await compare.check(client)
        dialect.seconds["probe"] = probed  # not the one that `compare` holds
        dialect.seconds["pause"].append(await pause(assembly, loading))
        size = sum(file.stat().st_size for file in path.iterdir())
    parts = {part: statistics.median(each[1:]) for part, each in dialect.seconds.items()}
    return [
        Row(case.name, "update, size", size / 2**20, "MiB"),
        *(Row(case.name, f"update, {part}" if part != "update" else part, parts[part], "s")
          for part in ("update", "update, CPU", *PARTS)),
    ]  # fmt: skip


async def pause(assembly: Assembly, snapshot: Snapshot) -> float:
    """Seconds for which a load holds the thread that samples."""
    engine, seconds = cast(LocalEngine, assembly.engine), list[float]()

    class Watched(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
            def timed() -> Any:
                began = time.perf_counter()
                try:
                    return work(*args, **kwargs)
                finally:
                    seconds.append(time.perf_counter() - began)

            return super().submit(timed)

    usual = engine._compute
    with Watched(1) as engine._compute:
        await engine.load(snapshot)
    engine._compute = usual
    return sum(seconds)


def copies(case: Case, assembly: Assembly, memory: Path, rounds: int) -> Row:
    """Files in shared memory, written and read, against a block of it."""
    weights = {name: p.detach() for name, p in assembly.model.model.named_parameters() if p.requires_grad}
    others = {name: torch.empty_like(weight) for name, weight in weights.items()}
    seconds: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        save_parameters(assembly.model, memory / f"copy_{number}")
        for name, tensor in load_file(memory / f"copy_{number}" / "model.safetensors").items():
            others[name].copy_(tensor)
        between = time.perf_counter()
        block = SharedMemory(create=True, size=sum(weight.nbytes for weight in weights.values()))
        begin = 0
        for name, weight in weights.items():
            place = torch.frombuffer(block.buf, dtype=weight.dtype, count=weight.numel(), offset=begin)
            others[name].copy_(place.copy_(weight.view(-1)).view(weight.shape))
            begin += weight.nbytes
        del place
        seconds.append((between - began, time.perf_counter() - between))
        block.close()
        block.unlink()
        shutil.rmtree(memory / f"copy_{number}")
    files, blocks = (statistics.median(each) for each in zip(*seconds[1:], strict=True))
    return Row(case.name, "write and read, shared memory", files, "s", "a block of it", blocks / files)


if __name__ == "__main__":
    raise SystemExit(main())

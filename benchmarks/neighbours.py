"""What engines on the same cores take from each other, by how long threads that wait keep a core busy.

    .venv/bin/python benchmarks/neighbours.py --rounds 3                      ten minutes
    .venv/bin/python benchmarks/neighbours.py --rounds 5 --spin 200 2000      these, not the three kinds

Two processes sample 8 answers of 48 tokens from SmolLM2-135M, first one of them alone, then both at once.
"alone" compares with the first kind of the table, "two at once" with one after the other: 1 where sharing the
cores costs nothing. "Silva" is what importing silva sets, "OpenMP" what libgomp does unless it is told,
"passive" threads that never wait awake; --spin takes values of GOMP_SPINCOUNT.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import Row, machine, parser, results, write
from decode import STRICT, Case, Worker
from decode_workers import SILVA
from recorded import by_turns

KINDS = {
    "Silva": {},
    "OpenMP": {"GOMP_SPINCOUNT": ""},  # set, so silva leaves it; no number, so libgomp takes its own
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
CASE = Case(8, shared=False, new=48)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="rounds of each kind (default 3)")
    options.add_argument("--threads", type=int, default=2, help="threads of each engine (default 2)")
    options.add_argument("--spin", type=int, nargs="+", help="values of GOMP_SPINCOUNT in place of the kinds")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    speed, words = machine()
    kinds = {f"spin {spin}": {"GOMP_SPINCOUNT": str(spin)} for spin in given.spin or ()} or KINDS
    rows = [speed, *measure(kinds, given.threads, given.rounds)]
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n\n")
    return 0


def measure(kinds: Mapping[str, Mapping[str, str]], threads: int, rounds: int) -> list[Row]:
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("decode_workers.py"), SILVA]
    alone: dict[str, list[float]] = {name: [] for name in kinds}
    both: dict[str, list[float]] = {name: [] for name in kinds}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        pairs = {}
        for name, kind in kinds.items():
            print(f"... starting {name}", file=sys.stderr, flush=True)
            env = {"OMP_NUM_THREADS": str(threads), **STRICT, **kind}
            pairs[name] = [stack.enter_context(contextlib.closing(Worker(command, env))) for _ in range(2)]
        for number in range(rounds + 1):  # the first warms up
            for name, pair in by_turns(pairs, number):
                alone[name].append(run(pair[0], 2 * number))
                both[name].append(statistics.mean(pool.map(run, pair, [2 * number + 1] * 2)))
    first, *_ = kinds
    rows = []
    for name in kinds:
        ours, shared = alone[name][1:], both[name][1:]
        rows += [
            row(name, "alone", ours, first, ratio(alone[first][1:], ours)),
            row(name, "two at once", shared, "one after the other", 2 * ratio(ours, shared)),
        ]
    return rows


def row(name: str, case: str, seconds: list[float], against: str, than: float) -> Row:
    return Row(f"{name}, {case}", "seconds", statistics.median(seconds), "s", against, than)


def ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def run(worker: Worker, seed: int) -> float:
    return float(worker.ask(prompts=CASE.prompts(seed), new=CASE.new)["seconds"])


if __name__ == "__main__":
    sys.exit(main())

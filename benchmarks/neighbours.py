"""What engines on the same cores take from each other, by how long threads that wait keep a core busy.

    .venv/bin/python benchmarks/neighbours.py --rounds 3      five minutes

Two processes sample 8 answers of 48 tokens from SmolLM2-135M, first one of them alone, then both at once. The
ratio is twice the time alone over the time of both: 1 where sharing the cores costs nothing. "Silva" is what
importing silva sets, "OpenMP" what libgomp does unless it is told.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import Row, machine, parser, results, write
from decode import STRICT, Case, Worker
from decode_workers import SILVA

KINDS = {"Silva": {}, "OpenMP": {"GOMP_SPINCOUNT": "300000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}
CASE = Case(8, shared=False, new=48)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="rounds of each kind (default 3)")
    options.add_argument("--threads", type=int, default=2, help="threads of each engine (default 2)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed]
    for name, kind in KINDS.items():
        print(f"... {name}", file=sys.stderr, flush=True)
        rows.append(measure(name, {"OMP_NUM_THREADS": str(given.threads), **STRICT, **kind}, given.rounds))
        write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n\n")
    return 0


def measure(name: str, environment: dict[str, str], rounds: int) -> Row:
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("decode_workers.py"), SILVA]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        pair = [stack.enter_context(contextlib.closing(Worker(command, environment))) for _ in range(2)]
        ratios, seconds = [], []
        for number in range(rounds + 1):
            alone = run(pair[0], 2 * number)
            both = statistics.mean(threads.map(run, pair, [2 * number + 1] * 2))
            if number:  # the first round warms up
                ratios.append(2 * alone / both)
                seconds.append(both)
    return Row(
        f"{name}: two at once", "seconds", statistics.median(seconds), "s", "one after the other",
        statistics.median(ratios),
    )  # fmt: skip


def run(worker: Worker, seed: int) -> float:
    return float(worker.ask(prompts=CASE.prompts(seed), new=CASE.new)["seconds"])


if __name__ == "__main__":
    sys.exit(main())

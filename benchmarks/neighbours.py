"""What engines on the same cores take from each other, by how long threads that wait keep a core busy.

    .venv/bin/python benchmarks/neighbours.py --rounds 3      five minutes

Two processes sample 8 answers of 48 tokens from SmolLM2-135M, first one of them alone, then both at once. The
ratio is twice the time alone over the time of both: 1 where sharing the cores costs nothing. "Silva" is what
importing silva sets, "OpenMP" what libgomp does unless it is told, "passive" threads that never wait awake.
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
from recorded import by_turns

KINDS = {"Silva": {}, "OpenMP": {"GOMP_SPINCOUNT": ""}, "passive": {"OMP_WAIT_POLICY": "passive"}}
CASE = Case(8, shared=False, new=48)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="rounds of each kind (default 3)")
    options.add_argument("--threads", type=int, default=2, help="threads of each engine (default 2)")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    speed, words = machine()
    rows = [speed, *measure(given.threads, given.rounds)]
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n\n")
    return 0


def measure(threads: int, rounds: int) -> list[Row]:
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("decode_workers.py"), SILVA]
    ratios, seconds = ({name: list[float]() for name in KINDS} for _ in range(2))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        pairs = {}
        for name, kind in KINDS.items():
            print(f"... starting {name}", file=sys.stderr, flush=True)
            env = {"OMP_NUM_THREADS": str(threads), **STRICT, **kind}
            pairs[name] = [stack.enter_context(contextlib.closing(Worker(command, env))) for _ in range(2)]
        for number in range(rounds + 1):
            for name, pair in by_turns(pairs, number):
                alone = run(pair[0], 2 * number)
                both = statistics.mean(pool.map(run, pair, [2 * number + 1] * 2))
                if number:  # the first round warms up
                    ratios[name].append(2 * alone / both)
                    seconds[name].append(both)
    median = statistics.median
    return [
        Row(
            f"{name}: two at once",
            "seconds",
            median(seconds[name]),
            "s",
            "one after the other",
            median(ratios[name]),
        )
        for name in KINDS
    ]


def run(worker: Worker, seed: int) -> float:
    return float(worker.ask(prompts=CASE.prompts(seed), new=CASE.new)["seconds"])


if __name__ == "__main__":
    sys.exit(main())

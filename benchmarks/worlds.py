"""What a tiny agent learns in the worlds of RAGEN and MinRL: random play, a warm start alone, RL after it.

    .venv/bin/python benchmarks/worlds.py --jobs 2 --json worlds.json
    .venv/bin/python benchmarks/worlds.py --only sokoban wordle --seeds 1 --resume

A transformer of two layers imitates scripted play with random moves in it, then trains for 30 steps with
GRPO, all with the same settings except what a world needs (benchmarks/environments/worlds). Random play
takes the actions of the world at random. Success is that on held-out tasks, with 95 % intervals; "apart"
where that after RL lies above that of the warm start.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import Learning, Row, interval, learn, machine, seeds_parser, table, write

FILES = Path(__file__).parent / "environments" / "worlds"
WORLDS = ("bandit", "frozen_lake", "sokoban", "countdown", "hanoi", "wordle")


@dataclass(frozen=True)
class Job:
    world: str
    seed: int
    output_dir: str
    resume: bool


def main() -> int:
    parser = seeds_parser(__doc__, 3, "runs/worlds")
    parser.add_argument("--only", nargs="+", choices=WORLDS, default=list(WORLDS), metavar="WORLD",
                        help=f"some of {', '.join(WORLDS)}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each (default 1)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that work
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        speed, words = pool.submit(machine).result()
        print(words, "", sep="\n")
        jobs = [
            Job(world, seed, f"{options.output_dir}/{world}", options.resume)
            for world, seed in itertools.product(options.only, range(options.seeds))
        ]
        runs = list(zip(jobs, pool.map(play, jobs), strict=True))
    head = ["world", "seed", "random", "warm start alone", "after RL", "apart", "minutes"]
    lines = [[job.world, str(job.seed), *map(interval, (run.baselines["random"], run.before, run.after)),
              "yes" if run.apart else "no", f"{run.seconds / 60:.1f}"] for job, run in runs]  # fmt: skip
    print(table(head, lines))
    write([speed, *(row for job, run in runs for row in rows(job, run))], options.json)
    return 0


def play(job: Job) -> Learning:
    run = learn(
        FILES / f"{job.world}.toml", job.seed, job.output_dir, resume=job.resume, baselines=["random"]
    )
    print(f"{job.world}, seed {job.seed}: {run.before['mean']:.0%} to {run.after['mean']:.0%} in "
          f"{run.seconds:.0f} s", file=sys.stderr)  # fmt: skip
    return run


def rows(job: Job, run: Learning) -> list[Row]:
    case, warm, after = f"{job.world}, seed {job.seed}", run.before["mean"], run.after["mean"]
    return [
        Row(case, "held-out success, random", run.baselines["random"]["mean"], "share"),
        Row(case, "held-out success, warm start alone", warm, "share"),
        Row(case, "held-out success after RL", after, "share", "warm start", after / warm if warm else None),
        Row(case, "time", run.seconds / 60, "minutes"),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""What a small agent learns in worlds of other frameworks: untrained, random, warm start alone, after RL.

    .venv/bin/python benchmarks/worlds.py --jobs 2 --json worlds.json
    .venv/bin/python benchmarks/worlds.py --only sokoban wordle --seeds 3-5 --resume

A tiny transformer, or SmolLM2-135M-Instruct where the world needs a language, imitates scripted play, then
trains with RL (benchmarks/environments/worlds). "untrained" is the model before both. Random play takes the
actions of the world at random. Success is that on held-out tasks. 95 % intervals are of held-out tasks, over
the episodes of all seeds; "seeds" is the lowest and the highest of them after RL.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Learning, Row, interval, learn, machine, mean, pooled, seeds_parser, table, write

from silva.evaluation.statistics import Estimate

FILES = Path(__file__).parent / "environments" / "worlds"
TINY = ("bandit", "frozen_lake", "sokoban", "countdown", "hanoi", "wordle", "alphabet_sort")
INSTALLED = ("textworld",)  # tiny models too; needs pip install 'silva[adventures]'
PRETRAINED = ("connections", "wiki_search", "maths", "search", "webshop", "alfworld", "metamath")
WORLDS = (*TINY, *INSTALLED, *PRETRAINED)
BASELINES = ("model", "random")


@dataclass(frozen=True)
class Job:
    world: str
    seed: int
    output_dir: str
    resume: bool


def main() -> int:
    parser = seeds_parser(__doc__, 3, "runs/worlds")
    parser.add_argument("--only", nargs="+", choices=WORLDS, default=list(TINY), metavar="WORLD",
                        help=f"some of {', '.join(WORLDS)} (default: those of tiny models)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each (default 1)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that work
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        speed, words = pool.submit(machine).result()
        print(words, "", sep="\n")
        jobs = [
            Job(world, seed, f"{options.output_dir}/{world}", options.resume)
            for world, seed in itertools.product(options.only, options.seeds)
        ]
        runs = list(zip(jobs, pool.map(play, jobs), strict=True))
    rows, lines = [speed], []
    for world in options.only:
        mine = [run for job, run in runs if job.world == world]
        found = {who: pooled([run.solved[who] for run in mine]) for who in (*BASELINES, "before", "after")}
        seeds = sorted(mean(run.solved["after"]) for run in mine)
        minutes = sum(run.seconds for run in mine) / len(mine) / 60
        lines.append([world, *(interval(asdict(each)) for each in found.values()),
                      f"{seeds[0]:.0%} to {seeds[-1]:.0%}", f"{minutes:.1f}"])  # fmt: skip
        rows += rows_of(world, found, seeds, minutes)
    head = ["world", "untrained", "random", "warm start alone", "after RL", "seeds", "minutes a seed"]
    print(table(head, lines))
    write(rows, options.json)
    return 0


def play(job: Job) -> Learning:
    run = learn(FILES / f"{job.world}.toml", job.seed, job.output_dir, resume=job.resume, baselines=BASELINES)
    print(f"{job.world}, seed {job.seed}: {run.before['mean']:.0%} to {run.after['mean']:.0%} in "
          f"{run.seconds:.0f} s", file=sys.stderr)  # fmt: skip
    return run


def rows_of(world: str, found: Mapping[str, Estimate], seeds: Sequence[float], minutes: float) -> list[Row]:
    warm, after = found["before"].mean, found["after"].mean
    return [
        Row(world, "held-out success, untrained", found["model"].mean, "share"),
        Row(world, "held-out success, random", found["random"].mean, "share"),
        Row(world, "held-out success, warm start alone", warm, "share"),
        Row(world, "held-out success after RL", after, "share", "warm start", after / warm if warm else None),
        Row(world, "lowest seed", seeds[0], "share"),
        Row(world, "highest seed", seeds[-1], "share"),
        Row(world, "time of a seed", minutes, "minutes"),
    ]


if __name__ == "__main__":
    sys.exit(main())

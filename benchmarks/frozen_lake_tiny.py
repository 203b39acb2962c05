"""Does the tiny model learn to walk? Random play, the warm start alone and reinforcement learning after it.

    .venv/bin/python benchmarks/frozen_lake_tiny.py --seeds 3 --json frozen_lake_tiny.json

All three are measured on the same held-out maps, none of which occurs in training. Times are of the whole run
(warm start and evaluations included) beside the machine's GEMM rate. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import sys

from common import CONFIGS, Learning, Row, interval, learn, machine, seeds_parser, table, write

RANDOM, WARM, TRAINED, MINUTES = 0.4, 0.6, 0.9, 8.0  # below, at most, at least, at most


def main() -> int:
    options = seeds_parser(__doc__, 3, "runs/frozen_lake_tiny_seeds").parse_args()
    speed, words = machine()
    config = CONFIGS / "frozen_lake_tiny.toml"
    results = [
        learn(config, seed, options.output_dir, resume=options.resume, baselines=["random"])
        for seed in options.seeds
    ]
    lines = [[str(r.seed), *map(interval, (r.baselines["random"], r.before, r.after)),
              f"{r.seconds / 60:.1f}"] for r in results]  # fmt: skip
    print(words, "", sep="\n")
    print(table(["seed", "random play", "warm start alone", "after RL", "minutes"], lines))
    print("", f"{sum(map(met, results))} of {len(results)} seeds met every target", sep="\n")
    write([speed, *(row for r in results for row in rows(r))], options.json)
    return 0 if all(map(met, results)) else 1


def met(r: Learning) -> bool:
    reached = (
        r.baselines["random"]["mean"] < RANDOM and r.before["mean"] <= WARM and r.after["mean"] >= TRAINED
    )
    return reached and r.seconds <= 60 * MINUTES


def rows(r: Learning) -> list[Row]:
    case, chance = f"seed {r.seed}", r.baselines["random"]["mean"]
    warm, after = r.before["mean"], r.after["mean"]
    return [
        Row(case, "held-out success, random play", chance, "share", target=f"< {RANDOM}"),
        Row(case, "held-out success, warm start alone", warm, "share", target=f"<= {WARM}"),
        Row(case, "held-out success after RL", after, "share", "warm start alone",
            after / warm if warm else None, f"value >= {TRAINED}"),
        Row(case, "time", r.seconds / 60, "minutes", target=f"<= {MINUTES:g}"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Does a language model learn to use a tool? The untrained model, the warm start alone, and RL after it.

    .venv/bin/python benchmarks/tool_use.py --seeds 5 --json tool_use.json --svg docs/tool_use.svg

All are measured on the same held-out questions, none of which occurs in training. Times are of the whole run
(warm start and evaluations included) beside the machine's GEMM rate. Exit code 1 where fewer than four fifths
of the seeds learn: the interval after RL must lie above those of the untrained model and of the warm start.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from common import CONFIGS, Learning, Row, interval, learn, machine, seeds_parser, table, write
from quickstart import SHARE, drawing

MINUTES = 15.0


def main() -> int:
    parser = seeds_parser(__doc__, 5, "runs/tool_use_seeds")
    parser.add_argument("--svg", type=Path, help="draw held-out success over steps into this file")
    options = parser.parse_args()
    speed, words = machine()
    config = CONFIGS / "tool_use.toml"
    results = [
        learn(config, seed, options.output_dir, resume=options.resume, baselines=["model"])
        for seed in options.seeds
    ]
    lines = [[str(r.seed), *map(interval, (r.baselines["model"], r.before, r.after)),
              "yes" if learned(r) else "no", f"{r.seconds / 60:.1f}"] for r in results]  # fmt: skip
    count, needed = sum(map(learned, results)), math.ceil(SHARE * len(results))
    head = ["seed", "untrained", "warm start alone", "after RL", "apart", "minutes"]
    print(words, "", table(head, lines), "", f"{count} of {len(results)} seeds learned", sep="\n")
    total = Row("all seeds", "seeds that learned", count, "runs", target=f">= {needed}")
    write([speed, *(row for r in results for row in rows(r)), total], options.json)
    if options.svg:
        options.svg.write_text(drawing([r.curve for r in results]))
    return 0 if count >= needed else 1


def learned(r: Learning) -> bool:
    return r.apart and r.after["ci_low"] > r.baselines["model"]["ci_high"]


def rows(r: Learning) -> list[Row]:
    case, warm, after = f"seed {r.seed}", r.before["mean"], r.after["mean"]
    gap = r.after["ci_low"] - max(r.before["ci_high"], r.baselines["model"]["ci_high"])
    return [
        Row(case, "held-out success, untrained", r.baselines["model"]["mean"], "share"),
        Row(case, "held-out success, warm start alone", warm, "share"),
        Row(case, "held-out success after RL", after, "share", "warm start", after / warm if warm else None),
        Row(case, "gap between the intervals", gap, "share", target="> 0"),
        Row(case, "time", r.seconds / 60, "minutes", target=f"<= {MINUTES:g}"),
    ]


if __name__ == "__main__":
    sys.exit(main())

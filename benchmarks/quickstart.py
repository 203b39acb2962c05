"""Does the quickstart hold? Trains it with several seeds and compares held-out success before and after.

    .venv/bin/python benchmarks/quickstart.py --seeds 5 --json quickstart.json --svg docs/quickstart.svg

Machines differ threefold in speed, so every time stands beside the machine's GEMM rate, measured in the
same process before training. Exit code 1 where fewer than four fifths of the seeds learn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from common import CONFIGS, Learning, Row, interval, learn, machine, seeds_parser, table, write

MINUTES = 10.0  # what the quickstart promises, model loading and evaluation included
SHARE = 0.8  # of the seeds must learn


def main() -> int:
    parser = seeds_parser(__doc__, 5, "runs/quickstart_seeds")
    parser.add_argument("--svg", type=Path, help="draw held-out success over steps into this file")
    options = parser.parse_args()
    speed, words = machine()
    config = CONFIGS / "quickstart.toml"
    results = [learn(config, seed, options.output_dir, resume=options.resume) for seed in options.seeds]
    lines = [
        [str(r.seed), interval(r.before), interval(r.after), "yes" if r.apart else "no",
         f"{r.seconds / 60:.1f}"]
        for r in results
    ]  # fmt: skip
    learned, needed = sum(r.apart for r in results), math.ceil(SHARE * len(results))
    print(words, "", table(["seed", "before", "after", "apart", "minutes"], lines), sep="\n")
    print("", f"{learned} of {len(results)} seeds learned", sep="\n")
    total = Row("all seeds", "seeds that learned", learned, "runs", target=f">= {needed}")
    write([speed, *(row for r in results for row in rows(r)), total], options.json)
    if options.svg:
        options.svg.write_text(drawing([r.curve for r in results]))
    return 0 if learned >= needed else 1


def rows(r: Learning) -> list[Row]:
    case, before, after = f"seed {r.seed}", r.before["mean"], r.after["mean"]
    gap = r.after["ci_low"] - r.before["ci_high"]
    return [
        Row(case, "held-out success before", before, "share"),
        Row(case, "held-out success after", after, "share", "before", after / before if before else None),
        Row(case, "gap between the intervals", gap, "share", target="> 0"),
        Row(case, "time", r.seconds / 60, "minutes", target=f"<= {MINUTES:g}"),
    ]


WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 640, 320, 56, 44, 20


def drawing(curves: Sequence[Sequence[tuple[int, float]]]) -> str:
    """An SVG of success over steps: the mean of the curves, over a band from the lowest to the highest."""
    steps = sorted({step for curve in curves for step, _ in curve})
    at = {step: [value for curve in curves for s, value in curve if s == step] for step in steps}

    def point(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - EDGE) * step / max(steps[-1], 1)
        return f"{x:.1f},{_height(value):.1f}"

    low = [point(step, min(at[step])) for step in steps]
    high = [point(step, max(at[step])) for step in steps]
    mean = [point(step, sum(at[step]) / len(at[step])) for step in steps]
    ticks = [
        f'<path class="grid" d="M{LEFT} {_height(share):.1f}H{WIDTH - EDGE}"/>'
        f'<text x="{LEFT - 8}" y="{_height(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    labels = [
        f'<text x="{point(step, 0).partition(",")[0]}" y="{HEIGHT - BOTTOM + 18}" '
        f'text-anchor="middle">{step}</text>'
        for step in steps
    ]
    title = f"held-out success over steps: mean and range of {len(curves)} seeds"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title>",
            "<style>text{font:13px sans-serif;fill:#444}.grid{stroke:#ddd}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *ticks,
            *labels,
            f'<polygon points="{" ".join([*low, *reversed(high)])}" fill="#2f7d4f" fill-opacity="0.2"/>',
            f'<polyline points="{" ".join(mean)}" fill="none" stroke="#2f7d4f" stroke-width="2.5"/>',
            f'<text x="{LEFT}" y="{HEIGHT - 6}">{title}</text>',
            "</svg>\n",
        ]
    )


def _height(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - EDGE) * share


if __name__ == "__main__":
    sys.exit(main())

"""Does the quickstart hold? Trains it with several seeds and compares held-out success before and after.

    .venv/bin/python benchmarks/quickstart.py --seeds 5 --json quickstart.json --svg docs/quickstart.svg

Machines differ threefold in speed, so every time stands beside the machine's GEMM rate, measured in the
same process before training. Exit code 1 where fewer than four fifths of the seeds learn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from silva.config.load import load
from silva.launch import train
from silva.monitoring.metrics import read_metrics
from silva.registries import REGISTRIES

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
MINUTES = 10.0  # what the quickstart promises, model loading and evaluation included
SHARE = 0.8  # of the seeds must learn


@dataclass(frozen=True)
class Result:
    """One seed. `before` and `after` are evaluations as in summary.json, `curve` is (step, success)."""

    seed: int
    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float
    curve: list[tuple[int, float]]

    @property
    def apart(self) -> bool:
        """Whether the intervals do not overlap, on the right side."""
        return self.after["ci_low"] > self.before["ci_high"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N - 1 (default 5)")
    parser.add_argument("--output-dir", default="runs/quickstart_seeds", help="where the runs go")
    parser.add_argument("--resume", action="store_true", help="go on with runs that are there already")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--svg", type=Path, help="draw held-out success over steps into this file")
    arguments = parser.parse_args()
    rate = gemm_rate()
    results = [run(seed, arguments.output_dir, arguments.resume) for seed in range(arguments.seeds)]
    print(table(results, rate))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows(results, rate), indent=1) + "\n")
    if arguments.svg:
        arguments.svg.write_text(drawing([r.curve for r in results]))
    return 0 if sum(r.apart for r in results) >= least(results) else 1


def run(seed: int, output_dir: str, resume: bool) -> Result:
    """Train the quickstart with one seed. A finished run is read, not repeated, with `resume`."""
    argv = [f"@{CONFIG}", f"--seed={seed}", f"--name=seed_{seed}", f"--output-dir={output_dir}"]
    outcome = train(load(argv, REGISTRIES), resume=resume, overwrite=not resume)
    before, after = (_success(outcome.summary[key]) for key in ("eval_before", "eval_after"))
    key = f"eval/{after['environment']}/success"
    metrics = read_metrics(outcome.directory / "metrics.jsonl")
    curve = [(row["step"], row[key]) for row in metrics if key in row]
    return Result(seed, before, after, sum(outcome.summary["seconds"].values()), curve)


def gemm_rate(repeats: int = 20) -> float:
    """fp32 GFLOP/s of [512, 576] x [576, 1536], one layer of the model on 512 tokens; the best repeat."""
    a, b = torch.rand(512, 576), torch.rand(576, 1536)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        best = min(best, (time.perf_counter() - began) / 10)
    return 2 * 512 * 576 * 1536 / best / 1e9


def table(results: Sequence[Result], rate: float) -> str:
    lines = [f"machine: {rate:.0f} GFLOP/s (fp32 GEMM)", "", "| seed | before | after | apart | minutes |"]
    lines.append("|---|---|---|---|---|")
    for r in results:
        apart = "yes" if r.apart else "no"
        lines.append(
            f"| {r.seed} | {_interval(r.before)} | {_interval(r.after)} | {apart} | {r.seconds / 60:.1f} |"
        )
    return "\n".join([*lines, "", f"{sum(r.apart for r in results)} of {len(results)} seeds learned"])


def rows(results: Sequence[Result], rate: float) -> list[dict[str, Any]]:
    """One object a number: `ratio` is value / against, `target` what it is held to (null: nothing)."""
    found = [_row("machine", "fp32 GEMM", rate, "GFLOP/s")]
    for r in results:
        case = f"seed {r.seed}"
        before, after = r.before["mean"], r.after["mean"]
        gap = r.after["ci_low"] - r.before["ci_high"]
        found += [
            _row(case, "held-out success before", before, "share"),
            _row(case, "held-out success after", after, "share", against=before),
            _row(case, "gap between the intervals", gap, "share", target="> 0"),
            _row(case, "time", r.seconds / 60, "minutes", against=MINUTES, target=f"<= {MINUTES:.0f}"),
        ]
    learned = sum(r.apart for r in results)
    target = f">= {least(results)}"
    return [*found, _row("all seeds", "seeds that learned", learned, "runs", len(results), target)]


def least(results: Sequence[Result]) -> int:
    """How many of these seeds must learn."""
    return math.ceil(SHARE * len(results))


def _row(
    case: str, metric: str, value: float, unit: str, against: float | None = None, target: str | None = None
) -> dict[str, Any]:
    ratio = value / against if against else None
    return dict(case=case, metric=metric, value=value, unit=unit, against=against, ratio=ratio, target=target)


def _success(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(e for e in evaluations if e["metric"] == "success")


def _interval(e: dict[str, Any]) -> str:
    return f"{e['mean']:.1%} [{e['ci_low']:.1%}, {e['ci_high']:.1%}]"


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

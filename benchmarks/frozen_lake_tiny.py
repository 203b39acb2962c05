"""Does the tiny model learn to walk? Random play, the warm start alone and reinforcement learning after it.

    .venv/bin/python benchmarks/frozen_lake_tiny.py --seeds 3 --json frozen_lake_tiny.json

All three are measured on the same held-out maps, none of which occurs in training. Times are of the whole run
(warm start and evaluations included) beside the machine's GEMM rate. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart import gemm_rate  # this folder is the script's own

from silva.config.load import load
from silva.launch import evaluate_config, train
from silva.registries import REGISTRIES

CONFIG = Path(__file__).parents[1] / "configs" / "frozen_lake_tiny.toml"
RANDOM, WARM, TRAINED, MINUTES = 0.4, 0.6, 0.9, 8.0  # below, at most, at least, at most


@dataclass(frozen=True)
class Result:
    """One seed: evaluations of success as in summary.json."""

    seed: int
    random: Mapping[str, Any]
    warm: Mapping[str, Any]
    trained: Mapping[str, Any]
    seconds: float

    @property
    def met(self) -> bool:
        return (
            self.random["mean"] < RANDOM
            and self.warm["mean"] <= WARM
            and self.trained["mean"] >= TRAINED
            and self.seconds <= 60 * MINUTES
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--output-dir", default="runs/frozen_lake_tiny_seeds", help="where the runs go")
    parser.add_argument("--resume", action="store_true", help="go on with runs that are there already")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    rate = gemm_rate()
    results = [run(seed, arguments.output_dir, arguments.resume) for seed in range(arguments.seeds)]
    print(table(results, rate))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows(results, rate), indent=1) + "\n")
    return 0 if all(r.met for r in results) else 1


def run(seed: int, output_dir: str, resume: bool) -> Result:
    """Train with one seed and let chance play the same maps. With `resume` a finished run is only read."""
    resolved = load(
        [f"@{CONFIG}", f"--seed={seed}", f"--name=seed_{seed}", f"--output-dir={output_dir}"], REGISTRIES
    )
    rows_of_random = [row for e in evaluate_config(resolved.config, policy="random") for row in e.rows()]
    summary = train(resolved, resume=resume, overwrite=not resume).summary
    before, after = summary["eval_before"], summary["eval_after"]
    seconds = sum(summary["seconds"].values())
    return Result(seed, _success(rows_of_random), _success(before), _success(after), seconds)


def table(results: Sequence[Result], rate: float) -> str:
    lines = [
        f"machine: {rate:.0f} GFLOP/s (fp32 GEMM)",
        "",
        "| seed | random play | warm start alone | after RL | minutes |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        cells = [str(r.seed), *map(_interval, (r.random, r.warm, r.trained)), f"{r.seconds / 60:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    met = sum(r.met for r in results)
    return "\n".join([*lines, "", f"{met} of {len(results)} seeds met every target"])


def rows(results: Sequence[Result], rate: float) -> list[dict[str, Any]]:
    """One object a number: `ratio` is value / against, `target` what it is held to (null: nothing)."""
    found = [_row("machine", "fp32 GEMM", rate, "GFLOP/s")]
    for r in results:
        case, warm = f"seed {r.seed}", r.warm["mean"]
        found += [
            _row(case, "held-out success, random play", r.random["mean"], "share", target=f"< {RANDOM}"),
            _row(case, "held-out success, warm start alone", warm, "share", target=f"<= {WARM}"),
            _row(case, "held-out success after RL", r.trained["mean"], "share", warm, f">= {TRAINED}"),
            _row(case, "time", r.seconds / 60, "minutes", MINUTES, f"<= {MINUTES:.0f}"),
        ]
    met = sum(r.met for r in results)
    return [*found, _row("all seeds", "seeds that met every target", met, "runs", len(results))]


def _row(
    case: str, metric: str, value: float, unit: str, against: float | None = None, target: str | None = None
) -> dict[str, Any]:
    ratio = value / against if against else None
    return dict(case=case, metric=metric, value=value, unit=unit, against=against, ratio=ratio, target=target)


def _success(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(e for e in evaluations if e["metric"] == "success")


def _interval(e: Mapping[str, Any]) -> str:
    return f"{e['mean']:.1%} [{e['ci_low']:.1%}, {e['ci_high']:.1%}]"


if __name__ == "__main__":
    sys.exit(main())

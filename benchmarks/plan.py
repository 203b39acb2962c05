"""How wrong is a plan? What a probe foretells of a step, beside what runs then take.

    .venv/bin/python benchmarks/plan.py                        all cases, levels 0 to 2
    .venv/bin/python benchmarks/plan.py --cases lake,slow --probe 30 --steps 8 --json plan.json

Six runs of tiny models as three processes, with one thread each: `silva rl --dry-run --probe` foretells them
once, and each level is then run. Seconds, memory and tokens are compared as shares of what came, idle shares
in points, ages in versions. Each number is the mean of the steps of a run (memory: the highest), without
those steps in which its batches in flight begin and end. A machine on which others work changes its speed
between a probe and a run: `load` is the share of the time in which somebody waited for a core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from common import Row, machine, parser, table, write

from silva.commands.foretelling.probe import LEVELS, foretell
from silva.config.load import load
from silva.errors import NoSignalError
from silva.monitoring.alerts.foretold import NAMES, found
from silva.registries import REGISTRIES
from silva.storage.metrics import read_metrics

FILE = Path(__file__).parent / "environments" / "slow_tool.toml"
LAKE = ("type=frozen_lake", "style=compact", "think=false", "answer_tags=false", "max_actions=6")
CASES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {  # keys of the environment, and others
    "sums, one turn": (("type=calculator", "tool=false"), ("--rollout.group-size=8",)),
    "dialogue, 2 to 6 turns": (("seconds=0",), ()),
    "lake": (LAKE, ()),
    "lake on trees": (LAKE, ("--rollout.type=branching", "--rollout.initial-rollouts=2")),
    "slow tool, 1 s": (("seconds=1",), ()),
    "wide, long replies": (("seconds=0.1",), ("--model.width=256", "--rollout.limits.max-turn-tokens=48")),
}
COMMON = ("--placement.type=services", "--placement.threads=1", "--no-algorithm.drop-zero-variance",
          "--monitoring.trace=true", "--model.width=128", "--rollout.group-size=4")  # fmt: skip
SHARES = ("engine_idle", "trainer_idle")
TARGETS = 0.10, 0.25  # of the median and of the worst


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cases", help="words of their names, with commas (default all)")
    options.add_argument("--probe", type=float, default=60.0, help="seconds (default 60)")
    options.add_argument("--steps", type=int, default=12, help="of each run (default 12)")
    options.add_argument("--groups", type=int, default=8, help="of a step (default 8)")
    options.add_argument("--output-dir", type=Path, default=Path("runs/plan"))
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    speed, words = machine()
    print(words, "", sep="\n")
    wanted = (given.cases or "").split(",")
    rows, lines = [speed], list[list[str]]()
    for case, (keys, flags) in CASES.items():
        if not any(word in case for word in wanted):
            continue
        argv = [f"@{FILE}", *COMMON, f"--rollout.groups-per-step={given.groups}", *flags,
                *(f"--environments.0.{key}" for key in keys),
                f"--output-dir={given.output_dir}", "--name=plan"]  # fmt: skip
        foretold = foretell(load(argv, REGISTRIES).config, given.probe)
        for level in LEVELS:
            began, waited = time.time(), waiting()
            came = ran([*argv, f"--rollout.max-async-level={level}", f"--steps={given.steps + 2 * level}"],
                       given.output_dir / "plan", level)  # fmt: skip
            load_ = (waiting() - waited) / (time.time() - began)
            rows += rows_of(f"{case}, level {level}", foretold[level], came)
            lines.append([case, str(level), *shown(foretold[level], came), f"{load_:.1f}"])
            print("|", " | ".join(lines[-1]), "|", file=sys.stderr, flush=True)
            write(rows, given.json)
    print(
        table(
            [
                "case",
                "level",
                *(f"{name}, {unit.strip() or 'number'}" for name, unit in NAMES.values()),
                "load",
            ],
            lines,
        )
    )
    print("", verdict(rows), sep="\n")
    return 0


def waiting() -> float:
    """Seconds for which somebody waited for a core of this machine (Linux, pressure stall information)."""
    try:
        first = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(first.rpartition("total=")[2]) / 1e6


def ran(argv: Sequence[str], run: Path, level: int) -> dict[str, float]:
    """The numbers of a run."""
    done = subprocess.run([sys.executable, "-m", "silva", "rl", *argv, "--overwrite"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    if done.returncode not in (0, NoSignalError.exit_code):  # random policies may earn nothing
        sys.exit(f"silva rl {' '.join(argv)} ended with status {done.returncode}:\n{done.stdout}")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    return found(rows[1 + level : len(rows) - level])


def rows_of(case: str, planned: Mapping[str, float], came: Mapping[str, float]) -> list[Row]:
    return [Row(f"{case}", f"{name}, off by", off(name, planned[name], came[name]), "", "found", None)
            for name in NAMES if name in planned and name in came]  # fmt: skip


def shown(planned: Mapping[str, float], came: Mapping[str, float]) -> list[str]:
    return [f"{planned[name]:.3g} / {came[name]:.3g} ({off(name, planned[name], came[name]):+.2f})"
            if name in planned and name in came else "" for name in NAMES]  # fmt: skip


def off(name: str, planned: float, came: float) -> float:
    """By how much a number was planned too high: a share of what came; of shares and ages the difference."""
    return planned - came if name in (*SHARES, "age") or not came else planned / came - 1


def verdict(rows: Sequence[Row]) -> str:
    """Median and worst error of each number."""
    lines = []
    for name in NAMES:
        errors = [abs(row.value) for row in rows if row.metric == f"{name}, off by"]
        if errors:
            kind = "versions" if name == "age" else "points" if name in SHARES else "share of what came"
            lines.append([name, f"{median(errors):.2f}", f"{max(errors):.2f}", kind])
    return table(["number", f"median error (aim {TARGETS[0]:g})", f"worst (aim {TARGETS[1]:g})", "as"], lines)


if __name__ == "__main__":
    sys.exit(main())

"""What do levels of asynchrony and overlapped updates gain while tools wait, and do they learn as well?

    .venv/bin/python benchmarks/overlap.py --part timing --json overlap.json             about 8 minutes
    .venv/bin/python benchmarks/overlap.py --part learning --json levels.json --plot docs/levels.svg
    .venv/bin/python benchmarks/overlap.py --quick                                       a minute

Every run has three processes: the loop, a trainer and an inference server, the last two with one thread
each. Levels 0, 1 and 2 are `rollout.max_async_level`; "overlapped" is level 0 with
`rollout.overlap_training`. All make 4 updates a step. The age of a token is the number of versions between
the policy that sampled it and the one that is trained on it.

timing: 8 groups of 4 episodes a step. In each episode the replies wait 2 s for a tool, 2 to 6 times by
task. A tiny model of 4.3 million parameters. Seconds a step are the mean over the run, from the first
rollout to the last publish: the first batch, in whose time nothing is trained, and the last, in whose time
nothing else is played, are part of it. At level L, L + 1 batches are in flight. Idle shares are those of
`perf/idle/...`. The trainer has the same work at every level: if its busy seconds differ much, the machine
was not equally fast, and the ratios say little. Every run leaves a trace.json (ui.perfetto.dev opens it).
learning: frozen_lake with the warm-started agent of recipes.py, 40 steps of `grpo`, 16 groups of 8.
Held-out success is that of all seeds' episodes; its interval resamples tasks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from common import (
    Curve,
    Panel,
    Row,
    Solved,
    drawing,
    held_out,
    interval,
    machine,
    pooled,
    seeds_parser,
    series,
    table,
    write,
)
from recipes import agent_of, warm_start

from silva.evaluation.statistics import Estimate
from silva.storage.metrics import read_metrics

FILES = Path(__file__).parent / "environments"
LEVELS: Mapping[str, Sequence[str]] = {
    "level 0": (),
    "level 1": ("--rollout.max-async-level=1",),
    "level 2": ("--rollout.max-async-level=2",),
    "overlapped": ("--rollout.overlap-training=true",),
}
FIRST = "level 0"  # what the others are compared with
SERVICES = ("--placement.type=services", "--placement.threads=1")
PHASES = ("rollout", "train", "publish")
TOOL = 2.0  # seconds
STEPS, UPDATES = 40, 4  # of the learning runs
WORLD = "frozen_lake"


@dataclass(frozen=True)
class Timing:
    """Means over the steps of all runs of a level, weighted by their time where they are shares of it."""

    level: str
    step: float  # seconds
    idle: Mapping[str, float]  # by part
    ages: Sequence[float]  # shares of trained tokens by age

    def busy(self, part: str) -> float:
        """Seconds a step."""
        return self.step * (1 - self.idle[part])


@dataclass(frozen=True)
class Learned:
    """What the seeds of a level have learned."""

    level: str
    before: Estimate
    after: Estimate
    curves: Sequence[Curve]
    ages: Sequence[float]

    @property
    def seeds(self) -> list[float]:
        """Success at the end, the lowest first."""
        return sorted(curve[-1][1] for curve in self.curves)


def main() -> int:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    speed, words = machine()
    rows, out = [speed], Path(options.output_dir)
    print(words, "", sep="\n")
    if "timing" in options.parts:
        rows += show_timings(timed(options, out / "timing"), TOOL * options.scale)
        write(rows, options.json)
    if "learning" in options.parts:
        found = learning(options, out / "learning")
        rows += show_learning(found)
        write(rows, options.json)
        if options.plot:
            panels = [Panel(one.level, one.curves) for one in found]
            options.plot.write_text(drawing({f"{WORLD}: held-out success over steps": panels}))
    return 0


def arguments() -> argparse.Namespace:
    parser = seeds_parser(__doc__, 3, "runs/overlap")
    parser.add_argument("--part", choices=("timing", "learning"), help="one of the two (default both)")
    parser.add_argument("--quick", action="store_true", help="few short steps: does all of it work?")
    parser.add_argument("--scale", type=float, default=1.0, help="times the tool's 2 s (default 1)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each level (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="learning runs at once (default 1)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    options = parser.parse_args()
    options.parts = (options.part,) if options.part else ("timing", "learning")
    options.flags, options.agent_flags = [], []
    if options.quick:
        options.scale, options.seeds, options.output_dir = 0.05, range(1), f"{options.output_dir}_quick"
        options.flags, options.agent_flags = ["--steps=3", "--eval.tasks=8"], ["--warm-start.steps=100"]
    return options


def silva(*argv: str) -> None:
    """Run the command, and end with its words if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "silva", *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"silva {' '.join(argv)} ended with status {done.returncode}:\n{done.stdout}")


def timed(options: argparse.Namespace, out: Path) -> list[Timing]:
    """Runs with the slow tool; the levels take turns."""
    steps: dict[str, list[dict[str, float]]] = {level: [] for level in LEVELS}
    for repeat, level in itertools.product(range(options.repeats), LEVELS):
        name = f"{level.replace(' ', '_')}_{repeat}"
        print(f"... {level}", file=sys.stderr, flush=True)
        silva(
            "rl", f"@{FILES / 'slow_tool.toml'}", f"--name={name}", f"--output-dir={out}", "--overwrite",
            f"--environments.0.seconds={TOOL * options.scale}", "--monitoring.trace=true",
            *SERVICES, *LEVELS[level], *options.flags,
        )  # fmt: skip
        steps[level] += steps_of(out / name)
    return [timing(level, found) for level, found in steps.items()]


def timing(level: str, steps: Sequence[Mapping[str, float]]) -> Timing:
    seconds = np.array([sum(row[f"perf/seconds/{phase}"] for phase in PHASES) for row in steps])
    idle = {
        part: float(np.average([row[f"perf/idle/{part}"] for row in steps], weights=seconds))
        for part in ("trainer", "engine")
    }
    return Timing(level, float(seconds.mean()), idle, ages(steps))


def steps_of(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]


def ages(steps: Sequence[Mapping[str, float]]) -> list[float]:
    """Shares of the trained tokens that are 0, 1, 2 and more versions old, the mean over steps."""
    names = ("age0", "age1", "age2", "age3+")
    fresh = [1.0, 0.0, 0.0, 0.0]  # of a step without the metric
    shares = [
        found if any(found := [row.get(f"train/share/{name}", 0.0) for name in names]) else fresh
        for row in steps
    ]
    return np.mean(shares, axis=0).tolist()


def show_timings(timings: Sequence[Timing], tool: float) -> list[Row]:
    first = next(each for each in timings if each.level == FIRST)
    lines = [
        [each.level, f"{each.step:.1f}", f"{each.step / first.step:.2f}", f"{each.idle['trainer']:.0%}",
         f"{each.idle['engine']:.0%}", f"{each.busy('trainer'):.1f}", _shown(each.ages)]
        for each in timings
    ]  # fmt: skip
    head = ["", "s a step", "ratio to level 0", "trainer idle", "engine idle", "trainer busy, s a step",
            "age 0 / 1 / 2 / 3+"]  # fmt: skip
    print(f"a tool of {tool:g} s:", "", table(head, lines), "", sep="\n")
    return [row for each in timings for row in rows_of_timing(each, first)]


def rows_of_timing(each: Timing, first: Timing) -> list[Row]:
    case = f"slow tool, {each.level}"
    return [
        Row(case, "a step", each.step, "s", FIRST, first.step / each.step),
        *(Row(case, f"{part} idle", share, "share") for part, share in each.idle.items()),
        Row(
            case,
            "trainer busy, of a step",
            each.busy("trainer"),
            "s",
            FIRST,
            first.busy("trainer") / each.busy("trainer"),
            "about 1",
        ),
        *(Row(case, f"tokens of age {age}", share, "share") for age, share in enumerate(each.ages)),
    ]


def learning(options: argparse.Namespace, out: Path) -> list[Learned]:
    """All seeds of all levels, from one warm-started agent."""
    warm_start(out, WORLD, options.agent_flags, options.resume)
    jobs = [(level, seed) for level in LEVELS for seed in options.seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: learn(job[0], job[1], options, out), jobs))
    return [learned(level, [folder(out, level, seed) for seed in options.seeds]) for level in LEVELS]


def folder(out: Path, level: str, seed: int) -> Path:
    return out / level.replace(" ", "_") / f"seed_{seed}"


def learn(level: str, seed: int, options: argparse.Namespace, out: Path) -> None:
    run = folder(out, level, seed)
    again = options.resume and (run / "config.toml").exists()
    silva(
        "rl", f"@{FILES / f'{WORLD}.toml'}", f"--model.name={agent_of(out, WORLD)}", f"--seed={seed}",
        f"--name={run.name}", f"--output-dir={run.parent}", f"--steps={STEPS}", "--eval.every=5",
        "--algorithm.type=grpo", "--algorithm.max-refills=0", "--rollout.groups-per-step=16",
        f"--trainer.updates-per-step={UPDATES}", *SERVICES, *LEVELS[level], *options.flags,
        "--resume" if again else "--overwrite",
    )  # fmt: skip
    values = " ".join(f"{value:.0%}" for _, value in success(run))
    print(f"{level}, seed {seed}: {values}", file=sys.stderr, flush=True)


def success(run: Path) -> Curve:
    return series(run, f"eval/{WORLD}/success")


def learned(level: str, runs: Sequence[Path]) -> Learned:
    solved: list[Mapping[int, Solved]] = [held_out(run) for run in runs]
    steps = [step for run in runs for step in steps_of(run)]
    curves = [success(run) for run in runs]
    before = pooled([each[min(each)] for each in solved])
    after = pooled([each[max(each)] for each in solved])
    return Learned(level, before, after, curves, ages(steps))


def show_learning(found: Sequence[Learned]) -> list[Row]:
    lines = [
        [each.level, interval(asdict(each.before)), interval(asdict(each.after)),
         f"{each.seeds[0]:.0%} to {each.seeds[-1]:.0%}", _shown(each.ages)]
        for each in found
    ]  # fmt: skip
    head = ["", "start", "after", "seeds", "age 0 / 1 / 2 / 3+"]
    print(f"{WORLD}:", "", table(head, lines), "", sep="\n")
    first = next(each for each in found if each.level == FIRST)
    return [row for each in found for row in rows_of_learning(each, first)]


def rows_of_learning(each: Learned, first: Learned) -> list[Row]:
    case = f"{WORLD}, {each.level}"
    return [
        Row(case, "held-out success, start", each.before.mean, "share"),
        Row(case, "held-out success, after", each.after.mean, "share", FIRST,
            each.after.mean / first.after.mean if first.after.mean else None),
        Row(case, "gap to the start", each.after.ci_low - each.before.ci_high, "share", target="> 0"),
        Row(case, "lowest seed, after", each.seeds[0], "share"),
        Row(case, "highest seed, after", each.seeds[-1], "share"),
        *(Row(case, f"tokens of age {age}", share, "share") for age, share in enumerate(each.ages)),
    ]  # fmt: skip


def _shown(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.0%}" for share in shares)


if __name__ == "__main__":
    sys.exit(main())

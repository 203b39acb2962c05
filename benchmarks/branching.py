"""Does branching help? Linear GRPO, ARPO, AEPO and its parts, on as many sampled tokens.

    .venv/bin/python benchmarks/branching.py --jobs 2 --json branching.json --plot docs/branching.svg
    .venv/bin/python benchmarks/branching.py --only linear arpo --keys first --seeds 3 --resume

A tiny model that imitated scripted play with random moves in it learns `key_door`: one decision, the key,
decides the reward five turns later. Either there is a room before the keys, so that a branch can begin with
the choice of the key (`--keys later`), or the keys come first, where every branch has the key of its root
(`first`).

All variants have the loss of the recipe `arpo`, 8 tasks a step with 16 leaves each, and a constant learning
rate. So they differ in where the leaves come from, and AEPO in its clipping and advantages too. Success is
that on held-out tasks, at the last evaluation before a variant has sampled more tokens than `linear` in 40
steps. "actions" are the steps of the environment (tool calls, where there are tools), each shared one once.
Intervals resample held-out tasks over the episodes of all seeds; how the seeds differ stands beside them.
"trained" is the share of the tokens of all rows that remain when shared ones are counted once. A run that
fails ends it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    mean,
    pooled,
    seeds_parser,
    series,
    table,
    write,
)
from recipes import FILES, agent_of, warm_start

from silva.evaluation.statistics import Estimate
from silva.models.trie import build
from silva.rollouts.samples import trajectory_samples
from silva.storage.rollouts import read_rollouts

ENVIRONMENT, STEPS, MORE = "key_door", 40, 1.2  # runs are longer by MORE: who samples less takes more steps
BRANCH = ["--rollout.type=branching", "--rollout.initial-rollouts=8"]
ROOTS, PENALTY = "--rollout.entropy-gap-weight=0.5", "--rollout.branch-penalty=0.05"
CLIP, ADVANTAGE = "--algorithm.loss.balanced-clip-min-entropy=0", "--algorithm.entropy-advantage=0.2"
VARIANTS = {
    "linear": [],
    "random": [*BRANCH, "--rollout.entropy-weight=0"],
    "arpo": BRANCH,
    "arpo, hard": [*BRANCH, "--algorithm.tree-credit=hard"],
    "aepo": [*BRANCH, ROOTS, PENALTY, CLIP, ADVANTAGE],
    "its roots": [*BRANCH, ROOTS],
    "its penalty": [*BRANCH, PENALTY],
    "its clipping": [*BRANCH, CLIP],
    "its advantage": [*BRANCH, ADVANTAGE],
}
# A table whose type the command line changes restarts, so what the file says of rollouts is repeated.
ROLLOUT = ["--rollout.groups-per-step=8", "--rollout.group-size=16", "--rollout.limits.max-turns=8",
           "--rollout.limits.max-turn-tokens=4", "--rollout.limits.max-episode-tokens=256"]  # fmt: skip
ROOMS = {"later": [], "first": ["--environments.0.before=0", "--environments.0.after=4"]}


@dataclass(frozen=True)
class Job:
    keys: str
    variant: str
    seed: int
    argv: Sequence[str]


@dataclass(frozen=True)
class Run:
    """Curves of (step, value); success of held-out tasks by step; numbers of single steps."""

    job: Job
    solved: Mapping[int, Solved]
    tokens: Curve  # sampled in the step
    actions: Curve
    success: Curve
    branches: float
    computed: float  # share of tokens of rows, in the last step
    seconds: float

    def step_at(self, budget: float) -> int:
        """The last evaluation within a budget of sampled tokens."""
        spent = dict(zip((step for step, _ in self.tokens), itertools.accumulate(v for _, v in self.tokens),
                         strict=True))  # fmt: skip
        return max(step for step in self.solved if not step or spent[step] <= budget)

    def actions_until(self, step: int) -> float:
        return sum(value for at, value in self.actions if at <= step)


def main() -> int:
    options = arguments()
    out = Path(options.output_dir)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that work
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        speed, words = pool.submit(machine).result()
        print(words, "", sep="\n")
        pool.submit(warm_start, out, ENVIRONMENT, options.agent_flags, options.resume).result()
        jobs = [
            Job(keys, variant, seed, arguments_of(out, keys, variant, seed) + options.flags)
            for keys, variant, seed in itertools.product(options.keys, options.only, options.seeds)
        ]
        runs = list(pool.map(train, jobs, [options.resume] * len(jobs)))
    rows, figures = [], {}
    for keys in options.keys:
        mine = [run for run in runs if run.job.keys == keys]
        budget = budget_of(mine)
        found = {name: [run for run in mine if run.job.variant == name] for name in options.only}
        print(f"keys {keys}, {budget / 1000:.0f}k tokens:", "", show(found, budget), "", sep="\n")
        rows += [row for name, each in found.items() for row in rows_of(f"keys {keys}, {name}", each, budget)]
        figures[f"keys {keys}: held-out success over steps"] = [
            Panel(name, [run.success for run in each]) for name, each in found.items()
        ]
    write([speed, *rows], options.json)
    if options.plot:
        options.plot.write_text(drawing(figures))
    return 0


def arguments() -> argparse.Namespace:
    parser = seeds_parser(__doc__, 5, "runs/branching")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT",
                        help=f"some of: {'; '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--keys", nargs="+", choices=ROOMS, default=list(ROOMS), help="where they lie")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each (default 1)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--quick", action="store_true", help="a few steps of two variants: does it work?")
    options = parser.parse_args()
    options.agent_flags, options.flags = [], [f"--steps={round(STEPS * MORE)}"]
    if options.quick:
        options.only, options.keys, options.seeds = ["linear", "arpo"], ["later"], range(1)
        options.output_dir = f"{options.output_dir}_quick"
        options.agent_flags = ["--warm-start.steps=20"]
        options.flags = ["--steps=2", "--eval.every=1", "--eval.tasks=16"]
    return options


def arguments_of(out: Path, keys: str, variant: str, seed: int) -> list[str]:
    return [
        f"@{FILES / f'{ENVIRONMENT}.toml'}", f"--model.name={agent_of(out, ENVIRONMENT)}", *ROLLOUT,
        *VARIANTS[variant], *ROOMS[keys], f"--seed={seed}", f"--name=seed_{seed}",
        f"--output-dir={out / keys / variant.replace(', ', '_').replace(' ', '_')}",
    ]  # fmt: skip


def train(job: Job, resume: bool) -> Run:
    """With `resume` a finished run is read and another one gone on with."""
    from silva import train as run
    from silva.config.load import load
    from silva.registries import REGISTRIES

    outcome = run(load(job.argv, REGISTRIES), resume=resume, overwrite=not resume)
    folder = outcome.directory
    curve = series(folder, f"eval/{ENVIRONMENT}/success")
    branches = [value for _, value in series(folder, "forest/branches")] or [0.0]
    last = max(step for step, _ in series(folder, "rollout/steps"))
    seconds = sum(outcome.summary["seconds"].values())
    values = " ".join(f"{value:.0%}" for _, value in curve)
    print(f"keys {job.keys}, {job.variant}, seed {job.seed}: {values} in {seconds:.0f} s", file=sys.stderr)
    return Run(
        job, held_out(folder), series(folder, "rollout/sampled_tokens"), series(folder, "rollout/steps"),
        curve, float(np.mean(branches)), computed(folder / "rollouts" / f"step_{last}.parquet"), seconds,
    )  # fmt: skip


def computed(path: Path) -> float:
    """Tokens of the trie of each group, by tokens of its rows; 1 where nothing was trained."""
    groups: dict[str, list[np.ndarray]] = {}
    for row in read_rollouts(path):
        if row.status == "trained":
            rows = trajectory_samples(row.trajectory, row.group)
            groups.setdefault(row.group, []).extend(sample.tokens for sample in rows)
    tokens = sum(len(tokens) for rows in groups.values() for tokens in rows)
    return sum(len(build(rows)) for rows in groups.values()) / tokens if tokens else 1.0


def budget_of(runs: Sequence[Run]) -> float:
    """Tokens that `linear` samples in STEPS steps, or whoever is there first; the mean over seeds."""
    first = runs[0].job.variant
    return float(np.mean([sum(v for step, v in run.tokens if step <= STEPS) for run in runs
                          if run.job.variant == first]))  # fmt: skip


def at(runs: Sequence[Run], budget: float) -> tuple[Estimate, list[float], float]:
    """Success of all seeds at the budget, that of each, and the actions until there."""
    steps = [run.step_at(budget) for run in runs]
    found = [run.solved[step] for run, step in zip(runs, steps, strict=True)]
    actions = float(np.mean([run.actions_until(step) for run, step in zip(runs, steps, strict=True)]))
    return (
        pooled(found),
        sorted(map(mean, found)),
        actions,
    )


def show(found: Mapping[str, Sequence[Run]], budget: float) -> str:
    head = ["variant", "start", "after", "seeds", "actions", "branches", "trained", "seconds"]
    lines = []
    for name, runs in found.items():
        after, seeds, actions = at(runs, budget)
        start = pooled([run.solved[0] for run in runs])
        lines.append([
            name, interval(asdict(start)), interval(asdict(after)), f"{seeds[0]:.0%} to {seeds[-1]:.0%}",
            f"{actions / 1000:.1f}k", f"{np.mean([run.branches for run in runs]):.0%}",
            f"{np.mean([run.computed for run in runs]):.2f}", f"{np.mean([run.seconds for run in runs]):.0f}",
        ])  # fmt: skip
    return table(head, lines)


def rows_of(case: str, runs: Sequence[Run], budget: float) -> list[Row]:
    after, seeds, actions = at(runs, budget)
    return [
        Row(case, "held-out success at the budget", after.mean, "share"),
        Row(case, "lowest seed", seeds[0], "share"),
        Row(case, "highest seed", seeds[-1], "share"),
        Row(case, "actions until the budget", actions, "actions"),
        Row(
            case,
            "tokens trained, shared ones once",
            float(np.mean([r.computed for r in runs])),
            "of all rows",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())

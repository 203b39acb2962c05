"""Which recipes learn? All that work on linear rollouts, from one warm-started agent, on one budget.

    .venv/bin/python benchmarks/recipes.py --jobs 2 --json recipes.json --plot docs/recipes.svg
    .venv/bin/python benchmarks/recipes.py --only grpo ppo --environments bandit --resume
    .venv/bin/python benchmarks/recipes.py --collapse --plot docs/collapse.svg

A tiny model imitates scripted play with random moves in it, once for each environment (`silva sft`), and is
exported. From that folder every recipe trains with its defaults, on as many episodes: 16 groups in each of 40
steps. So there are no refills (`dapo` does without its own), and `starpo_s` trains the 4 groups of 16 that
vary most. A step has two updates, or one where the loss has no ratio to correct the second by.

Set as a user would for a model this small: learning rates of 3e-4 or 1e-3, 1e-3 for critics (the defaults
suit pretrained models). `distillation` learns from what the first seed of `grpo` has become, whose episodes
come on top. The bandit has groups of 16 and its risky arm pays every second time, as payouts are mostly
chance. With groups of 8 and one payout in four, which is its default, dividing by the group's std turns
learning around: unlucky groups, where the safe arm looks better, have the smaller std (expected advantage of
the risky arm over the safe one where six in ten are risky: -0.11 with `mean_std`, 0.13 with `mean`).

Success is that of all seeds' episodes on held-out tasks. Its interval resamples tasks and says nothing of how
seeds differ, so the lowest and the highest of them stand beside it. A recipe improves where the interval
after training lies above that of the start. Entropy is of the tokens of held-out episodes, so that no filter
touches it; "equal groups" are those of the last 5 steps whose rewards are all the same. "clipped" is the
share of trained tokens that the loss's bounds took the gradient from, "invalid" that of episodes with an
invalid action, of those trained and of those left out. The folder of every run keeps its configuration. Exit
code 1 where a run failed or took more than 90 seconds.

`--collapse` asks what StarPO-S is made for: three times as many steps on frozen_lake at twice the learning
rate, which does not fall. `starpo` trains 16 groups a step; `starpo_s` the 4 of 16 that vary most, or the
16 of 64: as many episodes played, or as many trained.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
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

from silva.algorithms import ALGORITHMS, recipes
from silva.algorithms.settings import Algorithm
from silva.errors import SilvaError
from silva.evaluation.statistics import Estimate
from silva.storage.ledger import history
from silva.storage.ledger import read as read_ledger
from silva.storage.rollouts import read_rollouts

FILES = Path(__file__).parent / "environments"  # what is set for each of them, and their agents' warm starts
ENVIRONMENTS = ("frozen_lake", "bandit")
STEPS, GROUPS, SECONDS = 40, 16, 90
COLLAPSE = {  # name: recipe, groups trained in a step, of those played
    "starpo, 16 of 16": ("starpo", 16),
    "starpo_s, 4 of 16": ("starpo_s", 4),
    "starpo_s, 16 of 64": ("starpo_s", 16),
}
COLLAPSE_FLAGS = ("--steps=120", "--eval.every=20", "--trainer.optimizer.schedule=constant")
QUICK_AGENT, QUICK_FLAGS = ("--warm-start.steps=100",), ("--steps=2", "--eval.every=1", "--eval.tasks=16")
ELSEWHERE = {"arpo", "aepo", "act_prm", "act_prm_probs", "cross_entropy"}  # branches, thoughts, experts
RECIPES = [name for name in ALGORITHMS if name not in ELSEWHERE]
REFERENCE, DISTILLED = "grpo", "distillation"
END = 5  # last steps, over which numbers of one step are averaged


@dataclass(frozen=True)
class Job:
    """One run: its configuration as arguments of `silva rl`."""

    environment: str
    name: str  # a recipe, or one of COLLAPSE
    seed: int
    argv: Sequence[str]


@dataclass(frozen=True)
class Run:
    """What came of a job: success by held-out task before and after, curves of (step, value)."""

    job: Job
    before: Solved
    after: Solved
    success: Curve
    entropy: Curve
    equal: Curve  # share of the step's groups whose rewards are all equal
    clipped: Curve  # share of the trained tokens that the loss's bounds took the gradient from
    invalid: tuple[float, float]  # share of the episodes with an invalid action, trained and left out
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Compared:
    """The seeds of one name in one environment."""

    environment: str
    name: str
    runs: Sequence[Run]

    @property
    def before(self) -> Estimate:
        return pooled([run.before for run in self.runs])

    @property
    def after(self) -> Estimate:
        return pooled([run.after for run in self.runs])

    @property
    def verdict(self) -> str:
        before, after = self.before, self.after
        if after.ci_low > before.ci_high:
            return "yes"
        return "no, worse" if after.ci_high < before.ci_low else "no"

    @property
    def seeds(self) -> list[float]:
        """Success after training, the lowest first."""
        return sorted(run.success[-1][1] for run in self.runs)

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self.runs)

    def at_start(self, name: str) -> float:
        return float(np.mean([getattr(run, name)[0][1] for run in self.runs]))

    def at_end(self, name: str, last: int = 1) -> float:
        return float(np.mean([value for run in self.runs for _, value in getattr(run, name)[-last:]]))


def main() -> int:
    options = arguments()
    out = Path(options.output_dir)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that work
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        speed, words = pool.submit(machine).result()
        print(words, "", sep="\n")
        agents = [pool.submit(warm_start, out, environment, options.agent_flags, options.resume)
                  for environment in options.environments]  # fmt: skip
        for agent in agents:
            agent.result()
        jobs = [
            Job(environment, name, seed, arguments_of(out, environment, name, seed) + options.flags)
            for environment, name, seed in itertools.product(
                options.environments, options.only, options.seeds
            )
        ]
        runs = play(pool, [job for job in jobs if job.name != DISTILLED], options.resume)
        runs += play(pool, [job for job in jobs if job.name == DISTILLED], options.resume)
    runs.sort(key=lambda run: jobs.index(run.job))
    results = [
        Compared(environment, name, list(mine))
        for (environment, name), mine in itertools.groupby(
            runs, lambda run: (run.job.environment, run.job.name)
        )
    ]
    if options.collapse:
        show_collapse(results)
        figures, rows, slow = figures_of_collapse, rows_of_collapse, []
    else:
        show_recipes(results)
        figures, rows, slow = figures_of_recipes, rows_of_recipe, [r for r in results if r.seconds > SECONDS]
    for result in slow:
        print(f"{result.environment}, {result.name}: {result.seconds:.0f} s, more than {SECONDS}")
    print(f"{len(runs)} of {len(jobs)} runs finished")
    write([speed, *(row for result in results for row in rows(result))], options.json)
    if options.plot:
        options.plot.write_text(drawing(figures(results)))
    return 0 if len(runs) == len(jobs) and not slow else 1


def arguments() -> argparse.Namespace:
    parser = seeds_parser(__doc__, 3, "runs/recipes")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE",
                        help=f"some of {', '.join(RECIPES)}; distillation needs a run of grpo")  # fmt: skip
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each (default 1)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--quick", action="store_true", help="two steps of one recipe: does all of it work?")
    parser.add_argument("--collapse", action="store_true", help="long runs of starpo and starpo_s instead")
    parser.add_argument("--lr", default="6e-4", help="of the runs of --collapse (default 6e-4)")
    options = parser.parse_args()
    options.agent_flags, options.flags = [], [f"--steps={STEPS}"]
    if options.collapse:
        options.only, options.environments = list(COLLAPSE), ["frozen_lake"]
        options.flags = [*COLLAPSE_FLAGS, f"--trainer.optimizer.lr={options.lr}"]
    if options.quick:
        options.only, options.seeds, options.output_dir = (
            options.only[:1],
            range(1),
            f"{options.output_dir}_quick",
        )
        options.agent_flags, options.flags = list(QUICK_AGENT), list(QUICK_FLAGS)
    return options


def warm_start(out: Path, environment: str, flags: Sequence[str], resume: bool) -> None:
    """Make the agent of an environment, unless there is one to go on with."""
    from silva.commands.sft import supervise
    from silva.config.load import load
    from silva.registries import REGISTRIES

    if resume and (agent_of(out, environment) / "config.json").exists():
        return
    argv = [
        f"@{FILES / f'{environment}_agent.toml'}",
        "--name=agent",
        f"--output-dir={out / environment}",
        *flags,
    ]
    supervise(load(argv, REGISTRIES), overwrite=True)


def agent_of(out: Path, environment: str) -> Path:
    return out / environment / "agent" / "weights" / "step_0"


def arguments_of(out: Path, environment: str, name: str, seed: int) -> list[str]:
    """Of `silva rl`: as many episodes for every recipe, or the groups that COLLAPSE says."""
    recipe, groups = COLLAPSE.get(name, (name, None))
    settings: Algorithm = getattr(recipes, ALGORITHMS[recipe].rpartition(":")[2])()
    folder = f"collapse/{recipe}_{groups}" if groups else recipe
    argv = [
        f"@{FILES / f'{environment}.toml'}",
        f"--model.name={agent_of(out, environment)}",
        f"--algorithm.type={recipe}",
        "--algorithm.max-refills=0",
        f"--rollout.groups-per-step={groups or round(GROUPS / settings.oversample)}",
        f"--trainer.updates-per-step={1 if settings.loss.type == 'reinforce' else 2}",
        f"--seed={seed}",
        f"--name=seed_{seed}",
        f"--output-dir={out / environment / folder}",
    ]
    if recipe == DISTILLED:
        reference = out / environment / REFERENCE / "seed_0" / "weights" / f"step_{STEPS}"
        argv.append(f"--algorithm.reference.name={reference}")
    return argv


def play(pool: ProcessPoolExecutor, jobs: Iterable[Job], resume: bool) -> list[Run]:
    """The runs that finish; of the others it says why they did not."""
    waiting, done = {pool.submit(train, job, resume): job for job in jobs}, []
    for future in as_completed(waiting):
        job = waiting[future]
        name = f"{job.environment}, {job.name}, seed {job.seed}"
        try:
            done.append(result := future.result())
            values = " ".join(f"{value:.0%}" for _, value in result.success)
            print(f"{name}: {values} in {result.seconds:.0f} s", file=sys.stderr)
        except SilvaError as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return done


def train(job: Job, resume: bool) -> Run:
    """With `resume` a finished run is read and another one gone on with."""
    from silva import train as run
    from silva.config.load import load
    from silva.registries import REGISTRIES

    outcome = run(load(job.argv, REGISTRIES), resume=resume, overwrite=not resume)
    folder = outcome.directory
    curve, solved = series(folder, f"eval/{job.environment}/success"), held_out(folder)
    entropy = [(step, entropy_in(folder / "rollouts" / f"step_{step}.parquet")) for step in solved]
    seconds = sum(outcome.summary["seconds"].values())
    return Run(job, solved[0], solved[curve[-1][0]], curve, entropy, equal_groups(folder / "ledger.jsonl"),
               series(folder, "train/clipped"), invalid_shares(folder / "rollouts"), seconds,
               outcome.summary["tokens_generated"])  # fmt: skip


def entropy_in(path: Path) -> float:
    """Mean over the tokens of the held-out episodes."""
    rows = [row for row in read_rollouts(path) if row.status == "eval" and row.trajectory.failure is None]
    segments = [s for row in rows for turn in row.trajectory.turns for s in turn.segments]
    return float(np.mean([h for s in segments for h in s.entropies]))


def invalid_shares(folder: Path) -> tuple[float, float]:
    """The share of episodes with an invalid action, of those trained and of those that filters left out."""
    rows = [row for path in folder.glob("step_*.parquet") for row in read_rollouts(path)]
    found = []
    for status in ("trained", "dropped"):
        valid = [row.trajectory.metrics["action_is_valid"] for row in rows
                 if row.status == status and row.trajectory.failure is None]  # fmt: skip
        found.append(float(np.mean([share < 1 for share in valid])) if valid else 0.0)
    return found[0], found[1]


def equal_groups(ledger: Path) -> Curve:
    """(step, share of the groups played in it whose raw rewards are all equal), whatever became of them."""
    found: dict[int, list[bool]] = {}
    for record in history(read_ledger(ledger)):
        if record.event == "sealed":
            for group in record.fields["groups"].values():
                rewards = {reward for reward in group["rewards"] if reward is not None}
                found.setdefault(record.fields["step"], []).append(len(rewards) < 2)
    return [(step, float(np.mean(equal))) for step, equal in sorted(found.items())]


def show_recipes(results: Sequence[Compared]) -> None:
    head = ["recipe", "start", "after", "seeds", "improves", "seconds", "entropy", "equal groups", "clipped",
            "invalid", "tokens"]  # fmt: skip
    for environment, group in itertools.groupby(results, lambda r: r.environment):
        lines = [
            [f"`{r.name}`", interval(asdict(r.before)), interval(asdict(r.after)),
             f"{r.seeds[0]:.0%} to {r.seeds[-1]:.0%}", r.verdict, f"{r.seconds:.0f}",
             f"{r.at_start('entropy'):.2f} to {r.at_end('entropy'):.2f}", f"{r.at_end('equal', END):.0%}",
             f"{np.mean([value for run in r.runs for _, value in run.clipped] or [0]):.1%}",
             " / ".join(f"{share:.0%}" for share in np.mean([run.invalid for run in r.runs], 0)),
             thousands(r)]
            for r in group
        ]  # fmt: skip
        print(f"{environment}:", "", table(head, lines), "", sep="\n")


def rows_of_recipe(r: Compared) -> list[Row]:
    case, before, after = f"{r.environment}, {r.name}", r.before, r.after
    return [
        Row(case, "held-out success, start", before.mean, "share"),
        Row(case, "held-out success, after", after.mean, "share", "start",
            after.mean / before.mean if before.mean else None),
        Row(case, "gap between the intervals", after.ci_low - before.ci_high, "share", target="> 0"),
        Row(case, "lowest seed, after", r.seeds[0], "share"),
        Row(case, "highest seed, after", r.seeds[-1], "share"),
        Row(case, "time of the slowest seed", r.seconds, "s", target=f"<= {SECONDS}"),
        Row(case, "entropy at the end", r.at_end("entropy"), "nats"),
        Row(case, f"groups of equal rewards, last {END} steps", r.at_end("equal", END), "share"),
        Row(case, "tokens sampled", float(np.mean([run.tokens for run in r.runs])), "tokens"),
    ]  # fmt: skip


def show_collapse(results: Sequence[Compared]) -> None:
    head = ["groups trained", "start", "after", "best", "lost since", "seeds", "entropy", "equal groups",
            "tokens"]  # fmt: skip
    lines = [
        [r.name, interval(asdict(r.before)), interval(asdict(r.after)), f"{best(r):.1%}",
         f"{best(r) - r.after.mean:.1%}", f"{r.seeds[0]:.0%} to {r.seeds[-1]:.0%}",
         f"{r.at_start('entropy'):.3f} to {r.at_end('entropy'):.3f}",
         f"{r.at_start('equal'):.0%} to {r.at_end('equal', END):.0%}", thousands(r)]
        for r in results
    ]  # fmt: skip
    print(table(head, lines))


def rows_of_collapse(r: Compared) -> list[Row]:
    case = f"collapse, {r.name}"
    return [
        Row(case, "held-out success, start", r.before.mean, "share"),
        Row(case, "held-out success, best", best(r), "share"),
        Row(case, "held-out success, after", r.after.mean, "share", "best", r.after.mean / (best(r) or 1)),
        Row(case, "entropy, start", r.at_start("entropy"), "nats"),
        Row(case, "entropy, after", r.at_end("entropy"), "nats", "start",
            r.at_end("entropy") / r.at_start("entropy")),
        Row(case, f"groups of equal rewards, last {END} steps", r.at_end("equal", END), "share"),
    ]  # fmt: skip


def thousands(r: Compared) -> str:
    return f"{np.mean([run.tokens for run in r.runs]) / 1000:.1f}k"


def best(r: Compared) -> float:
    """The highest point of the seeds' mean curve."""
    return max(float(np.mean(values)) for values in zip(*([v for _, v in run.success] for run in r.runs),
                                                        strict=True))  # fmt: skip


def figures_of_recipes(results: Sequence[Compared]) -> dict[str, list[Panel]]:
    return {
        f"{environment}: held-out success over steps": [Panel(r.name, [run.success for run in r.runs])
                                                 for r in group]
        for environment, group in itertools.groupby(results, lambda r: r.environment)
    }  # fmt: skip


def figures_of_collapse(results: Sequence[Compared]) -> dict[str, list[Panel]]:
    highest = max(value for r in results for run in r.runs for _, value in run.entropy)
    return {
        "held-out success over steps": [Panel(r.name, [run.success for run in r.runs]) for r in results],
        "entropy, nats a token": [Panel(r.name, [run.entropy for run in r.runs], highest) for r in results],
        "groups of equal rewards": [Panel(r.name, [run.equal for run in r.runs]) for r in results],
    }


if __name__ == "__main__":
    sys.exit(main())

"""Do thoughts help to learn from an expert? Cloning its actions, thoughts for them (Act-PRM), RL after each.

    .venv/bin/python benchmarks/act_prm.py --jobs 2 --json act_prm.json
    .venv/bin/python benchmarks/act_prm.py --environments frozen_lake --seeds 1 --resume

A tiny model clones an expert's actions for a while (the start). From there it goes on with as many
demonstrations: it clones actions (`actions`), or it thinks before each action and is trained with the recipe
`act_prm` on its thoughts and the action (`thoughts`). From both GRPO goes on with as many episodes.
textworld needs `pip install 'silva[adventures]'`.

"action" is the likelihood of the expert's next action on held-out tasks, exp(mean log p) of its tokens, mean
over actions: after a thought of the model's own where it was trained to think. "success" is that of its own
play on held-out tasks, "thinks" the share of its replies with a thought. Intervals are of held-out tasks over
the episodes of all seeds; how the seeds differ stands beside them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Row, Solved, interval, machine, mean, pooled, seeds_parser, solved_in, table, write

FILES = Path(__file__).parent / "environments" / "act_prm"
ENVIRONMENTS = ("frozen_lake", "textworld")
START = 100  # steps of cloning before all else
EPISODES = 16  # of a step of cloning
THINK = ["--rollout.type=thoughts", "--algorithm.type=act_prm", "--algorithm.early-stop=0"]
UNWATCHED = ["--eval.tasks=2"]  # stages are measured afterwards, all in the same way
STAGES = ("start", "actions", "thoughts", "actions, RL", "thoughts, RL")


@dataclass(frozen=True)
class Stage:
    """What came of one stage: success by held-out task; likelihood of the expert's actions."""

    name: str
    solved: Solved
    likelihood: float
    thinks: float


@dataclass(frozen=True)
class Job:
    environment: str
    seed: int
    out: Path
    resume: bool
    flags: Sequence[str]
    demonstrations: int  # of each stage after the start


def main() -> int:
    parser = seeds_parser(__doc__, 3, "runs/act_prm")
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each (default 1)")
    parser.add_argument("--demonstrations", type=int, default=480, help="of each stage (default 480)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each stage: does it work?")
    options = parser.parse_args()
    out, flags = Path(options.output_dir), list[str]()
    if options.quick:
        options.seeds, out, flags = range(1), Path(f"{out}_quick"), ["--steps=1", "--eval.tasks=4"]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that work
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        speed, words = pool.submit(machine).result()
        print(words, "", sep="\n")
        pairs = itertools.product(options.environments, options.seeds)
        jobs = [Job(*pair, out, options.resume, flags, options.demonstrations) for pair in pairs]
        runs = list(zip(jobs, pool.map(play, jobs), strict=True))
    rows = []
    for environment in options.environments:
        found = {name: [run[name] for job, run in runs if job.environment == environment] for name in STAGES}
        print(f"{environment}:", "", show(found), "", sep="\n")
        rows += [row for name, each in found.items() for row in rows_of(f"{environment}, {name}", each)]
    write([speed, *rows], options.json)
    return 0


def play(job: Job) -> dict[str, Stage]:
    """All stages of one seed, each from the weights of the one before it."""
    steps = job.demonstrations // groups_of(job)
    start = clone(job, "start", START, None)
    actions = clone(job, "actions", job.demonstrations // EPISODES, start)
    thoughts = train(job, "thoughts", start, [f"--steps={steps}", *THINK, *rollout_of(job)])
    actions_rl = train(job, "actions, RL", actions, [])
    thoughts_rl = train(job, "thoughts, RL", thoughts, [])
    runs = dict(zip(STAGES, (start, actions, thoughts, actions_rl, thoughts_rl), strict=True))
    found = {name: measured(job, name, run) for name, run in runs.items()}
    line = ", ".join(
        f"{s.name} {np.mean(list(itertools.chain(*s.solved.values()))):.0%}" for s in found.values()
    )
    print(f"{job.environment}, seed {job.seed}: {line}", file=sys.stderr)
    return found


def config_of(job: Job, name: str, flags: Sequence[str], kind: str = "") -> Any:
    from silva.config.load import load
    from silva.registries import REGISTRIES

    folder = job.out / job.environment / f"seed_{job.seed}"
    argv = [f"@{FILES / f'{job.environment}{kind}.toml'}", f"--seed={job.seed}", f"--output-dir={folder}",
            f"--name={name.replace(', ', '_')}", *flags]  # fmt: skip
    return load(argv, REGISTRIES)


def groups_of(job: Job) -> int:
    return int(config_of(job, "any", []).config.rollout.groups_per_step)


def rollout_of(job: Job) -> list[str]:
    """A table whose type the command line changes restarts, so what the file says of rollouts is repeated."""
    rollout = config_of(job, "any", []).config.rollout
    limits = [f"--rollout.limits.{name.replace('_', '-')}={getattr(rollout.limits, name)}"
              for name in ("max_turns", "max_turn_tokens", "max_episode_tokens")]  # fmt: skip
    return [f"--rollout.groups-per-step={rollout.groups_per_step}", "--rollout.group-size=4",
            "--algorithm.max-refills=0", *limits]  # fmt: skip


def clone(job: Job, name: str, steps: int, start: Path | None) -> Path:
    """The folder of a run that imitates the expert's actions."""
    from silva.commands.sft import supervise

    model = [] if start is None else ["--model.type=pretrained", f"--model.name={weights_of(start)}"]
    steps = 2 if job.flags else steps
    resolved = config_of(
        job, name, [*UNWATCHED, *job.flags, *model, f"--warm-start.steps={steps}"], "_cloning"
    )
    path = Path(resolved.config.output_dir) / resolved.config.name
    if not (job.resume and (path / "summary.json").exists()):
        supervise(resolved, overwrite=True)
    return path


def train(job: Job, name: str, start: Path, flags: Sequence[str]) -> Path:
    from silva import train as run

    model = ["--model.type=pretrained", f"--model.name={weights_of(start)}"]
    resolved = config_of(job, name, [*flags, *model, *UNWATCHED, *job.flags])
    run(resolved, resume=job.resume, overwrite=not job.resume)
    return Path(resolved.config.output_dir) / resolved.config.name


def weights_of(run: Path) -> Path:
    return max((run / "weights").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def measured(job: Job, name: str, run: Path) -> Stage:
    from silva.algorithms.diagnostics import thought_share
    from silva.commands.evaluate import evaluate_config

    weights = weights_of(run)
    model = ["--model.type=pretrained", f"--model.name={weights}"]
    (played,) = evaluate_config(config_of(job, "play", [*job.flags, *model]).config)
    likely = likelihood(job, weights, thinks=name.startswith("thoughts"))
    thinks = thought_share([turn for _, trajectory in played.episodes for turn in trajectory.turns])
    return Stage(name, solved_in(played.episodes), likely, thinks)


def likelihood(job: Job, weights: Path, *, thinks: bool) -> float:
    """Mean over the expert's actions on held-out tasks of exp(mean log p of its tokens)."""
    from silva.protocols import Work
    from silva.rollouts.settings import ThoughtsRolloutSettings
    from silva.rollouts.thoughts import Thoughts
    from silva.run import loaded

    flags = ["--model.type=pretrained", f"--model.name={weights}", *job.flags]
    config = config_of(job, "likelihood", flags).config
    settings = ThoughtsRolloutSettings(group_size=1, commit="own", limits=config.rollout.limits)

    async def play(assembly: Any) -> list[float]:
        (tasks,) = assembly.tasksets.values()
        rollout = Thoughts(settings, assembly.engine, assembly.renderer, seed=job.seed)
        chosen = list(tasks.tasks("eval"))[: config.eval.tasks]
        if not thinks:
            return [p for task in chosen for p in await plainly(assembly, tasks, task, config)]
        work = [Work(f"eval{i}", task, tasks, 1.0) for i, task in enumerate(chosen)]
        groups = [group for each in work async for group in rollout.run(each)]
        return [turn.rewards["action_prob"] for g in groups for t in g.scored for turn in t.turns]

    with loaded(config) as assembly:
        return float(np.mean(asyncio.run(play(assembly))))


async def plainly(assembly: Any, tasks: Any, task: Any, config: Any) -> list[float]:
    """Of each of the expert's actions in its own episode, without a thought."""
    from silva.actors.script import Script
    from silva.rollouts.episode import play

    found = []

    class Scored(Script):
        async def reply(self, request: Any) -> Any:
            reply = await Script.reply(self, request)
            said = reply.segments[0].tokens[:-1]  # without what ends the turn
            scores = await assembly.engine.score([*request.tokens, *said], len(request.tokens))
            found.append(math.exp(math.fsum(scores.logprobs) / len(said)))
            return reply

    actor = Scored(assembly.renderer)
    await play(task, tasks, actor, assembly.renderer, config.rollout.limits, id="scored", seed=config.seed)
    return found


def show(found: dict[str, list[Stage]]) -> str:
    head = ["stage", "success", "seeds", "action", "seeds", "thinks"]
    lines = []
    for name, stages in found.items():
        seeds, solved = [mean(s.solved) for s in stages], pooled([s.solved for s in stages])
        likely = [s.likelihood for s in stages]
        lines.append([
            name, interval(asdict(solved)), f"{min(seeds):.0%} to {max(seeds):.0%}",
            f"{np.mean(likely):.3f}", f"{min(likely):.3f} to {max(likely):.3f}",
            f"{np.mean([s.thinks for s in stages]):.0%}",
        ])  # fmt: skip
    return table(head, lines)


def rows_of(case: str, stages: Sequence[Stage]) -> list[Row]:
    return [
        Row(case, "held-out success", pooled([s.solved for s in stages]).mean, "share"),
        Row(
            case, "likelihood of the expert's action", float(np.mean([s.likelihood for s in stages])), "share"
        ),
        Row(case, "replies with a thought", float(np.mean([s.thinks for s in stages])), "share"),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""What an evaluation and a synthesis share: jobs are played by somebody, and kept in a folder as they end.

Not here: what is made of the episodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from silva.actors.policy import Policy
from silva.actors.script import Script
from silva.assembly import Assembly
from silva.config.schema import RunConfig
from silva.config.sections import Sampling
from silva.evaluation.evaluator import Job
from silva.evaluation.store import EvalFolder
from silva.monitoring.report import Decode
from silva.protocols import Actor, TaskSet
from silva.rendering.renderer import Renderer
from silva.run import loaded, say
from silva.types import Trajectory
from silva.wire.requests import Counts


def read_tasks(config: RunConfig, console: Console, *, held_out: bool = True) -> dict[str, TaskSet]:
    """They are read before a model is loaded, because everything may be finished.

    Args:
        held_out: how many tasks are held out is said too.
    """
    assembly = Assembly(config)
    try:
        own = [note for each in assembly.tasksets.values() for note in getattr(each, "notes", ())]
        for note in assembly.data_notes if held_out else own:
            say(note, console)
        return assembly.tasksets
    finally:
        assembly.close()


@contextmanager
def kept(store: EvalFolder, steps: Sequence[int], jobs: Sequence[Job], console: Console) -> Iterator[None]:
    """What ends it early (Ctrl-C, a cap that is met, a service that is gone) loses nothing."""
    try:
        yield
    except BaseException:
        total = len(jobs) * len(steps)
        count = total - sum(store.missing(step, jobs) for step in steps)
        say(f"{store.path}: {count} of {total} episodes are kept; the same command goes on with the others",
            console)  # fmt: skip
        raise


async def play_missing(
    jobs: Sequence[Job],
    configs: Mapping[int, RunConfig],
    policy: str,
    sampling: Sampling,
    tasksets: dict[str, TaskSet],
    store: EvalFolder,
    console: Console,
) -> Decode | None:
    """What is missing of these jobs, for each step of the weights; how the last model's tokens become text,
    for people.

    Args:
        configs: by step, with the model that plays.
        policy: model, expert or random: who plays.
    """
    decode: Decode | None = None
    for number, (step, config) in enumerate(configs.items()):
        async with parts(config, policy, tasksets, sampling, console) as (assembly, actor, renderer, counts):
            decode = assembly.tokenizer.decode if renderer is not None else None
            for note in assembly.notes if renderer is not None and not number else ():
                say(note, console)
            if counts is not None:  # what was paid before counts for the cap
                for name, value in store.spent.items():
                    setattr(counts, name, value)

            def keep(job: Job, played: Trajectory, step: int = step, counts: Counts | None = counts) -> None:
                store.keep(step, job, played, asdict(counts) if counts else None)

            # Of a paid service few are cut off when its cap is met: no more at once than requests.
            most = {} if counts is None else {"concurrency": config.engine.max_concurrent}
            try:
                with Progress(console=console, transient=True) as progress:
                    bar = progress.add_task(f"playing{f' step {step}' if len(configs) > 1 else ''}")
                    await assembly.play(jobs, actor, renderer, on_episode=partial(_shown, progress, bar),
                                        known=store.known(step), keep=keep, **most)  # fmt: skip
            finally:
                if counts is not None:
                    store.pay(asdict(counts))
    return decode


def _shown(progress: Progress, bar: Any, done: int, total: int, label: str) -> None:
    progress.update(bar, completed=done, total=total)


@asynccontextmanager
async def parts(
    config: RunConfig,
    policy: str,
    tasksets: dict[str, TaskSet] | None,
    sampling: Sampling,
    console: Console,
) -> AsyncIterator[tuple[Assembly, Actor, Renderer | None, Counts | None]]:
    """Who plays. For an API no model and no tokenizer is loaded, and the cost is counted."""
    if config.engine.only_evaluates and policy == "model":
        assembly = Assembly(config, tasksets=tasksets)
        try:
            actor = config.engine.actor(assembly, sampling)
            try:
                await actor.reach()
                yield assembly, actor, None, actor.counts
            finally:
                for note in actor.notes:
                    say(note, console)
                await actor.close()
        finally:
            assembly.close()
        return
    if config.engine.only_evaluates:  # scripted play samples nothing
        config = config.model_copy(update={"engine": type(config).model_fields["engine"].default})
    with loaded(config, tasksets=tasksets) as assembly:
        await assembly.connect()
        renderer = assembly.renderer
        script = partial(Script, renderer, mistakes=float(policy == "random"))
        model = partial(Policy, assembly.engine, renderer, sampling)
        yield assembly, model() if policy == "model" else script(), renderer, None

"""`silva eval`: held-out evaluation of a model, of a run's weights, or of scripted play."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from silva.assembly import model_settings
from silva.commands.common import loaded, say
from silva.config.schema import RunConfig
from silva.errors import ConfigError
from silva.evaluation.evaluator import Evaluation, evaluate
from silva.orchestrator import held_out
from silva.protocols import Actor
from silva.rollouts.actors import Policy, Script


def evaluate_config(
    config: RunConfig, *, policy: str = "model", weights: str | None = None
) -> list[Evaluation]:
    """Held-out evaluation of the model (or of `weights`), or of scripted play.

    Args:
        policy: model, expert or random: who plays.
        weights: a run's folder or a model folder in place of `[model]`.
    """
    if weights is not None:
        config = config.model_copy(update={"model": model_settings(weights)})
    if policy not in ("model", "expert", "random"):
        raise ConfigError(f"--policy {policy}: expected model, expert or random")
    return asyncio.run(_evaluate(config, policy, Path(weights) if weights else None))


async def _evaluate(config: RunConfig, policy: str, run: Path | None) -> list[Evaluation]:
    console = Console(stderr=True)
    with loaded(config) as assembly:
        changes = held_out.changes(run, assembly.tasksets, config.eval.tasks) if run else []
        for note in (*assembly.notes, *changes):
            say(note, console)
        actor: Actor
        if policy == "model":
            actor = Policy(assembly.engine, assembly.renderer, config.eval.sampling)
        else:
            actor = Script(assembly.renderer, mistakes=float(policy == "random"))
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("evaluating")
            return await evaluate(
                assembly.tasksets,
                actor,
                assembly.renderer,
                config.eval,
                config.rollout.limits,
                seed=config.seed,
                redo=config.rollout.redo,
                on_episode=lambda done, total, label: progress.update(bar, completed=done, total=total),
            )

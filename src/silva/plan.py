"""What a run will cost, in numbers, before it starts: `silva rl ... --dry-run`.

Lengths are measured, not guessed: two groups are played with the model as it is now. A policy that learns to
answer shorter or longer moves the tokens with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from silva.config.schema import RunConfig
from silva.launch import check
from silva.models.loading import LoadedModel
from silva.rollouts.linear import Linear
from silva.session import Session

PROBE_GROUPS = 2
PROCESS_BYTES = 0.55 * 2**30  # interpreter, torch and transformers, measured


@dataclass(frozen=True)
class Plan:
    """Per step unless it says otherwise; tokens are estimates at the untrained policy's lengths."""

    steps: int
    groups: int
    group_size: int
    updates: int
    tokens_generated: float
    tokens_trained: float
    longest: int
    eval_episodes: int
    evaluations: int
    parameters: int
    trained_parameters: int
    memory_bytes: float
    checkpoint_bytes: float
    checkpoints: int
    directory: str

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size


def plan_run(config: RunConfig) -> Plan:
    """Load the model, play a few episodes, count.

    Raises:
        SilvaError: whatever would stop the run at its start.
    """
    check(config)
    session = Session(config)
    try:
        episodes = asyncio.run(_probe(session))
    finally:
        session.close()
    generated = sum(g for g, _ in episodes) / len(episodes)
    trained = sum(t for _, t in episodes) / len(episodes)
    longest = max(t for _, t in episodes)
    rollout, model = config.rollout, session.loaded.model
    parameters = sum(p.numel() for p in model.parameters())
    updated = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_each = session.loaded.dtype.itemsize
    rollouts = rollout.groups_per_step * rollout.group_size
    evaluations = 2 if not config.eval.every else 1 + -(-config.steps // config.eval.every)
    return Plan(
        steps=config.steps,
        groups=rollout.groups_per_step,
        group_size=rollout.group_size,
        updates=config.trainer.updates_per_step,
        tokens_generated=generated * rollouts,
        tokens_trained=trained * rollouts,
        longest=longest,
        eval_episodes=config.eval.tasks * config.eval.samples_per_task * len(config.environments),
        evaluations=evaluations,
        parameters=parameters,
        trained_parameters=updated,
        memory_bytes=_memory(config, session, parameters, updated, longest, trained * rollouts),
        checkpoint_bytes=3.0 * updated * bytes_each,
        checkpoints=config.checkpoint.keep + config.checkpoint.keep_best,
        directory=f"{config.output_dir}/{config.name}",
    )


def describe(plan: Plan) -> str:
    share = (
        "" if plan.trained_parameters == plan.parameters else f" ({_count(plan.trained_parameters)} trained)"
    )
    batch = plan.rollouts // plan.updates
    lines = [
        f"{plan.steps} steps, each {plan.groups} tasks x {plan.group_size} = {plan.rollouts} rollouts, "
        f"{plan.updates} update{'s' if plan.updates > 1 else ''} of {batch}",
        f"about {_count(plan.tokens_generated)} tokens sampled and {_count(plan.tokens_trained)} trained a step, "
        f"{_count(plan.steps * plan.tokens_generated)} and {_count(plan.steps * plan.tokens_trained)} in all "
        "(at the lengths of the model as it is now)",
        f"{plan.evaluations} evaluations of {plan.eval_episodes} held-out episodes",
        f"{_count(plan.parameters)} parameters{share}, about {plan.memory_bytes / 2**30:.1f} GiB of memory",
        f"checkpoints of about {plan.checkpoint_bytes / 2**30:.2f} GiB, at most {plan.checkpoints} kept",
        f"files: {plan.directory}/{{config.toml, metrics.jsonl, ledger.jsonl, rollouts/, checkpoints/, weights/, "
        "summary.json, report.html}",
    ]
    return "plan:\n" + "\n".join(f"  {line}" for line in lines)


async def _probe(session: Session) -> list[tuple[int, int]]:
    """(tokens sampled, tokens in training rows) of each probe episode."""
    config = session.config
    stream = session.stream("train")
    settings = config.rollout
    linear = Linear(settings, session.renderer, seed=config.seed)
    draws = [stream.draw() for _ in range(max(PROBE_GROUPS, len(config.environments)))]
    found = []
    for index, (world, task) in enumerate(draws):
        async for group in linear.run(task, world.taskset, session.engine, key=f"probe{index}"):
            found += [(t.tokens("policy"), t.tokens()) for t in group.trajectories]
    return found


def _memory(
    config: RunConfig, session: Session, parameters: int, updated: int, longest: int, tokens: float
) -> float:
    """Weights, gradients, two moments, activations of the largest micro-batch, and the process itself."""
    loaded: LoadedModel = session.loaded
    each = loaded.dtype.itemsize
    text: Any = loaded.model.config.get_text_config()
    width, inner = text.hidden_size, text.intermediate_size
    # Kept for the backward pass of one layer and token: about 14 vectors of `width` and 5 of `inner`.
    per_token = text.num_hidden_layers * (14 * width + 5 * inner) * each
    if config.trainer.gradient_checkpointing:
        per_token = text.num_hidden_layers * width * each
    micro_batch = min(
        config.trainer.micro_batch_tokens, max(longest, tokens / config.trainer.updates_per_step)
    )
    reference = parameters if config.algorithm.kl_coef and not loaded.lora else 0
    logits = 4 * text.vocab_size * min(128 * 3, micro_batch) * 3
    return PROCESS_BYTES + each * (parameters + reference + 3 * updated) + per_token * micro_batch + logits


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"

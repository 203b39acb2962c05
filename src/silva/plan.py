"""What a run will cost, in numbers, before it starts: `silva rl ... --dry-run`.

    draw tasks ──> play some episodes ──> tokens an episode, groups without signal ──> tokens of a step
                                               │
                            longest row ───────┴──> largest micro-batch, cached rows ──> memory

Lengths are measured, not guessed, on the policy that RL will begin with. A warm start is therefore done first
where the model is tiny; a larger model takes minutes for it, so there the script plays that it will imitate.
Not here: seconds, which depend on the machine, and how answers grow or shrink as a policy learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from silva.algorithms.filters import zero_variance
from silva.config.schema import RunConfig
from silva.config.sections import TinyModel
from silva.errors import NoSignalError
from silva.launch import check
from silva.models.trie import build
from silva.monitoring.monitor import Monitor
from silva.orchestrator.sft import imitate
from silva.ports import derive
from silva.rollouts.actors import Actor, Policy, Script
from silva.rollouts.episode import play
from silva.rollouts.samples import trajectory_samples
from silva.session import Session
from silva.types import Group, Task, Trajectory

PROBE_EPISODES = 48
PROCESS_BYTES = 0.55 * 2**30  # interpreter, torch and transformers on a CPU, measured
LOGIT_ROWS = 3 * 340  # log-softmax and its gradient keep about three times the rows of logits that stay whole
# How common groups without signal are over a run, against its beginning: rarer as the policy learns,
# and common again as tasks are mastered. Seen: 0.64 over 10 steps, 1 over 20.
FADE, FEW_STEPS = 0.7, 5
CACHE_LENGTH = 64  # the engine pads its cached rows to multiples of this


@dataclass(frozen=True)
class Plan:
    """Per step unless it says otherwise; tokens are estimates at the lengths of the probe."""

    steps: int
    groups: int
    group_size: int
    updates: int
    refills: float  # groups played in place of those without signal, on average over the run
    tokens_generated: float
    tokens_trained: float
    longest: int  # tokens of the longest row
    warm_steps: int
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


@dataclass(frozen=True)
class Probe:
    """What some groups of episodes came to; every number is of one episode but for the share of groups."""

    generated: float
    trained: float
    unique: float  # of the trained ones, what is left once a group's shared tokens count once
    longest: int
    no_signal: float


def plan_run(config: RunConfig) -> Plan:
    """Load the model, play a few episodes, count.

    Raises:
        SilvaError: whatever would stop the run at its start.
    """
    check(config)
    session = Session(config)
    try:
        found = _summarise(asyncio.run(_probe(session)))
        memory = _memory(session, found)
    finally:
        session.close()
    rollout, evaluation, model = config.rollout, config.eval, session.loaded.model
    updated = sum(p.numel() for p in model.parameters() if p.requires_grad)
    p = found.no_signal if config.algorithm.drop_zero_variance else 0.0
    fade, refills = (FADE if config.steps > FEW_STEPS else 1.0), config.algorithm.max_refills
    refilled = rollout.groups_per_step * fade * sum(p**n for n in range(1, refills + 1))
    kept = rollout.groups_per_step * (1 - fade * p ** (refills + 1))
    return Plan(
        steps=config.steps,
        groups=rollout.groups_per_step,
        group_size=rollout.group_size,
        updates=config.trainer.updates_per_step,
        refills=refilled,
        tokens_generated=found.generated * (rollout.groups_per_step + refilled) * rollout.group_size,
        tokens_trained=found.trained * kept * rollout.group_size,
        longest=found.longest,
        warm_steps=config.warm_start.steps if config.warm_start else 0,
        eval_episodes=_eval_episodes(config),
        evaluations=2 if not evaluation.every else 1 + -(-config.steps // evaluation.every),
        parameters=sum(p.numel() for p in model.parameters()),
        trained_parameters=updated,
        memory_bytes=memory,
        checkpoint_bytes=3.0 * updated * session.loaded.dtype.itemsize,
        checkpoints=config.checkpoint.keep + config.checkpoint.keep_best,
        directory=f"{config.output_dir}/{config.name}",
    )


def describe(plan: Plan) -> str:
    several, generated, trained = plan.updates > 1, plan.tokens_generated, plan.tokens_trained
    share = (
        "" if plan.trained_parameters == plan.parameters else f", {_count(plan.trained_parameters)} trained"
    )
    refills = f", and about {plan.refills:.1f} tasks more for groups without signal" if plan.refills else ""
    warm = [f"before them {plan.warm_steps} supervised steps on scripted play"] if plan.warm_steps else []
    lines = [
        f"{plan.steps} steps, each {plan.groups} tasks x {plan.group_size} = {plan.rollouts} rollouts"
        f"{refills}, {plan.updates} update{'s' if several else ''} of {plan.rollouts // plan.updates}",
        *warm,
        f"a step: about {_count(generated)} tokens sampled and {_count(trained)} trained, "
        f"the longest row has {plan.longest}",
        f"in all: about {_count(plan.steps * generated)} tokens sampled and "
        f"{_count(plan.steps * trained)} trained, if answers stay as long as in a probe",
        f"{plan.evaluations} evaluations of {plan.eval_episodes} held-out episodes",
        f"memory: about {_size(plan.memory_bytes)} at most, for {_count(plan.parameters)} parameters{share}",
        f"disk: checkpoints of about {_size(plan.checkpoint_bytes)}, at most {plan.checkpoints} kept",
        f"files: {plan.directory}/{{config.toml, metrics.jsonl, ledger.jsonl, rollouts/, checkpoints/, "
        "weights/, summary.json, report.html}",
    ]
    return "plan:\n" + "\n".join(f"  {line}" for line in lines)


class _Silent:
    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Nobody watches a probe."""


async def _probe(session: Session) -> list[Group]:
    """The first groups of the run, played."""
    config, rollout, warm = session.config, session.config.rollout, session.config.warm_start
    actor: Actor = Policy(session.engine, session.renderer, rollout.sampling)
    if warm is not None and isinstance(config.model, TinyModel):
        teacher = session.trainer(config.trainer.model_copy(update={"optimizer": warm.optimizer}), warm.steps)
        await imitate(teacher, session.stream("warm"), session.renderer, warm, rollout.limits,
                      seed=config.seed, monitor=cast(Monitor, _Silent()))  # fmt: skip
        await session.engine.load_weights(1)
    elif warm is not None:
        actor = Script(session.renderer, warm.mistakes, warm.noise)
    stream = session.stream("train")
    count = max(len(config.environments), -(-PROBE_EPISODES // rollout.group_size))

    async def one(task: Task, label: str, group: int, index: int) -> Trajectory:
        seed = derive(config.seed, "probe", group, index)
        task = replace(task, seed=derive(task.seed, index))
        return await play(task, session.tasksets[label], actor, session.renderer, rollout.limits,
                          id=f"probe{group}/{index}", seed=seed)  # fmt: skip

    async def group(number: int) -> Group:
        world, task = stream.draw()
        episodes = [one(task, world.label, number, i) for i in range(rollout.group_size)]
        return Group(f"probe{number}", task, tuple(await asyncio.gather(*episodes)))

    return [await group(number) for number in range(count)]


def _summarise(groups: Sequence[Group]) -> Probe:
    """Raises NoSignalError where no episode gave a usable result."""
    played = [t for group in groups for t in group.scored]
    if not played:
        errors = {t.error for group in groups for t in group.trajectories}
        raise NoSignalError(f"every episode of the plan's probe failed: {'; '.join(map(str, errors))}")
    rows = [[row.tokens for t in g.scored for row in trajectory_samples(t, "")] for g in groups if g.scored]
    lengths = [len(row) for group in rows for row in group]
    silent = sum(zero_variance(group) for group in groups if group.scored)
    return Probe(
        # The last segment of a turn is the reply, whoever gave it.
        generated=sum(len(turn.segments[-1].tokens) for t in played for turn in t.turns) / len(played),
        trained=sum(lengths) / len(played),
        unique=sum(len(build(group)) for group in rows if group) / len(played),
        longest=max(lengths, default=1),
        no_signal=silent / len(groups),
    )


def _memory(session: Session, found: Probe) -> float:
    """Weights, gradients, two moments, activations of the largest micro-batch, cached keys and values, and
    the process itself: all at once, since rows stay cached until new weights are published."""
    config, loaded, cache = session.config, session.loaded, session.engine.cache
    each = loaded.dtype.itemsize
    parameters = sum(p.numel() for p in loaded.model.parameters())
    updated = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    reference = parameters if config.algorithm.kl_coef and not loaded.lora else 0
    text: Any = loaded.model.config.get_text_config()
    # Kept of one layer and token for the backward pass: about 14 vectors of `hidden` and 5 of `intermediate`.
    layer = 14 * text.hidden_size + 5 * text.intermediate_size
    layers = text.num_hidden_layers
    per_token = layers * text.hidden_size + layer if config.trainer.gradient_checkpointing else layers * layer
    rollouts = config.rollout.groups_per_step * config.rollout.group_size
    rows = max(rollouts / config.trainer.updates_per_step,
               config.warm_start.episodes_per_step if config.warm_start else 0)  # fmt: skip
    micro_batch = min(config.trainer.micro_batch_tokens, found.unique * rows)
    logits = max(4, each) * text.vocab_size * min(LOGIT_ROWS, 3 * micro_batch)
    sequences = min(len(cache.rows), max(rollouts, _eval_episodes(config)))
    length = -(-found.longest // CACHE_LENGTH) * CACHE_LENGTH
    cached = (2 * cache.layers * cache.kv_heads * cache.head_dim + cache.width) * sequences * length
    process = PROCESS_BYTES if loaded.device.type == "cpu" else 0
    return process + each * (parameters + reference + 3 * updated + per_token * micro_batch + cached) + logits


def _eval_episodes(config: RunConfig) -> int:
    tasks = sum(min(config.eval.tasks, world.eval_size) for world in config.environments)
    return tasks * config.eval.samples_per_task


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _size(number: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 2**10:.3g} KiB"

"""What a run will cost, in numbers, before it starts: `silva rl ... --dry-run`.

    draw tasks ──> play some episodes ──> tokens an episode, groups without signal ──> tokens of a step
                                               │
                            longest row ───────┴──> largest micro-batch, cached rows ──> memory

Lengths are measured, not guessed, on the policy that RL will begin with. A warm start is therefore done first
where the model is tiny; a larger model takes minutes for it, so there the script plays that it will imitate.
A run at a service is planned by episodes that are sampled there, and says what these have cost.
Seconds, which depend on the machine, take a longer probe (foretelling/probe.py). Not here: how answers grow
or shrink as a policy learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from silva.actors.policy import Policy
from silva.actors.script import Script
from silva.algorithms.compose import without_signal
from silva.algorithms.settings import Algorithm
from silva.assembly import Assembly, connected
from silva.commands.checks import check, check_environments
from silva.commands.common import here
from silva.commands.plan_service import PlayedAtService
from silva.config.schema import RunConfig
from silva.config.sections import TinyModel
from silva.errors import CapabilityError, NoSignalError
from silva.models.adapters import merged_bytes
from silva.models.loading import LoadedModel
from silva.models.memory import in_words
from silva.models.products import bfloat16_gain
from silva.models.trie import build
from silva.monitoring.alerts.foretold import in_words_of
from silva.orchestrator.notices import MANY_CUT, same_rewards, share_cut
from silva.orchestrator.scripted import warm_start
from silva.ports import derive
from silva.protocols import Actor
from silva.rendering.renderer import Renderer
from silva.rollouts.episode import play
from silva.rollouts.faults import tally
from silva.rollouts.openings import misfits, openings
from silva.rollouts.samples import trajectory_samples
from silva.run import loaded
from silva.trainer.explained_errors import refuse_too_large
from silva.trainer.optimizer import learning_bytes
from silva.types import Group, Task, Trajectory

PROBE_EPISODES = 48
PROBE_UPDATES = 600  # of a tiny model's warm start: a minute or two; a plan does without a longer one
PROCESS_BYTES = 0.55 * 2**30  # interpreter, torch and transformers on a CPU, measured
CUDA_BYTES = 0.3 * 2**30  # that torch's CUDA builds take more, also without a GPU
LOGIT_ROWS = 3 * 340  # log-softmax and its gradient keep about three times the rows of logits that stay whole
REPAYS = 1.5
"""Products of bfloat16 must be so many times as fast for a step to gain: its other parts become slower."""
MAX_TEXT = 3_000  # characters shown of a prompt, or of a reply


@dataclass(frozen=True)
class ProbeResult:
    """What the episodes of a probe came to; numbers are of one episode, except those of groups."""

    generated: float
    row_tokens: float  # of the rows that are trained, prompts included
    rows: float  # more than one if its context is rewritten
    unique: float  # of the trained ones, what is left once a group's shared tokens count once
    longest: int  # tokens of the longest row
    groups: int
    silent: int  # groups whose episodes all earned the same


@dataclass(frozen=True)
class Footprint:
    """What a run takes, of memory at most and of disk for a checkpoint."""

    parameters: int
    trained: int
    memory_bytes: float
    checkpoint_bytes: float

    @classmethod
    def of(cls, loaded: LoadedModel, memory_bytes: float) -> Footprint:
        parameters = list(loaded.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        checkpoint = 3.0 * trained * max(4, loaded.dtype.itemsize)  # what learns is 4 bytes or 8
        return cls(sum(p.numel() for p in parameters), trained, memory_bytes, checkpoint)

    def lines(self, config: RunConfig, *, rollouts: bool = True) -> list[str]:
        """In words. `rollouts`: episodes are played, and kept."""
        trained = "" if self.trained == self.parameters else f", {short(self.trained)} trained"
        kept = config.checkpoint.keep + config.checkpoint.keep_best
        return [
            f"memory: about {in_words(self.memory_bytes)} at most, for {short(self.parameters)} parameters"
            + trained,
            f"disk: checkpoints of about {in_words(self.checkpoint_bytes)}, at most {kept} kept",
            f"files: {config.output_dir}/{config.name}/{{config.toml, metrics.jsonl, ledger.jsonl, "
            f"{'rollouts/, ' if rollouts else ''}checkpoints/, weights/, summary.json, report.html}}",
        ]


@dataclass(frozen=True)
class Plan:
    """What a run will do, if all its episodes are as those of `probe`.

    Attributes:
        refills: groups of a step that are played in place of those without signal.
        kept: groups of a step that are trained.
        compares: whether the rewards of the probe say what a run would learn from.
        shown: a prompt as the model reads it, and what it answered.
    """

    config: RunConfig
    probe: ProbeResult
    refills: float
    kept: float
    compares: bool
    eval_episodes: int
    footprint: Footprint | PlayedAtService
    shown: tuple[str, str]
    data: Sequence[str] = ()  # how rows were read and how many tasks there are
    warnings: Sequence[str] = ()


def plan_run(config: RunConfig) -> Plan:
    """Load the model, play a few episodes, count.

    Raises:
        SilvaError: whatever would stop the run at its start.
    """
    check(config)
    served, trainer = config.trainer.remote, None
    config = here(config) if served else alone(config)
    with loaded(config) as assembly:
        if served:
            trainer = assembly.trainer()
        else:
            refuse_too_large(assembly.model)
        groups, warnings = asyncio.run(_probe(assembly))
        probe, shown = _summarise(config.algorithm, groups), _shown(assembly.renderer, groups)
        footprint: Footprint | PlayedAtService
        if served:
            footprint = PlayedAtService.of(assembly, trainer, groups)
        else:
            footprint = Footprint.of(assembly.model, _memory(assembly, probe))
        data, episodes = assembly.data_notes, eval_episodes(assembly)
    scripted = _begins_with_script(config)
    compares = config.algorithm.relative and not scripted  # what an expert earns tells nothing
    silent_share = probe.silent / probe.groups if compares else 0.0
    # Shares of groups that are still without signal after 0, 1, ... refills.
    tries = range(1, config.algorithm.max_refills + 2 if config.algorithm.drop_zero_variance else 1)
    silent = [silent_share**n for n in tries] or [0.0]
    rollout, issued = config.rollout, config.rollout.groups_per_step * config.algorithm.oversample
    if silent_share == 1:
        warnings.append(f"nothing would be learned from the episodes of a probe. {same_rewards(groups)}")
    elif (cut := share_cut(groups)) > MANY_CUT:
        limit = f"rollout.limits.max_turn_tokens = {rollout.limits.max_turn_tokens}"
        warnings.append(f"{cut:.0%} of the replies in a probe were cut off for lack of room ({limit})")
    if not served and assembly.model.device.type == "cpu" and config.model.dtype == "bfloat16":
        gain = bfloat16_gain()
        slow = (
            f'model.dtype = "bfloat16": its products are {gain:.2f} times as fast as those of float32 here, '
            "and the rest of a step takes longer; float32 is likely to be faster"
        )
        warnings += [slow] if gain < REPAYS else []
    return Plan(
        config, probe, compares=compares, shown=shown, data=data, warnings=warnings,
        refills=issued * sum(silent[:-1]),
        kept=min(issued * (1 - silent[-1]), rollout.groups_per_step),
        eval_episodes=episodes,
        footprint=footprint,
    )  # fmt: skip


def describe(plan: Plan, foretold: Mapping[int, Mapping[str, float]] = MappingProxyType({})) -> str:
    """In words. `foretold`: numbers of a step by level, see foretelling/probe.py."""
    config, probe, rollout = plan.config, plan.probe, plan.config.rollout
    groups, size, updates = rollout.groups_per_step, rollout.group_size, config.trainer.updates_per_step
    played = (groups * config.algorithm.oversample + plan.refills) * size
    generated = probe.generated * played
    trained = probe.row_tokens * plan.kept * size
    evaluations = 1 + (-(-config.steps // config.eval.every) if config.eval.every else 1)
    if isinstance(takes := plan.footprint, Footprint):
        needs = takes.lines(config)
    else:
        evaluated = evaluations * plan.eval_episodes
        needs = [takes.cost(steps=config.steps, played=played, trained=trained, evaluated=evaluated)]
    lines = [
        f"{config.steps} steps, each {groups} tasks x {size} = {groups * size} rollouts"
        + (f", and about {plan.refills:.1f} tasks more for groups without signal" if plan.refills else "")
        + f", {updates} update{'s' if updates > 1 else ''} of {groups * size // updates}",
        config.warm_start
        and f"before them up to {config.warm_start.steps} supervised steps on scripted play",
        plan.compares
        and f"{probe.groups - probe.silent} of {probe.groups} groups in a probe have episodes that earned "
        "different rewards, as learning needs",
        f"a step: about {short(generated)} tokens sampled and {short(probe.rows * plan.kept * size)} rows "
        f"trained, of {short(trained)} tokens with their prompts; the longest row has {probe.longest}",
        f"in all: about {short(config.steps * generated)} tokens sampled and "
        f"{short(config.steps * trained)} in rows, if all stays as in a probe",
        f"{evaluations} evaluations of {plan.eval_episodes} held-out episodes",
        *needs,
        *(f"at level {level}: {in_words_of(numbers)}" for level, numbers in foretold.items()),
    ]
    return "\n".join([
        *(f"WARNING: {warning}" for warning in plan.warnings),
        *plan.data,
        "a prompt, as the model reads it:", *_quoted(plan.shown[0]),
        "a reply to it:", *_quoted(plan.shown[1]),
        "plan:", *(f"  {line}" for line in lines if line),
    ])  # fmt: skip


def _quoted(text: str) -> list[str]:
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n... ({len(text) - MAX_TEXT:,} more characters) ...\n{text[-half:]}"
    return [f"  | {line}" for line in text.split("\n")]


def _begins_with_script(config: RunConfig) -> bool:
    """Whether a script plays the probe, as the warm start would take too long."""
    if config.warm_start is None:
        return False
    quick = isinstance(config.model, TinyModel) and config.warm_start.steps <= PROBE_UPDATES
    return config.trainer.remote or not quick


def alone(config: RunConfig) -> RunConfig:
    """With everything in this process, since a plan starts nothing and asks nobody; the trainer is one rank,
    which shares its weights with the engine.

    Raises:
        CapabilityError: the model is a service's.
    """
    if config.trainer.remote:
        raise CapabilityError(
            f'--dry-run: a plan needs the model, which trainer.type = "{config.trainer.type}" has at a '
            'service; expected "local", and a model that fits here'
        )
    config = here(config)
    fields = type(config.trainer).model_fields
    own = {key: fields[key].default for key in ("ranks", "parallel", "transfer") if key in fields}
    update: dict[str, Any] = {"trainer": config.trainer.model_copy(update=own)}
    if config.engine.remote:
        update["engine"] = type(config).model_fields["engine"].default
    return config.model_copy(update=update)


async def _probe(assembly: Assembly) -> tuple[list[Group], list[str]]:
    """The first groups of the run, played, and what does not fit its limits."""
    config, rollout, warm = assembly.config, assembly.config.rollout, assembly.config.warm_start
    await assembly.connect()
    await check_environments(config, assembly.trained)
    found = await openings(assembly.trained, assembly.renderer, rollout.limits, rollout.context,
                           seed=config.seed)  # fmt: skip
    actor: Actor = Policy(assembly.engine, assembly.renderer, rollout.sampling)
    if _begins_with_script(config):
        assert warm is not None
        actor = Script(assembly.renderer, warm.mistakes, warm.noise)
    elif warm is not None:
        trainer = await connected(assembly.trainer())
        sync = assembly.sync(trainer)
        await warm_start(sync, assembly.scripted())
        await sync.publish()
    stream = assembly.stream("train")
    count = max(len(config.environments), -(-PROBE_EPISODES // rollout.group_size))

    async def one(task: Task, label: str, group: int, index: int) -> Trajectory:
        seed = derive(config.seed, "probe", group, index)
        return await play(task, assembly.tasksets[label], actor, assembly.renderer, rollout.limits,
                          id=f"probe{group}/{index}", seed=seed, context=rollout.context)  # fmt: skip

    async def group(number: int) -> Group:
        source, task = stream.draw()
        episodes = [one(task, source.label, number, i) for i in range(rollout.group_size)]
        return Group(f"probe{number}", task, tuple(await asyncio.gather(*episodes)))

    return [await group(number) for number in range(count)], misfits(found, rollout.limits)


def _shown(renderer: Renderer, groups: Sequence[Group]) -> tuple[str, str]:
    """The first turn that was played: what the model reads, and what was answered."""
    turn = next(t.turns[0] for group in groups for t in group.trajectories if t.turns)
    return renderer.decode(turn.segments[0].tokens), renderer.decode(turn.reply_tokens)


def _summarise(recipe: Algorithm, groups: Sequence[Group]) -> ProbeResult:
    """Raises NoSignalError where no episode gave a usable result."""
    played = [t for group in groups for t in group.scored]
    if not played:
        errors = [t.error for group in groups for t in group.trajectories]
        raise NoSignalError(f"every episode of the plan's probe failed: {tally(errors)}")
    rows = [[row.tokens for t in g.scored for row in trajectory_samples(t, "")] for g in groups if g.scored]
    lengths = [len(row) for group in rows for row in group]
    return ProbeResult(
        generated=sum(len(turn.reply_tokens) for t in played for turn in t.turns) / len(played),
        row_tokens=sum(lengths) / len(played),
        rows=len(lengths) / len(played),
        unique=sum(len(build(group)) for group in rows if group) / len(played),
        longest=max(lengths, default=1),
        groups=len(groups),
        silent=sum(not g.scored or without_signal(recipe, g) for g in groups),
    )


def _memory(assembly: Assembly, probe: ProbeResult) -> float:
    """What is trained, cached keys and values, and the process itself: all at once, since rows stay cached
    until new weights are published."""
    config, loaded = assembly.config, assembly.model
    rollouts = config.rollout.groups_per_step * config.rollout.group_size
    rows = max(rollouts / config.trainer.updates_per_step,
               config.warm_start.episodes_per_step if config.warm_start else 0)  # fmt: skip
    micro_batch = min(config.trainer.micro_batch_tokens, probe.unique * rows)
    cached = assembly.engine.memory(max(rollouts, eval_episodes(assembly)), probe.longest)
    # On a GPU the process is not in the memory that counts.
    own = process_bytes() if loaded.device.type == "cpu" else 0.0
    return own + training_bytes(config, loaded.model, micro_batch) + cached


def process_bytes() -> float:
    return PROCESS_BYTES + (CUDA_BYTES if torch.version.cuda else 0)


def training_bytes(
    config: RunConfig, model: PreTrainedModel, micro_batch: float, shards: float = 1, *, recipe: bool = True
) -> float:
    """Weights, what learning takes, models beside the policy, and activations of `micro_batch` tokens.

    Args:
        shards: ranks among which models are divided, of which it is one's part.
        recipe: with the models that `[algorithm]` asks for, which supervised training has none of.
    """
    each = getattr(torch, config.model.dtype).itemsize
    weights, learning = sum(p.nbytes for p in model.parameters()), learning_bytes(model.parameters())
    models = weights + learning
    refers = recipe and config.algorithm.refers
    if refers and config.algorithm.reference is not None:  # a model of its own
        models += weights
    elif refers:  # a copy of the weights that are trained
        models += sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if recipe and config.algorithm.critic and config.trainer.critic.trunk == "own":
        models += weights + learning
    text: Any = model.config.get_text_config()
    models += merged_bytes(model)
    # Kept of one layer and token for the backward pass: about 14 vectors of `hidden` and 5 of `intermediate`.
    layer = 14 * text.hidden_size + 5 * _mlp_width(text)
    layers = text.num_hidden_layers
    per_token = layers * text.hidden_size + layer if config.trainer.gradient_checkpointing else layers * layer
    logits = max(4, each) * text.vocab_size * min(LOGIT_ROWS, 3 * micro_batch)
    return models / shards + each * per_token * micro_batch + logits


def _mlp_width(text: Any) -> int:
    """Numbers inside a layer's MLP for one token: of experts, those that it goes to."""
    if not (count := getattr(text, "num_experts_per_tok", None)):
        return int(text.intermediate_size)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return int(count * (getattr(text, "moe_intermediate_size", None) or text.intermediate_size) + shared)


def eval_episodes(assembly: Assembly) -> int:
    settings = assembly.config.eval
    played = sum(len(taskset.tasks("eval")[: settings.tasks]) for taskset in assembly.tasksets.values())
    return played * settings.samples_per_task


def short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"

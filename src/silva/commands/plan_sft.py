"""What supervised training will take, in numbers, before it starts: `silva sft ... --dry-run`.

    the first batches of the run ──> rows, tokens, trained tokens ──> of a step, of all steps
                                           └──> largest micro-batch ──> memory

The batches are drawn as the run will draw them, so nothing is guessed of those: sources are read, split and
rendered. Not here: seconds, which depend on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from silva.assembly import Assembly
from silva.commands.plan import Footprint, alone, eval_episodes, process_bytes, short, training_bytes
from silva.commands.sft import check_supervised, supervised_stream
from silva.config.schema import RunConfig
from silva.models.trie import build
from silva.orchestrator.supervised import DataBatches, supervised_sample
from silva.rollouts.openings import openings
from silva.run import loaded
from silva.trainer.explained_errors import refuse_too_large
from silva.types import Sample

MOST_DIALOGUES = 512
"""That are drawn for a plan, and at least one batch."""


@dataclass(frozen=True)
class DataPlan:
    """Of [data]: `epoch`: dialogues of a pass over all sources; `looked_at`: those that the plan has drawn;
    `held_out`: rows of a validation, and their tokens."""

    notes: Sequence[str]
    epoch: float
    looked_at: int
    left_out: str
    held_out: tuple[int, int]


@dataclass(frozen=True)
class SupervisedPlan:
    """What a run will do, if all its batches are as the first ones.

    Attributes:
        steps: updates; at most so many on scripted play, which may end earlier.
        rows, tokens, trained: of a step.
        unique: tokens of a step that are computed, since what rows share counts once.
        longest: tokens of the longest row.
        episodes: of an evaluation of [[environments]].
        data: None on scripted play.
    """

    config: RunConfig
    steps: int
    rows: float
    tokens: float
    trained: float
    unique: float
    longest: int
    episodes: int
    footprint: Footprint
    data: DataPlan | None = None


def plan_supervised(config: RunConfig) -> SupervisedPlan:
    """Load the model, draw a few batches, count.

    Raises:
        SilvaError: whatever would stop the run at its start.
    """
    check_supervised(config)
    config = alone(config)
    with loaded(config) as assembly:
        refuse_too_large(assembly.model)
        if config.data:
            steps, batches, data = _of_data(assembly)
        else:
            assert config.warm_start is not None
            steps, data = config.warm_start.steps, None
            batches = [asyncio.run(assembly.scripted().draw(1))]
        unique = [len(build([row.tokens for row in batch])) if batch else 0 for batch in batches]
        rows = [row for batch in batches for row in batch]
        lengths, episodes = [len(row.tokens) for row in rows], eval_episodes(assembly)
        memory = _memory(assembly, max(unique), max(lengths, default=1), episodes)
        return SupervisedPlan(
            config, steps,
            rows=len(rows) / len(batches),
            tokens=sum(lengths) / len(batches),
            trained=sum(map(_trained, rows)) / len(batches),
            unique=sum(unique) / len(batches),
            longest=max(lengths, default=0),
            episodes=episodes,
            footprint=Footprint.of(assembly.model, memory),
            data=data,
        )  # fmt: skip


def describe(plan: SupervisedPlan) -> str:
    config, data = plan.config, plan.data
    lines = [
        *(_of_dialogues(plan, data) if data else [f"up to {plan.steps} steps on scripted play"]),
        f"a step: about {short(plan.rows)} rows of {short(plan.tokens)} tokens, {short(plan.trained)} of "
        f"them trained; what rows share is computed once, which leaves {short(plan.unique)}; the longest row "
        f"has {plan.longest}",
        f"in all: about {short(plan.steps * plan.tokens)} tokens in rows, "
        f"{short(plan.steps * plan.trained)} of them trained, if all stays as in these",
        *_of_evaluations(plan),
        *plan.footprint.lines(config, rollouts=bool(config.environments)),
    ]
    return "\n".join([*(data.notes if data else ()), "plan:", *(f"  {line}" for line in lines)])


def _of_dialogues(plan: SupervisedPlan, data: DataPlan) -> list[str]:
    batch = plan.config.data.dialogues_per_step
    epochs = plan.steps * batch / data.epoch
    lines = [
        f"{plan.steps} steps, each an update on {batch} dialogues: {epochs:.3g} "
        f"epoch{'s' * (epochs != 1)} of {data.epoch:,.0f}",
        f"rows of the first {data.looked_at:,} dialogues were counted"
        + (f": {data.left_out}" if data.left_out else ""),
    ]
    rows, tokens = data.held_out
    return [*lines, *([f"held out: {rows} rows of {short(tokens)} tokens for a validation"] if rows else [])]


def _of_evaluations(plan: SupervisedPlan) -> list[str]:
    every, what = plan.config.eval.every, list[str]()
    if plan.data and plan.data.held_out[0]:
        what.append("of the loss on held-out rows")
    if plan.config.environments:
        what.append(f"of {plan.episodes} held-out episodes")
    count = 1 + (-(-plan.steps // every) if every else 1)
    return [f"{count} evaluations, {' and '.join(what)}"] if what else []


def _of_data(assembly: Assembly) -> tuple[int, list[list[Sample]], DataPlan]:
    config, data = assembly.config, assembly.config.data
    stream = supervised_stream(config, assembly.renderer)
    steps = stream.steps(data.dialogues_per_step, data.epochs) if data.epochs else config.steps
    notes, held_out = stream.notes, [supervised_sample(row, "") for row in stream.validation()]
    count = min(steps, max(1, MOST_DIALOGUES // data.dialogues_per_step))
    drawing = DataBatches(stream, data)

    async def draw() -> list[list[Sample]]:
        return [await drawing.draw(step) for step in range(1, count + 1)]

    batches = asyncio.run(draw())
    apart = (len(held_out), sum(len(row.tokens) for row in held_out))
    looked_at = stream.counts.dialogues
    return steps, batches, DataPlan(notes, stream.epoch, looked_at, stream.left_out, apart)


def _trained(row: Sample) -> int:
    return sum(int((weights != 0).sum()) for weights in (row.loss_weights, *row.streams.values()))


def _longest_episode(assembly: Assembly) -> int:
    """Tokens of an episode with the longest of some prompts, whose turns are all as long as they may be."""
    limits, context = assembly.config.rollout.limits, assembly.config.rollout.context
    begun = asyncio.run(
        openings(assembly.trained, assembly.renderer, limits, context, seed=assembly.config.seed)
    )
    replies = limits.max_turns * limits.max_turn_tokens
    most = max((opening.prompt + replies for opening in begun), default=limits.max_episode_tokens)
    return min(most, limits.max_episode_tokens)


def _memory(assembly: Assembly, unique: int, longest: int, episodes: int) -> float:
    """What learns, and the keys and values of the episodes that evaluations play."""
    config, model = assembly.config, assembly.model
    micro_batch = min(unique, max(config.trainer.micro_batch_tokens, longest))
    cached = assembly.engine.memory(episodes, _longest_episode(assembly)) if episodes else 0.0
    own = process_bytes() if model.device.type == "cpu" else 0.0
    return own + training_bytes(config, model.model, micro_batch, recipe=False) + cached

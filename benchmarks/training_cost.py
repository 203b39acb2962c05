"""What the updates of a step cost on paper, by how ranks divide the model (`trainer.parallel`).

    dp_shard, dp_replicate   weights gathered for each pass, gradients summed; arithmetic hides most of it
    tp                       sums of hidden states in every layer; the logits
    cp                       keys and values of all tokens, or ("ulysses") tokens for heads
    ep                       a row for each expert of a token, there and back
    pp                       hidden states between stages, which wait for the first and for the last

Pure functions of numbers, as step_cost.py, which sets this beside sampling. Assumed: arithmetic hides nothing
but what `dp_shard` gathers; experts are chosen evenly; the share of FLOP/s that is reached is the same in all
of them, however small products become.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass

from step_shapes import FP32, Machine, Model, Task

from silva.errors import CapabilityError
from silva.trainer.head import LOGIT_BYTES
from silva.trainer.settings import Parallel
from silva.trainer.sharding import combinations

LEARNING = 4 * FP32  # master, gradient and two moments of a parameter (arXiv:1910.02054, section 3)
MICRO = 16_384  # tokens of a pass on one GPU
STEPPED = 7 * FP32  # an optimizer step reads four numbers of a parameter and writes three
STYLES, SCHEDULES = ("all_gather", "ulysses"), ("1f1b", "interleaved_1f1b")


@dataclass(frozen=True)
class Training:
    """Seconds of all updates of a step, by what they go to.

    Attributes:
        waiting: of stages for others.
        gathering: of weights, and sums of gradients, as far as arithmetic does not hide them.
        exchanging: of what stands between layers: tp, cp, ep, pp.
    """

    arithmetic: float
    waiting: float = 0.0
    gathering: float = 0.0
    exchanging: float = 0.0
    stepping: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(astuple(self))


def forward_flop(model: Model, tokens: float, sampled: float, context: float) -> float:
    """2 a parameter and token, 4 * layers * attended a pair of tokens (arXiv:2001.08361, section 2.1). The
    head sees sampled tokens alone, embeddings multiply nothing."""
    pairs = 4 * model.layers * model.attended * tokens * context
    return 2 * (model.body * tokens + model.head * sampled) + pairs


def training_flop(model: Model, task: Task, *, tokens: float | None = None, recompute: bool = True) -> float:
    """FLOP of the updates of a step: three times those of a forward pass, four times if activations are
    computed again, and scoring passes (arXiv:2104.04473, equation 3; arXiv:2205.05198).

    Args:
        tokens: that go through the model: those of the trie if not given.
    """
    tokens = task.unique if tokens is None else tokens
    return forward_flop(model, tokens, task.sampled, task.context) * _passes(task, recompute)


def _passes(task: Task, recompute: bool) -> int:
    return (4 if recompute else 3) + task.scores


# --- room


def memory(model: Model, ranks: int, parallel: Parallel, tokens: float) -> float:
    """Bytes of a GPU whose passes have so many tokens: what learns, two gathered layers, and activations
    with checkpointing.

    These are the input of each layer and one layer's own, 34 * hidden bytes a token, 24 of them divided by tp
    (arXiv:2205.05198, equations 1 and 2, with an attention that keeps no pairs). 1F1B holds as many
    micro-batches as there are stages, each of so many times fewer layers; interleaved it is 1 + (pp - 1) /
    (pp * runs) times as much (section 4.2.3 there). Stages keep gathered weights and whole gradients.
    """
    pp, tp = parallel.pp, parallel.tp
    learning = LEARNING * model.parameters / (parallel.shape(ranks)["parts"] * tp * pp)
    within = (model.shared + (model.parameters - model.shared) / parallel.ep) / tp
    if pp > 1:
        gathered = (model.width + FP32) * within / pp
    else:
        gathered = 2 * model.width * within / model.layers
    held = model.layers * (1 + (pp - 1) / (pp * _runs(parallel)) * (_runs(parallel) > 1))
    return learning + gathered + tokens * model.hidden * model.width * (held + 5 + 12 / tp)


def _runs(parallel: Parallel) -> int:
    """Of layers that a stage's rank has."""
    return 2 if parallel.pp_schedule == "interleaved_1f1b" else 1


def of_rank(task: Task, parallel: Parallel, micro: int) -> float:
    """Tokens of a pass on one GPU. Stages compute a row in one piece."""
    return max(micro, task.longest) if parallel.pp > 1 else micro


def shard(model: Model, machine: Machine, ranks: int, tokens: int, cp: int = 1) -> int:
    """GPUs among which dp_shard and `cp` divide a copy of the model: the smallest divisor of `ranks`, part of
    a node or whole nodes, with room for passes of so many tokens. 0: none has."""
    node = machine.node
    for n in range(cp, ranks + 1, cp):
        whole = ranks % n == 0 and (node % n == 0 or n % node == 0 or n == ranks)
        if whole and memory(model, ranks, copies_of(n, ranks, cp), tokens) <= machine.room * machine.memory:
            return n
    return 0


def copies_of(size: int, ranks: int, cp: int = 1) -> Parallel:
    return Parallel(
        dp_shard=size // cp,
        dp_replicate=ranks // size,
        cp=cp,
        cp_style="ulysses" if cp > 1 else "all_gather",
    )


def sharded(model: Model, machine: Machine, task: Task, ranks: int, cp: int = 1) -> float:
    """Seconds of a step's updates if dp_shard and `cp` alone divide the model; infinite if it has no room."""
    size = shard(model, machine, ranks, MICRO, cp)
    return training(model, machine, task, ranks, copies_of(size, ranks, cp)).seconds if size else math.inf


# --- time


def training(
    model: Model,
    machine: Machine,
    task: Task,
    ranks: int,
    parallel: Parallel,
    *,
    micro: int = MICRO,
    recompute: bool = True,
) -> Training:
    """All updates of a step on `ranks` GPUs, whether or not they have room.

    Args:
        micro: tokens of a pass on one GPU.
    """
    pp, cp, tp, runs = parallel.pp, parallel.cp, parallel.tp, _runs(parallel)
    shares, of_pass = ranks // (pp * cp * tp), of_rank(task, parallel, micro)
    tokens, sampled = task.unique / task.updates / shares, task.sampled / task.updates / shares
    count = math.ceil(tokens / (of_pass * cp))
    if pp > 1:
        count = max(pp, count + -count % pp if runs > 1 else count)
    filled = max(tokens, task.longest * (count if pp > 1 else 1))  # stages fill up every micro-batch
    at_once = tokens / count / cp
    context, longest = (length / 2 * late(parallel, length / at_once) for length in (task.row, task.longest))
    flop = max(  # a row is computed in one share
        stage_flop(model, filled, sampled, context, pp, runs),
        stage_flop(model, task.longest, task.longest - task.prompt, longest, pp, runs),
    )
    walked = pp == 1 and task.row > of_pass * cp  # chunks are computed once more (trainer/walk.py)
    passes = (4 if recompute else 3) + task.scores + walked
    arithmetic = flop * passes / (cp * tp * machine.flops * machine.trained)
    idle = bubble(pp, count, runs)

    gathering = _gathering(model, machine, task, ranks, parallel, count)
    exposed = max(0.0, gathering - machine.hidden * arithmetic) + machine.hidden * gathering / model.layers
    exchanging = _exchanging(model, machine, task, ranks, parallel, count, filled, sampled, passes - 2)

    parts = parallel.shape(ranks)["parts"] * tp * pp
    stepping = STEPPED * model.parameters / parts / machine.bandwidth
    found = (arithmetic, arithmetic * idle / (1 - idle), exposed, exchanging, stepping)
    return Training(*(task.updates * seconds for seconds in found))


def bubble(stages: int, micro_batches: int, runs: int = 1) -> float:
    """The share of an update in which a stage waits, under 1F1B (arXiv:2104.04473, section 2.2, which has it
    over the time without: (stages - 1) / (runs * micro_batches)). `runs` of layers a rank: interleaved."""
    return (stages - 1) / (runs * micro_batches + stages - 1)


def stage_flop(
    model: Model, tokens: float, sampled: float, context: float, stages: int, runs: int = 1
) -> float:
    """Of a forward pass, on the last of the stages, which has most layers (trainer/sharding/pipeline.py) and
    the head: the others wait for it."""
    layers = runs * math.ceil(model.layers / (stages * runs))
    return forward_flop(model, tokens, 0, context) * layers / model.layers + 2 * model.head * sampled


def late(parallel: Parallel, spanned: float) -> float:
    """How many times as many tokens as the mean the last of the ranks with one row attends to, for which the
    others wait: with n ranks (2n - 1) / n. With "ulysses" all do the same. `spanned`: ranks of a row."""
    n = min(parallel.cp, max(1.0, spanned)) if parallel.cp_style == "all_gather" else 1.0
    return 2 - 1 / n


def _gathering(
    model: Model, machine: Machine, task: Task, ranks: int, parallel: Parallel, count: int
) -> float:
    """Seconds of an update. A pass of FSDP gathers weights twice and reduces gradients in float32
    (arXiv:1910.02054, section 7: volumes of (n - 1) / n of a size); stages do it once, and copies add up what
    has been reduced once. Each expert is among those ranks of a copy that have the same ones."""
    pp, tp, ep, shape = parallel.pp, parallel.tp, parallel.ep, parallel.shape(ranks)
    parts, copies = shape["parts"], shape["copies"]
    times, gathers = (1, 1) if pp > 1 else (count, 2)
    of_one = (gathers + task.scores) * model.width + FP32
    experts = (model.parameters - model.shared) / ep * (1 - ep / parts) / machine.between(parts // ep, ep)
    others = model.shared * (1 - 1 / parts) / machine.between(parts, tp)
    summed = 2 * FP32 * model.parameters / parts * (1 - 1 / copies) / machine.between(copies, parts * tp)
    hops = (gathers + 1) * model.layers / pp * (parts - 1) * machine.hop
    return times * (of_one * (others + experts) / (tp * pp) + hops) + summed / (tp * pp)


def _exchanging(
    model: Model,
    machine: Machine,
    task: Task,
    ranks: int,
    parallel: Parallel,
    count: int,
    tokens: float,
    sampled: float,
    forwards: int,
) -> float:
    """Seconds of an update, of which a share has so many tokens in `count` passes.

    Args:
        forwards: passes forward, those that compute activations again among them; and one goes back.
    """
    pp, cp, tp, ep = parallel.pp, parallel.cp, parallel.tp, parallel.ep
    layers, mine, hidden = model.layers / pp, tokens / cp, model.hidden * model.width
    keys = 2 * model.cached * model.width / tp
    found = 0.0
    if tp > 1:
        # Each sum is (n - 1) / n of what is summed, twice. Forward two in a layer (arXiv:1909.08053, section
        # 3), back one for each of q, k, v, gate and up, which transformers' plan has apart; and the ends.
        sums = layers * (2 * forwards + 5) + 2 + task.scores
        logits = sampled / cp * model.vocabulary
        gathers = 1 + task.scores + (logits / count * FP32 > LOGIT_BYTES)
        volume = sums * 2 * mine * hidden + gathers * logits * model.width
        found += volume * (tp - 1) / tp / machine.between(tp) + count * sums * 2 * (tp - 1) * machine.hop
    if cp > 1 and parallel.cp_style == "all_gather":  # gradients are summed: twice
        volume = layers * (forwards + 2) * tokens * keys * (cp - 1) / cp
        hops = count * layers * (forwards + 2) * (cp - 1) * machine.hop
        found += volume / machine.between(cp, tp) + hops
    elif cp > 1:  # 4 * hidden / n a token and layer with as many keys as queries (arXiv:2309.14509, 3.2)
        repeated = max(1.0, cp * tp * model.of_head / model.cached)
        sent = 2 * (model.attended * model.width / tp + repeated * keys / 2)
        volume = layers * (forwards + 1) * mine * sent * (cp - 1) / cp
        hops = count * layers * (forwards + 1) * 2 * machine.hop
        found += volume / machine.pairwise(cp * tp) + hops
    if ep > 1:
        volume = layers * (forwards + 1) * mine * model.chosen * 2 * hidden * (ep - 1) / ep
        found += volume / machine.pairwise(ep) + count * layers * (forwards + 1) * 3 * machine.hop
    if pp > 1:
        sends = _runs(parallel) * (2 + task.scores)  # computing again needs none
        found += sends * (mine * hidden / machine.pairwise(ranks) + count * machine.hop)
        ends = FP32 * model.head * model.tied / parallel.shape(ranks)["parts"]  # both have the embeddings
        found += ends / machine.pairwise(ranks)
    return found


# --- which


def divided(model: Model, machine: Machine, task: Task, ranks: int) -> list[tuple[float, Parallel]]:
    """Seconds of a step's updates under every division that is allowed and has room, the shortest first."""
    room = machine.room * machine.memory
    ways = (way for way in _allowed(model, machine, ranks)
            if memory(model, ranks, way, of_rank(task, way, MICRO)) <= room)  # fmt: skip
    found = [(training(model, machine, task, ranks, way).seconds, way) for way in ways]
    return sorted(found, key=lambda each: each[0])


def _allowed(model: Model, machine: Machine, ranks: int) -> Iterator[Parallel]:
    """What combinations.py lets go together, and heads, layers and experts can be divided among; tp in a
    node."""
    holds = {combinations.TIED: model.tied, combinations.EXPERTS: model.experts > 0}
    beside = [name for name, of_model in holds.items() if of_model]
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    heads, of_keys = round(model.attended / model.of_head), round(model.cached / model.of_head)
    for tp, pp, cp, shard, ep in itertools.product(sizes, repeat=5):
        within = tp <= machine.node and of_keys % tp == 0 and pp <= model.layers
        if not within or ranks % (tp * pp * cp * shard) or (shard * cp) % ep or max(model.experts, 1) % ep:
            continue
        copies = ranks // (tp * pp * cp * shard)
        sized = {"dp_shard": shard, "dp_replicate": copies, "cp": cp, "tp": tp, "pp": pp, "ep": ep}
        for style, schedule in itertools.product(STYLES[:cp], SCHEDULES[:pp]):
            way = Parallel.model_validate(sized | {"cp_style": style, "pp_schedule": schedule})
            uneven = (heads // tp) % cp or ((of_keys // tp) % cp and cp % (of_keys // tp))
            if style == "ulysses" and uneven:
                continue
            with suppress(CapabilityError):
                combinations.refuse(way, beside)
                yield way

"""What one step of RL costs on 1 to 1,024 GPUs, on paper: sampling, training, weights, checkpoints, failures.

    Model, Machine, Task ──> sampling, streaming, training, transfer ──> together   every GPU does both
                                                                    └──> apart      some sample, some train

Pure functions of numbers. Seconds, bytes, FLOP and tokens throughout. Where a formula comes from stands at
its function; what was assumed stands at the fields of `Machine` (step_shapes.py); scale.py compares with
measurements. Training is that of FSDP here; training_cost.py has other divisions. Left out: time of
environments beyond `Task.tool_seconds`, speculative decoding, and every queue inside an engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from step_shapes import BF16, FP32, Machine, Model, Task
from training_cost import MICRO, shard, sharded

# --- sampling


def decoding(model: Model, machine: Machine, batch: float, context: float, tp: int = 1) -> float:
    """Seconds in which `batch` requests get a token each: the longer of reading weights and cache and of
    arithmetic, the exchanges of tensor parallelism, and `launch` (arXiv:2211.05102, section 3)."""
    read = (model.read(batch) + batch * context * model.cache) / (tp * machine.bandwidth * machine.streamed)
    flop = batch * 2 * (model.body + model.head + 2 * model.layers * model.attended * context)
    computed = flop / (tp * machine.flops * machine.prefilled)
    volume = 2 * (tp - 1) / tp * batch * model.hidden * BF16 / machine.between(tp)
    exchanged = 2 * model.layers * (volume + 2 * (tp - 1) * machine.hop) if tp > 1 else 0.0
    return max(read, computed) + exchanged + machine.launch


def capacity(model: Model, machine: Machine, task: Task, tp: int = 1) -> int:
    """Episodes that an engine of `tp` GPUs can run at once: their cache beside the weights. Of a group that
    runs together the prompt is there once (prefix cache). 0 if the weights have no room."""
    free = tp * machine.room * machine.memory - BF16 * model.parameters
    episode = model.cache * (task.prompt / task.size + (task.row - task.prompt) / 2)
    return max(0, min(machine.most, int(free / episode)))


def parallel(model: Model, machine: Machine, task: Task) -> int:
    """The fewest GPUs an engine, a power of two in a node, that run 64 episodes at once; 0 if none can."""
    sizes = (2**i for i in range(machine.node.bit_length()) if 2**i <= machine.node)
    return next((tp for tp in sizes if capacity(model, machine, task, tp) >= 64), 0)


def prefilling(model: Model, machine: Machine, task: Task, gpus: float) -> float:
    """Seconds of reading what was not sampled, each token once: a prompt for its group, what tools say."""
    tokens = task.groups * task.prompt + task.episodes * task.turns * task.observed
    flop = tokens * (2 * model.body + 4 * model.layers * model.attended * task.context)
    return flop / (gpus * machine.flops * machine.prefilled)


def sampling(model: Model, machine: Machine, task: Task, gpus: int, tp: int) -> float:
    """Seconds until the last episode of a step has ended, if nothing else runs: the long ones run alone in
    the end. Tools add the waits of one episode, since those of others are filled."""
    engines, batch = gpus // tp, capacity(model, machine, task, tp)
    if not engines or not batch:
        return math.inf
    lengths = task.lengths
    mine = lengths[lengths.index(max(lengths)) % engines :: engines]  # of the engine with the longest
    seconds = sum(
        ticks * decoding(model, machine, running, task.context, tp)
        for ticks, running in _running(mine, batch)
    )
    return seconds + prefilling(model, machine, task, gpus) + task.turns * task.tool_seconds


def _running(lengths: tuple[float, ...], slots: int) -> Iterator[tuple[float, int]]:
    """(tokens that each running episode gets, how many run) until all have ended. A slot takes the next
    episode when it is free."""
    ends = list[float]()
    free = [0.0] * min(slots, len(lengths))
    for length in lengths:
        end = heapq.heappop(free) + length
        heapq.heappush(free, end)
        ends.append(end)
    before, begun = 0.0, 0
    starts = sorted(end - length for end, length in zip(ends, lengths, strict=True))
    for ended, end in enumerate(sorted(ends)):
        while begun < len(starts) and starts[begun] < end:
            begun += 1
        if end > before:
            yield end - before, begun - ended
        before = end


def streaming(model: Model, machine: Machine, task: Task, gpus: int, tp: int) -> float:
    """Seconds a step if engines never run empty: episodes of later batches take the places of those that
    end. Batches are trained in the order of issue, so the longest episode has `level + 1` steps to end: where
    that is too few, an engine that runs fewer at once is faster."""
    engines, most = gpus // tp, capacity(model, machine, task, tp)
    if not engines or not most:
        return math.inf
    return min(_streaming(model, machine, task, engines, tp, most * 0.8**i) for i in range(18))


def _streaming(model: Model, machine: Machine, task: Task, engines: int, tp: int, most: float) -> float:
    flying = task.episodes * (1 + task.level) / engines
    batch = min(most, flying)
    before, tick = 0.0, decoding(model, machine, batch, task.context, tp)
    while abs(batch - before) > 1e-3 * batch:  # only those run that do not wait for a tool (Little's law)
        before, turn = batch, task.reply * tick
        batch = min(most, flying * turn / (turn + task.tool_seconds))
        tick = decoding(model, machine, batch, task.context, tp)
    ends = max(task.lengths) * tick + task.turns * task.tool_seconds
    produced = task.sampled / engines * tick / batch + prefilling(model, machine, task, engines * tp)
    return max(produced, ends / (1 + task.level))


def longest(model: Model, machine: Machine, task: Task, tp: int) -> float:
    """Seconds of the longest episode if it runs alone."""
    return max(task.lengths) * decoding(model, machine, 1, task.context, tp) + task.turns * task.tool_seconds


# --- weights, checkpoints, failures


def transfer(model: Model, machine: Machine, how: str, *, writers: int = 1, readers: int = 1) -> float:
    """Seconds in which new weights reach every engine.

    nccl: one pipelined broadcast, limited by the card of the sender, whatever the number of engines. folder:
    written by `writers` nodes, then read by `readers`. shm: two copies in the memory of one machine, at
    10 GB/s. lora: an adapter of 1 % of the weights as a folder.
    """
    size = BF16 * model.parameters * (0.01 if how == "lora" else 1)
    if how == "nccl":
        return size / (machine.net * machine.moved)
    if how == "shm":
        return 2 * size / 10e9
    if how in ("folder", "lora"):
        write, read = (
            min(machine.disk * writers, machine.storage),
            min(machine.disk, machine.storage / readers),
        )
        return size / write + size / read
    raise ValueError(f"transfer: got {how!r}, expected nccl, folder, shm or lora")


def saving(model: Model, machine: Machine, nodes: int) -> float:
    """Seconds of a checkpoint: master and two moments, each node writes its part."""
    return 3 * FP32 * model.parameters / min(machine.disk * nodes, machine.storage)


@dataclass(frozen=True)
class Endurance:
    """`between`: seconds between failures. `period`: between checkpoints, at which least is lost. `useful`:
    the share of time that is not lost."""

    between: float
    period: float
    useful: float


def endurance(machine: Machine, gpus: int, save: float, period: float | None = None) -> Endurance:
    """Young's first-order rule: a checkpoint every sqrt(2 * save * MTBF) s; a failure costs half a period and
    the restart (Young 1974; Daly 2006, equation 13; ETTR of arXiv:2410.21680, section 4.2).

    Args:
        gpus: whose failure ends training. Engines are replaced while it goes on.
    """
    between = machine.lost * 3600 / gpus
    period = period or math.sqrt(2 * save * between)
    lost = save / period + (period / 2 + machine.restart) / between
    return Endurance(between, period, max(0.0, 1 - lost))


# --- a step


@dataclass(frozen=True)
class Cost:
    """A step in seconds.

    Attributes:
        longest: of `sampling`, what no GPU more would shorten.
        samplers, trainers: GPUs; the same ones, unless `apart`.
        tp: GPUs of an engine. size: GPUs of one copy of what learns (`dp_shard` if cp is 1).
    """

    seconds: float
    sampling: float
    longest: float
    training: float
    transfer: float
    samplers: int
    trainers: int
    tp: int
    size: int
    apart: bool

    @property
    def bottleneck(self) -> str:
        parts = {"sampling": self.sampling, "training": self.training, "weights": self.transfer}
        found = max(parts, key=lambda name: parts[name])
        alone = found == "sampling" and self.longest > 0.8 * self.sampling
        return "the longest episode" if alone else found


def together(model: Model, machine: Machine, task: Task, gpus: int, cp: int = 1) -> Cost:
    """Every GPU samples, then trains: level 0. Weights change hands inside each node, at its link.

    Args:
        cp: GPUs that share each row in training.
    """
    tp = min(gpus, parallel(model, machine, task) or gpus)
    sampled, trained = sampling(model, machine, task, gpus, tp), sharded(model, machine, task, gpus, cp)
    moved = BF16 * model.parameters / machine.between(machine.node)
    size = shard(model, machine, gpus, MICRO, cp)
    alone = longest(model, machine, task, tp)
    return Cost(sampled + trained + moved, sampled, alone, trained, moved, gpus, gpus, tp, size, False)


def apart(
    model: Model, machine: Machine, task: Task, gpus: int, how: str = "nccl", cp: int = 1
) -> Cost | None:
    """Some GPUs sample while the others train on the batch before. None if they are too few.

    A step is as long as the slower side, and both stand still while weights move. Of all splits within 2 % of
    the shortest step, the one with the fewest GPUs: the others may be given back. Beyond one node a side has
    whole ones.
    """
    tp, nodes = parallel(model, machine, task), max(1, gpus // machine.node)
    if not tp:
        return None
    moved = transfer(model, machine, how, writers=(nodes + 1) // 2, readers=(nodes + 1) // 2)
    steps = [n for n in range(1, gpus) if n < machine.node or n % machine.node == 0]
    sampled = {n: streaming(model, machine, task, n, tp) for n in steps if n % tp == 0}
    trained = {n: sharded(model, machine, task, n, cp) for n in steps}
    splits = [(max(s, t), n, m) for n, s in sampled.items() for m, t in trained.items() if n + m <= gpus]
    shortest = min((seconds for seconds, *_ in splits), default=math.inf)
    if math.isinf(shortest):
        return None
    near = [split for split in splits if split[0] <= 1.02 * shortest]
    seconds, n, m = min(near, key=lambda split: (split[1] + split[2], split[0]))
    alone = longest(model, machine, task, tp) / (1 + task.level)
    size = shard(model, machine, m, MICRO, cp)
    return Cost(seconds + moved, sampled[n], alone, trained[m], moved, n, m, tp, size, True)

"""How many GPUs, for what, and what limits a step? The tables of docs/scale.md.

    .venv/bin/python benchmarks/scale.py                                   all tables
    .venv/bin/python benchmarks/scale.py --check                           predictions beside measurements
    .venv/bin/python benchmarks/scale.py --model 32B --gpus 64,128 --task agent --reply 600 --net 25e9

With `--gpus` one table, of this model and task; every number of a task and of the machine is an option.
Nothing is run: the answers come from formulas, whose sources stand in step_cost.py and training_cost.py.
`--check` says how far they are off.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import step_cost
import training_cost
from common import parser, table
from step_cost import Cost
from step_shapes import Machine, Model, Task

from silva.trainer.settings import Parallel

MODELS: Mapping[str, Model] = {  # from their config.json
    "0.6B": Model(0.596e9, 28, 1024, 2048, 1024, 151_936, tied=True),
    "1.7B": Model(1.72e9, 28, 2048, 2048, 1024, 151_936, tied=True),
    "8B": Model(8.19e9, 36, 4096, 4096, 1024, 151_936),
    "32B": Model(32.8e9, 64, 5120, 8192, 1024, 151_936),
    "70B": Model(70.6e9, 80, 8192, 8192, 1024, 128_256),
    "30B-A3B": Model(30.5e9, 48, 2048, 4096, 512, 151_936, active=3.3e9, experts=128, chosen=8),
}
TASKS: Mapping[str, Task] = {
    "maths": Task(groups=128, size=16, prompt=512, turns=1, reply=4096),
    "agent": Task(groups=64, size=16, prompt=2048, turns=12, reply=300, observed=500, tool_seconds=3.0),
    "long": Task(groups=16, size=8, prompt=2048, reply=63_488, spread=0.3, cut=2.0),
}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
H100 = Machine()
TURNS = (
    3700.0  # a second on one core, and KiB of a live episode: RESULTS.md, "The rollout path without a model"
)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="compare with measurements")
    options.add_argument("--model", choices=MODELS, default="8B", help="(default 8B)")
    options.add_argument("--task", choices=TASKS, default="maths", help="(default maths)")
    options.add_argument("--gpus", help="numbers with commas")
    for kind in (Task, Machine):
        for each in dataclasses.fields(kind):
            options.add_argument(
                f"--{each.name.replace('_', '-')}", type=float, help=f"of the {kind.__name__.lower()}"
            )
    given = options.parse_args()
    if given.check:
        print(checked())
    elif given.gpus:
        counts = [int(part) for part in given.gpus.split(",")]
        task, machine = _changed(TASKS[given.task], given), _changed(H100, given)
        print(steps(MODELS[given.model], machine, task, counts))
    else:
        print(*everything(), sep="\n\n")
    return 0


def _changed(base: Any, given: Namespace) -> Any:
    found = {each.name: getattr(given, each.name) for each in dataclasses.fields(base)}
    kinds = {each.name: type(getattr(base, each.name)) for each in dataclasses.fields(base)}
    return replace(base, **{name: kinds[name](value) for name, value in found.items() if value is not None})


def everything() -> list[str]:
    """The tables of docs/scale.md and their headings."""
    shown = {
        "1.7B, maths": (1, 2, 4, 8),
        "8B, maths": GPUS,
        "32B, maths": GPUS,
        "8B, agent": GPUS,
    }
    found = []
    for heading, counts in shown.items():
        model, task = heading.split(", ")
        found += [f"### {heading}", steps(MODELS[model], H100, TASKS[task], counts)]
    tables = {"Levels": levels, "Ways to divide a model": divisions, "What the forest saves": sharing,
              "Weights": transfers, "Failures": failures}  # fmt: skip
    return found + [text for name, make in tables.items() for text in (f"## {name}", make())]


def steps(model: Model, machine: Machine, task: Task, counts: Sequence[int]) -> str:
    """A line for each number of GPUs."""
    head = [
        "GPUs",
        "together",
        "limited by",
        "apart, level 1",
        "sampling + training",
        "limited by",
        "gain",
        "turns/s",
    ]
    lines = []
    for gpus in counts:
        one, two = step_cost.together(model, machine, task, gpus), step_cost.apart(model, machine, task, gpus)
        fast = min(one.seconds, two.seconds if two else one.seconds)
        turns = f"{task.episodes * task.turns / fast:,.0f}"
        lines.append(
            [f"{gpus:,}", *_side(one), *_split(two), f"{one.seconds / two.seconds:.2f}" if two else "", turns]
        )
    return table(head, lines)


def _side(cost: Cost) -> list[str]:
    return [_seconds(cost.seconds), cost.bottleneck] if cost.size else ["no room", ""]


def _split(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["no room", "", ""]
    engines = f"{cost.samplers}" + (f" (tp {cost.tp})" if cost.tp > 1 else "")
    return [_seconds(cost.seconds), f"{engines} + {cost.trainers} (dp_shard {cost.size})", cost.bottleneck]


def sharing() -> str:
    """What a trie saves of training, by the shape of a step."""
    shapes = {
        "16 answers of 4,096 to 512 (maths)": TASKS["maths"],
        "16 answers of 512 to 2,048": Task(prompt=2048, reply=512),
        "8 answers of 256 to 4,096 (documents)": Task(size=8, prompt=4096, reply=256),
        "12 turns of 300 + 500 after 2,048 (agent)": TASKS["agent"],
        "30 turns of 200 + 1,000 after 4,096 (code)": Task(prompt=4096, turns=30, reply=200, observed=1000),
    }
    lines = []
    for name, task in shapes.items():
        flop = [
            training_cost.training_flop(MODELS["8B"], task, tokens=n)
            for n in (task.unique, task.flat, task.a_row_a_turn)
        ]
        lines.append(
            [name, f"{task.flat / task.unique:.2f}", f"{flop[1] / flop[0]:.2f}", f"{flop[2] / flop[0]:.2f}"]
        )
    head = ["step, 8B", "tokens, a row an episode", "FLOP, a row an episode", "FLOP, a row a turn"]
    return table(head, lines)


def levels() -> str:
    """Seconds of a step by level, 8B on 64 and 512 GPUs."""
    lines = []
    for name in ("maths", "agent"):
        for gpus in (64, 512):
            task = TASKS[name]
            found = [step_cost.together(MODELS["8B"], H100, task, gpus).seconds]
            for level in (1, 2, 4):
                split = step_cost.apart(MODELS["8B"], H100, replace(task, level=level), gpus)
                found.append(split.seconds if split else float("inf"))
            lines.append([f"{name}, {gpus} GPUs", *map(_seconds, found)])
    return table(["task", "level 0, together", "level 1", "level 2", "level 4"], lines)


def divisions() -> str:
    """Seconds of a step's updates, by what divides the model among the GPUs that train: the simplest division
    within 2 % of the shortest, and the shortest of those with each way."""
    lines = []
    for name, model, task in (
        ("7B, maths", QWEN_7, TASKS["maths"]),
        ("30B-A3B, maths", MODELS["30B-A3B"], TASKS["maths"]),
        ("7B, 64k tokens", QWEN_7, TASKS["long"]),
    ):
        for gpus in (8, 64, 1024):
            found = training_cost.divided(model, H100, task, gpus)
            near = [each for each in found if each[0] <= 1.02 * found[0][0]]
            seconds, best = min(near, key=lambda each: len(_ways(each[1])))
            by_way = [[s for s, way in found if not _ways(way)]]
            by_way += [[s for s, way in found if of in _ways(way)] for of in ("tp", "pp", "cp", "ep")]
            shortest = [_seconds(each[0]) if each else "" for each in by_way]
            lines.append([name, f"{gpus:,}", _words(best), _seconds(seconds), *shortest])
    return table(
        ["model, step", "GPUs", "division", "its updates", "dp alone", "with tp", "pp", "cp", "ep"], lines
    )


def _ways(way: Parallel) -> list[str]:
    return [name for name in ("tp", "pp", "cp", "ep") if getattr(way, name) > 1]


def _words(way: Parallel) -> str:
    sizes = {name: getattr(way, name) for name in ("dp_replicate", "dp_shard", *_ways(way))}
    words = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return words + (' ("ulysses")' if way.cp_style == "ulysses" else "")


def transfers() -> str:
    """Seconds of a publish, and the share of a step that a folder takes, by GPUs."""
    lines = []
    for name in ("1.7B", "8B", "32B", "70B"):
        model, shares = MODELS[name], []
        for gpus in (64, 512):
            step = step_cost.apart(model, H100, TASKS["maths"], gpus, "folder")
            shares.append(f"{step.transfer / step.seconds:.0%}" if step else "no room")
        found = [
            step_cost.transfer(model, H100, how, writers=4, readers=4) for how in ("nccl", "folder", "lora")
        ]
        lines.append([name, f"{2 * model.parameters / 1e9:.0f} GB", *map(_seconds, found), *shares])
    head = ["model", "weights", "nccl", "folder", "lora", "a folder's share of a step, 64 GPUs", "512 GPUs"]
    return table(head, lines)


def failures() -> str:
    """Useful time by GPUs that train, 8B: at the period where least is lost, and with a checkpoint a step."""
    lines = []
    for gpus in (8, 64, 512, 1024):
        save = step_cost.saving(MODELS["8B"], H100, max(1, gpus // 8))
        for name, lost in (("Llama 3", 50_677.0), ("Meta's clusters", 8_090.0)):
            machine = replace(H100, lost=lost)
            best = step_cost.endurance(machine, gpus, save)
            hourly = step_cost.endurance(machine, gpus, save, period=3600)
            lines.append([
                f"{gpus:,}", name, f"{best.between / 3600:,.0f} h", _seconds(save), _seconds(best.period),
                f"{best.useful:.2%}", f"{hourly.useful:.2%}",
            ])  # fmt: skip
    return table(["GPUs", "rate of", "MTBF", "checkpoint", "best period", "useful", "useful, hourly"], lines)


# --- predictions beside measurements


@dataclass(frozen=True)
class Check:
    """`fitted`: the number from which a share was taken, so that its error says nothing."""

    what: str
    predicted: float
    measured: float
    unit: str
    source: str
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


SMOLLM2 = Model(134.5e6, 30, 576, 576, 192, 49_152, tied=True)
LLAMA = Model(8.03e9, 32, 4096, 4096, 1024, 128_256)
QWEN_05 = Model(0.494e9, 24, 896, 896, 128, 151_936, tied=True)
QWEN_7 = Model(7.62e9, 28, 3584, 3584, 512, 152_064)
RESULTS, TITAN, VLLM = "RESULTS.md", "torchtitan, 12/2024", "vLLM"


def checks() -> list[Check]:
    return [*_cpu(), *_gpus(), *_decoding(), *_asynchronous(), *_weights()]


def checked() -> str:
    lines = []
    for c in checks():
        error = "fitted" if c.fitted else f"{c.error:+.0%}"
        lines.append([c.what, _number(c.predicted, c.unit), _number(c.measured, c.unit), error, c.source])
    return table(["what", "predicted", "measured", "error", "source"], lines)


def _cpu() -> list[Check]:
    """fp32 on two cores: `flops` is the GEMM rate of RESULTS.md, and its share is fitted to one row."""

    def seconds(rate: float, groups: int, prompt: int, reply: int, trained: float) -> float:
        task = Task(groups=groups, size=8, prompt=prompt, reply=reply, scores=0, spread=0)
        return training_cost.training_flop(SMOLLM2, task, recompute=False) / (rate * trained)

    share = seconds(358e9, 1, 256, 32, 1.0) / 1.76
    shared = Task(groups=1, size=8, prompt=256, reply=32, scores=0)
    flat, trie = (
        training_cost.training_flop(SMOLLM2, shared, tokens=n, recompute=False)
        for n in (shared.flat, shared.unique)
    )
    return [
        Check(
            "SmolLM2, 256 + 8 x 32, forward and backward",
            seconds(358e9, 1, 256, 32, share),
            1.76,
            "s",
            RESULTS,
            True,
        ),
        Check("SmolLM2, 64 + 8 x 64", seconds(358e9, 1, 64, 64, share), 2.08, "s", RESULTS),
        Check("SmolLM2, update of 8 x 8 x (256 + 64)", seconds(355e9, 8, 256, 64, share), 22.8, "s", RESULTS),
        Check("SmolLM2, update of 8 x 8 x (64 + 64)", seconds(355e9, 8, 64, 64, share), 15.6, "s", RESULTS),
        Check("the same on AMD Zen 5", seconds(193e9, 8, 64, 64, share), 24.1, "s", RESULTS),
        Check("trie against flat packing, 256 + 8 x 32", flat / trie, 3.64, "x", RESULTS),
    ]


def _gpus() -> list[Check]:
    """FSDP of Llama 3.1 8B without compile: the share is fitted on 8 GPUs, 128 are predicted. And what Silva
    itself has done on one GPU: its tokens with the share of `Machine`, and its MFU from its tokens."""
    machine = Machine(bandwidth=2.4e12, memory=96e9)

    def rate(gpus: int, trained: float) -> float:
        task = Task(groups=2 * gpus, size=1, prompt=0, reply=8192, spread=0, scores=0)
        found = training_cost.training(
            LLAMA, replace(machine, trained=trained), task, gpus, Parallel(), recompute=False
        )
        return task.unique / gpus / found.seconds

    share = 0.35
    for _ in range(20):
        share *= 5762 / rate(8, share)
    small, model = Task(groups=8, size=1, prompt=0, reply=2048, spread=0, scores=0), MODELS["0.6B"]
    flop = training_cost.training_flop(model, small, recompute=False)
    alone = small.unique / training_cost.training(model, H100, small, 1, Parallel(), recompute=False).seconds
    return [
        Check("Llama 8B, FSDP on 8 H100, tokens/s a GPU", rate(8, share), 5762, "/s", TITAN, True),
        Check("Llama 8B, FSDP on 128 H100, tokens/s a GPU", rate(128, share), 5605, "/s", TITAN),
        Check("Silva, 0.6B on one H100, 8 x 2048, tokens/s", alone, 35_856, "/s", RESULTS),
        Check("its MFU", 35_856 * flop / small.unique / H100.flops, 0.155, "", RESULTS),
    ]


def _decoding() -> list[Check]:
    a100 = Machine(flops=312e12, bandwidth=1.555e12, memory=40e9)
    l4 = Machine(flops=121e12, bandwidth=300e9, memory=24e9)

    def ms(model: Model, machine: Machine, batch: int, context: int) -> float:
        return step_cost.decoding(model, machine, batch, context) * 1e3

    return [
        Check("Llama 8B, a token, 1 at once, H100", ms(LLAMA, H100, 1, 300), 6.48, "ms", VLLM, True),
        Check("Llama 8B, a token, 1 at once, A100 40 GB", ms(LLAMA, a100, 1, 1088), 13.3, "ms", VLLM, True),
        Check("Llama 8B, a token, 4 at once, H100", ms(LLAMA, H100, 4, 300), 6.59, "ms", VLLM),
        Check("Qwen2.5 0.5B, a token, 1 at once, L4", ms(QWEN_05, l4, 1, 320), 5.1, "ms", VLLM),
        Check("Qwen2.5 0.5B, a token, 32 at once, L4", ms(QWEN_05, l4, 32, 320), 7.1, "ms", VLLM),
    ]


def _asynchronous() -> list[Check]:
    """DAPO of a 7B with replies of up to 28k tokens on H20, four GPUs a row (Ulysses). Nobody says how long
    replies were: their mean is fitted to the update on 32 GPUs."""
    h20 = Machine(flops=148e12, memory=96e9, bandwidth=4.0e12, trained=0.45)

    def of_replies(mean: int) -> Task:
        return Task(
            groups=512, size=16, prompt=256, reply=mean, updates=16, scores=0, spread=1.0, cut=28_000 / mean
        )

    means = (of_replies(mean) for mean in range(1000, 28_000, 20))
    task = next(task for task in means if training_cost.sharded(QWEN_7, h20, task, 32, cp=4) >= 269.8)
    found = []
    for gpus, sync, update, split in (
        (32, 790.1, 269.8, 294.8),
        (64, 365.3, 133.4, 189.3),
        (128, 356.3, 113.8, 150.6),
    ):
        one = step_cost.together(QWEN_7, h20, replace(task, scores=1), gpus, cp=4)
        two = step_cost.apart(QWEN_7, h20, task, gpus, cp=4)
        assert two is not None
        trained = training_cost.sharded(QWEN_7, h20, task, gpus, cp=4)
        name = f"7B on {gpus} H20"
        found += [
            Check(f"{name}: update", trained, update, "s", "verl", gpus == 32),
            Check(f"{name}: step, together", one.seconds, sync, "s", "verl"),
            Check(f"{name}: step, apart", two.seconds, split, "s", "verl"),
            Check(f"{name}: gain of going apart", one.seconds / two.seconds, sync / split, "x", "verl"),
        ]
    return found


def _weights() -> list[Check]:
    """One sender, where checkpoint-engine has all GPUs of a node send."""
    return [
        Check(name, size / (H100.net * H100.moved), measured, "s", "checkpoint-engine")
        for name, size, measured in (
            ("GLM-4.5-Air, 212 GB to 8 H800", 212e9, 3.47),
            ("Qwen3-235B, 470 GB to 8 H800", 470e9, 6.22),
            ("Kimi-K2, 1,030 GB to 256 H20", 1030e9, 16.04),
        )
    ]


def _number(value: float, unit: str) -> str:
    return (f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}").rstrip()


def _seconds(value: float) -> str:
    if value == float("inf"):
        return "no room"
    return (
        f"{value / 3600:.1f} h" if value >= 7200 else f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"
    )


if __name__ == "__main__":
    sys.exit(main())

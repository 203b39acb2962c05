"""Ranks of a trainer on this machine (gloo), beside what training_cost.py predicts for them.

    .venv/bin/python benchmarks/ranks.py --json ranks.json          five to six minutes
    .venv/bin/python benchmarks/ranks.py --quick                    under a minute, too small to be predicted

Updates of 32 rows of 256 tokens that share nothing, by ways of dividing a model, and a mixture of experts
that does as much for a token (two of eight experts); one thread a rank. First as many processes as there will
be ranks measure the machine, all at once, so that a rate is that of a rank which shares the cores: FLOP/s of
the model's largest product, bytes/s and latency of an all-gather, bytes/s of memory. The share of FLOP/s that
a pass of each model reaches comes from one rank. Everything else is predicted.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import routing
import torch
import torch.distributed as dist
import training_cost
from common import CONFIGS, Row, machine, parser, table, write
from step_shapes import FP32, Machine, Model, Task

from silva.config.load import load
from silva.models.loading import LoadedModel, load_model
from silva.monitoring.busy import cores
from silva.registries import REGISTRIES
from silva.trainer.learner import Learner
from silva.trainer.settings import Parallel
from silva.trainer.sharding.ranks import mesh_of
from silva.types import LossSpec, OptimParams, Sample

LENGTH, ROWS, BUDGET = 256, 32, 2048
UPDATES = 7
EXPERTS, CHOSEN = 8, 2
OF_EXPERTS = "experts, "
"""Begins the names of ways to divide a mixture of experts."""
WAYS: Mapping[int, Mapping[str, Parallel]] = {
    1: {"1 rank": Parallel(), "experts, 1 rank": Parallel()},
    2: {
        "dp_shard 2": Parallel(),
        "dp_replicate 2": Parallel(dp_replicate=2),
        "tp 2": Parallel(tp=2),
        "pp 2": Parallel(pp=2),
        "cp 2": Parallel(cp=2),
        "cp 2, ulysses": Parallel(cp=2, cp_style="ulysses"),
        "experts, dp_shard 2": Parallel(),
        "experts, ep 2": Parallel(ep=2),
    },
    4: {
        "dp_shard 4": Parallel(),
        "dp_shard 2 x tp 2": Parallel(tp=2),
        "dp_shard 2 x pp 2": Parallel(pp=2),
        "dp_shard 2 x cp 2": Parallel(cp=2),
        "experts, dp_shard 4": Parallel(),
        "experts, dp_shard 4, ep 2": Parallel(ep=2),
        "experts, ep 4": Parallel(ep=4),
    },
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="width 64, 2 layers, 3 updates")
    given = options.parse_args()
    if "RANK" in os.environ:
        _rank(given.quick)
        return 0
    speed, words = machine()
    rows, rates, lines, alone = [speed], list[list[str]](), list[list[str]](), 0.0
    reached = dict[bool, float]()  # of a mixture of experts, and not
    for ranks, ways in WAYS.items():
        found = measured(ranks, given.quick)
        here = found["machine"]
        alone = alone or here["flops"]
        rates.append([f"{ranks}", f"{here['flops'] / 1e9:.0f} GFLOP/s", f"{here['link'] / 1e9:.2f} GB/s",
                      f"{here['hop'] * 1e6:.0f} us", f"{here['bandwidth'] / 1e9:.1f} GB/s"])  # fmt: skip
        for name, way in ways.items():
            seconds, kind = found["seconds"][name], name.startswith(OF_EXPERTS)
            if ranks == 1:
                reached[kind] = predicted(ranks, way, here, alone, 1.0, given.quick, kind) / seconds
            expected = predicted(ranks, way, here, alone, reached[kind], given.quick, kind)
            far = f"{expected / seconds - 1:+.0%}" if ranks > 1 else "fitted"
            lines.append([name, f"{ranks}", f"{expected:.2f} s", f"{seconds:.2f} s", far])
            rows += [Row(name, "update", seconds, "s", "predicted", expected / seconds),
                     Row(name, "update, predicted", expected, "s")]  # fmt: skip
    shares = f"share of FLOP/s that one rank reaches: {reached[False]:.2f}, with experts {reached[True]:.2f}"
    print(words, shares, sep="\n", end="\n\n")
    print(table(["ranks", "product", "all-gather", "its latency", "memory"], rates), end="\n\n")
    print(table(["division", "ranks", "predicted", "measured", "error"], lines))
    write(rows, given.json)
    return 0


# --- measuring


def measured(ranks: int, quick: bool) -> dict[str, Any]:
    """What the first of so many processes says."""
    width, layers = _size(quick)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
             "moe_intermediate_size": 4 * width // CHOSEN, "tie_word_embeddings": True}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        routing.make(Path(folder, "experts"), sizes)
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": f"{ranks}",
                            "STORE": f"{folder}/store", "EXPERTS": f"{folder}/experts"}  # fmt: skip
        argv = [sys.executable, __file__, *(["--quick"] if quick else [])]
        started = [
            subprocess.Popen(argv, env=env | {"RANK": f"{rank}"}, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        first, *_ = [each.communicate()[0] for each in started]
    return json.loads(first.splitlines()[-1])  # type: ignore[no-any-return]


def _rank(quick: bool) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        patience = datetime.timedelta(seconds=120)
        dist.init_process_group(
            "gloo", f"file://{os.environ['STORE']}", timeout=patience, rank=rank, world_size=ranks
        )
    here = _machine(ranks, quick)
    seconds = {name: _update(name, way, quick) for name, way in WAYS[ranks].items()}
    if rank == 0:
        print(json.dumps({"machine": here, "seconds": seconds}))
    if ranks > 1:
        dist.destroy_process_group()


def _machine(ranks: int, quick: bool) -> dict[str, float]:
    """Rates over 20 calls at a time, so that a rank does not look as if it had a core of its own."""
    width, _ = _size(quick)
    a, b = torch.rand(BUDGET, width), torch.rand(width, 4 * width)
    whole, copy = torch.rand(2**22), torch.empty(2**22)
    layer = 15 * width**2

    def seconds(work: Callable[[], object]) -> float:
        return min(_timed(lambda: [work() for _ in range(20)], 3)) / 20

    flop = 2 * BUDGET * width * 4 * width
    moved = 2 * whole.nbytes
    found = {"flops": flop / seconds(lambda: a @ b), "bandwidth": moved / seconds(lambda: copy.copy_(whole))}
    found |= {"link": 1.0, "hop": 0.0}
    if ranks > 1:
        others = ranks - 1
        found["link"] = FP32 * layer * others / ranks / seconds(lambda: _gathered(layer // ranks))
        found["hop"] = seconds(lambda: _gathered(1)) / others
    return found


def _gathered(numbers: int) -> None:
    dist.all_gather_single(torch.empty(numbers * dist.get_world_size()), torch.rand(numbers))


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each, which all ranks begin together, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[1:]


def _update(name: str, way: Parallel, quick: bool) -> float:
    """Seconds of one: the shortest, as other programs use the cores too."""
    width, layers = _size(quick)
    argv = [
        f"@{CONFIGS / 'smoke.toml'}", f"--model.width={width}", f"--model.layers={layers}",
        f"--model.context={LENGTH}", f"--trainer.micro_batch_tokens={BUDGET}", "--trainer.self_check=false",
    ]  # fmt: skip
    config = load(argv, REGISTRIES, env={}).config
    settings: Any = config.trainer
    settings = settings.model_copy(update={"parallel": way})
    loaded: LoadedModel = (
        routing.load(Path(os.environ["EXPERTS"]), "float32")
        if name.startswith(OF_EXPERTS)
        else load_model(config.model, seed=1)
    )
    learner = Learner(loaded, settings, seed=1, mesh=mesh_of(way, "cpu"))
    batch = [sample(number, LENGTH) for number in range(ROWS)]

    def update() -> None:
        learner.forward_backward(batch, LossSpec("reinforce"))
        learner.optim_step(OptimParams(1e-4))

    return min(_timed(update, 3 if quick else UPDATES))


def sample(number: int, length: int) -> Sample:
    """Random bytes, all trained."""
    tokens = np.random.default_rng(number).integers(0, 256, length)
    weights = np.ones(length, np.float32)
    weights[0] = 0
    return Sample(
        tokens=tokens, loss_weights=weights, logprobs=np.full(length, -5.0), temperatures=np.ones(length),
        versions=np.zeros(length, np.int64), trajectory=f"t{number}", group="g", advantages=np.ones(length),
    )  # fmt: skip


# --- predicting


def predicted(
    ranks: int,
    way: Parallel,
    measured: Mapping[str, float],
    alone: float,
    reached: float,
    quick: bool,
    experts: bool = False,
) -> float:
    """Seconds of an update.

    Args:
        measured: fields of `Machine`, of one of so many ranks that all work.
        alone: FLOP/s of a rank with a core of its own.
        reached: the share of FLOP/s.
        experts: whether the model is a mixture of them.
    """
    width, layers = _size(quick)
    body = 15.0 * layers * width**2  # keys and values have half of the heads, intermediate is 4 * width
    model = Model(
        body + 262 * width, layers, width, width, width // 2, 262, tied=True, of_head=width // 4, width=FP32
    )
    if experts:  # of which a token has as many parameters as one layer has without
        whole = body + 12.0 * layers * width**2 * (EXPERTS / CHOSEN - 1) + 262 * width
        model = replace(model, parameters=whole, active=model.parameters, experts=EXPERTS, chosen=CHOSEN)
    task = Task(groups=ROWS, size=1, prompt=0, reply=LENGTH, spread=0, scores=0)
    shared = replace(Machine(), **measured, trained=reached, moved=1, hidden=0, node=ranks)  # type: ignore[arg-type]
    found = [
        training_cost.training(model, here, task, ranks, way, micro=BUDGET // way.cp, recompute=False)
        for here in (shared, replace(shared, flops=alone))
    ]
    # Where ranks share cores, others work while a stage waits, but no faster than with a core for each.
    return max(found[0].seconds - found[0].waiting * (ranks > len(cores())), found[1].seconds)


def _size(quick: bool) -> tuple[int, int]:
    """Width and layers."""
    return (64, 2) if quick else (256, 4)


if __name__ == "__main__":
    sys.exit(main())

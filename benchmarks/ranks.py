"""Ranks of a trainer on this machine (gloo), beside what step_cost.py predicts for them.

    .venv/bin/python benchmarks/ranks.py --ranks 1,2,4 --json ranks.json          about two minutes

`silva trainer` with `trainer.ranks` gets updates of 32 rows that share nothing, one thread a rank. FLOP/s of
one thread are those of one rank; more ranks than cores share them. Bytes/s between ranks are those of gloo,
measured before with tensors as large as a layer. So of several ranks everything is predicted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import step_cost
from common import CONFIGS, Row, machine, parser, results, write
from served import served
from step_shapes import Machine, Model, Task

from silva.types import LossSpec, OptimParams, Sample

LENGTH, ROWS, UPDATES, LAYERS = 256, 32, 10, 6
GATHER = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
rank, size, path, numbers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size,
                        timeout=timedelta(seconds=60))
mine, whole, best = torch.rand(numbers // size), torch.empty(numbers // size * size), 1e9
for _ in range(20):
    dist.barrier(); began = time.perf_counter()
    dist.all_gather_into_tensor(whole, mine)
    best = min(best, time.perf_counter() - began)
if rank == 0:
    print(whole.nbytes * (size - 1) / size / best)
"""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", default="1,2,4", help="with commas, 1 first (default 1,2,4)")
    options.add_argument("--width", type=int, default=512, help="of the model (default 512)")
    given = options.parse_args()
    speed, words = machine()
    rows, alone = [speed], 0.0
    for ranks in (int(part) for part in given.ranks.split(",")):
        seconds = measured(ranks, given.width)
        alone = alone or seconds
        link = gathered(ranks, given.width) if ranks > 1 else 0.0
        expected = predicted(ranks, given.width, alone, link)
        rows.append(Row(f"{ranks} ranks", "update", seconds, "s", "predicted", expected / seconds))
        rows.append(Row(f"{ranks} ranks", "update, predicted", expected, "s"))
        if link:
            rows.append(Row(f"{ranks} ranks", "gathering", link / 1e9, "GB/s"))
    print(words, "", results(rows[1:]), sep="\n")
    write(rows, given.json)
    return 0


def measured(ranks: int, width: int) -> float:
    """Seconds of an update: the shortest, as other programs use the cores too."""
    options = [
        "--placement.type=services", "--placement.threads=1",
        *([f"--trainer.ranks={ranks}"] if ranks > 1 else []),
        f"--trainer.micro_batch_tokens={LENGTH * ROWS}", f"--model.width={width}", f"--model.layers={LAYERS}",
        f"--model.context={LENGTH}", "--trainer.self_check=false", "--algorithm.kl_coef=0",
    ]  # fmt: skip
    batch = [sample(number, LENGTH) for number in range(ROWS)]
    with served("trainer", CONFIGS / "smoke.toml", *options) as server:
        session, found = server.opened().session, []
        for _ in range(UPDATES):
            began = time.perf_counter()
            server.call(session, "forward_backward", batch, LossSpec("reinforce"))
            server.call(session, "optim_step", OptimParams(1e-4), None)
            found.append(time.perf_counter() - began)
    return min(found)


def sample(number: int, length: int) -> Sample:
    """Random bytes, all trained."""
    tokens = np.random.default_rng(number).integers(0, 256, length)
    weights = np.ones(length, np.float32)
    weights[0] = 0
    return Sample(
        tokens=tokens, loss_weights=weights, logprobs=np.full(length, -5.0), temperatures=np.ones(length),
        versions=np.zeros(length, np.int64), trajectory=f"t{number}", group="g", advantages=np.ones(length),
    )  # fmt: skip


def gathered(ranks: int, width: int) -> float:
    """Bytes/s of an all-gather of a layer's weights."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(ranks), str(Path(folder) / "store"), str(15 * width**2)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        others = [
            subprocess.Popen(
                [sys.executable, "-c", GATHER, str(rank), *argv], env=env, stdout=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        first, *_ = [float(each.communicate()[0] or 0) for each in others]
    return first


def predicted(ranks: int, width: int, alone: float, link: float) -> float:
    layers = 15.0 * LAYERS * width**2  # keys and values have half of the heads, intermediate is 4 * width
    model = Model(layers + 262 * width, LAYERS, width, width, width // 2, 262, tied=True)
    task = Task(groups=ROWS, size=1, prompt=0, reply=LENGTH, spread=0, scores=0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rate = step_cost.training_flop(model, task, recompute=False) / alone * min(1, cores / ranks)
    here = Machine(flops=rate, trained=1, link=link or 1, moved=1, hop=0, bandwidth=5e9, memory=1e12)
    return step_cost.training(model, here, task, ranks, micro=LENGTH * ROWS, recompute=False, size=ranks)


if __name__ == "__main__":
    sys.exit(main())

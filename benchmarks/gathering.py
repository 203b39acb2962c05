"""Weights that FSDP gathers for each pass through the model, against weights gathered once an update.

    .venv/bin/python benchmarks/gathering.py --json gathering.json          about two minutes

Silva does the first: a rank holds one layer of the model at a time, and all ranks make equally many passes.
The second takes the memory of all weights and of all gradients on every rank (ZeRO-1), and any number of
passes. Both are the same sum: the gradients are compared. Two processes on this machine (gloo), one thread
each, in turn; the fewer tokens a pass has, the more is gathered for each of them.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import CONFIGS, Row, machine, parser, results, write
from ranks import sample
from torch.distributed.fsdp import FSDPModule

from silva.config.load import load
from silva.models.loading import load_model
from silva.registries import REGISTRIES
from silva.trainer.learner import Learner
from silva.trainer.policy import IDLE, pack, token_logprobs
from silva.trainer.sharding.ranks import mesh_of
from silva.types import LossSpec

LENGTH, TOKENS, LAYERS = 64, 4096, 4
LOSS = LossSpec("reinforce")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tokens", default="128,512,2048", help="of a pass (default 128,512,2048)")
    options.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    options.add_argument("--repeats", type=int, default=5, help="pairs of updates (default 5)")
    given = options.parse_args()
    if "RANK" in os.environ:
        _rank(given.width, int(given.tokens), given.repeats)
        return 0
    speed, words = machine()
    rows = [speed]
    for tokens in given.tokens.split(","):
        found = _measured(given.width, tokens, given.repeats)
        case = f"{TOKENS} tokens, {int(TOKENS / int(tokens) / 2)} passes a rank"
        rows += [
            Row(case, "gathered for each pass", found["each"], "s", "once an update", found["ratio"]),
            Row(case, "gathered once an update", found["once"], "s"),
            Row(case, "difference of the gradients", found["difference"], "", target="<= 1e-5"),
        ]
    print(words, "", results(rows[1:]), sep="\n")
    write(rows, given.json)
    return int(any(row.metric.startswith("difference") and row.value > 1e-5 for row in rows))


def _measured(width: int, tokens: str, repeats: int) -> dict[str, float]:
    argv = ["--width", f"{width}", "--tokens", tokens, "--repeats", f"{repeats}"]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2",
                            "STORE": f"{folder}/store"}  # fmt: skip
        ranks = [
            subprocess.Popen([sys.executable, __file__, *argv], env=env | {"RANK": f"{rank}"},
                             stdout=subprocess.PIPE)
            for rank in range(2)
        ]  # fmt: skip
        first, _ = [rank.communicate()[0] for rank in ranks]
    return json.loads(first.splitlines()[-1])  # type: ignore[no-any-return]


def _rank(width: int, tokens: int, repeats: int) -> None:
    rank, patience = int(os.environ["RANK"]), datetime.timedelta(seconds=300)
    dist.init_process_group(
        "gloo", f"file://{os.environ['STORE']}", timeout=patience, rank=rank, world_size=2
    )
    argv = [
        f"@{CONFIGS / 'smoke.toml'}", f"--model.width={width}", f"--model.layers={LAYERS}",
        f"--model.context={LENGTH}", f"--trainer.micro_batch_tokens={tokens}", "--trainer.self_check=false",
    ]  # fmt: skip
    config = load(argv, REGISTRIES, env={}).config
    trainer: Any = config.trainer
    learner = Learner(
        load_model(config.model, seed=1), trainer, seed=1, mesh=mesh_of(trainer.parallel, "cpu")
    )
    batch = [sample(number, LENGTH) for number in range(TOKENS // LENGTH)]
    ways = {"each": lambda: learner.forward_backward(batch, LOSS), "once": lambda: _once(learner, batch)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(repeats + 1):  # the first is not counted
        for way, update in ways.items():
            seconds[way].append(_timed(update))
            parts = [p.grad.full_tensor().flatten() for p in learner.stepper.parameters.values()]  # type: ignore[union-attr]
            gradients[way] = torch.cat(parts)
            learner.drop_gradients()
    if rank == 0:
        each, once = (seconds[way][1:] for way in ("each", "once"))
        far = (gradients["each"] - gradients["once"]).norm() / gradients["each"].norm()
        print(json.dumps({
            "each": statistics.median(each), "once": statistics.median(once), "difference": float(far),
            "ratio": statistics.median(b / a for a, b in zip(each, once, strict=True)),
        }))  # fmt: skip
    dist.destroy_process_group()


def _once(learner: Learner, batch: list[Any]) -> None:
    """Passes without any exchange, then one that adds up what all of them have left."""
    model: Any = learner.loaded.model
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _exchange(model, False)
    for unit in units:
        unit.unshard()
    learner.forward_backward(batch, LOSS)
    _exchange(model, True)
    found = token_logprobs(learner.loaded, pack(learner.loaded, [IDLE]))
    (0 * found.logprobs.sum()).backward()


def _exchange(model: Any, does: bool) -> None:
    model.set_requires_gradient_sync(does)
    model.set_reshard_after_forward(does)
    model.set_reshard_after_backward(does)


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

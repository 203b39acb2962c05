"""Products of linear layers in training: by torch's own float32 (MKL), by oneDNN, and in bfloat16.

    .venv/bin/python benchmarks/products.py --json products.json          under a minute

GFLOP/s of one thread's CPU time, the shortest of seven, for the shapes of SmolLM2-135M: forward, the gradient
of the inputs, and that of the weight. `models/products.py` takes oneDNN on AMD's processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Row, machine, parser, results, write

from silva.models.processor import multiplies_bfloat16
from silva.models.products import onednn

SHAPES = ((512, 576, 1536), (1024, 576, 1536), (1024, 1536, 576), (1024, 576, 192), (128, 576, 49152))
REPEATS = 7


def main() -> int:
    given = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    speed, words = machine()
    rows = [speed]
    for count, inputs, outputs in SHAPES:
        rows += measure(count, inputs, outputs)
    write(rows, given.json)
    print(words, "", results(rows[1:]), sep="\n")
    return 0


@torch.inference_mode()
def measure(count: int, inputs: int, outputs: int) -> list[Row]:
    x, weight, pull = torch.randn(count, inputs), torch.randn(outputs, inputs), torch.randn(count, outputs)
    ways = {
        "forward": (lambda x, w, p: x @ w.T, lambda x, w, p: onednn(x, w)),
        "inputs": (lambda x, w, p: p @ w, lambda x, w, p: onednn(p, w.T)),
        "weight": (lambda x, w, p: p.T @ x, lambda x, w, p: onednn(p.T, x.T)),
    }
    case, work = f"{count} x {inputs} x {outputs}", 2e-9 * count * inputs * outputs
    narrow = tuple(each.bfloat16() for each in (x, weight, pull))
    rows = []
    for name, (plain, by_onednn) in ways.items():
        mkl = work / _shortest(lambda: plain(x, weight, pull))  # noqa: B023
        other = work / _shortest(lambda: by_onednn(x, weight, pull))  # noqa: B023
        rows += [
            Row(case, f"{name}, MKL", mkl, "GFLOP/s"),
            Row(case, f"{name}, oneDNN", other, "GFLOP/s", "MKL", other / mkl),
        ]
        if multiplies_bfloat16():
            half = work / _shortest(lambda: plain(*narrow))  # noqa: B023
            rows.append(Row(case, f"{name}, bfloat16", half, "GFLOP/s", "oneDNN", half / other))
    return rows


def _shortest(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    raise SystemExit(main())

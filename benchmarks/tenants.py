"""Gradients of several LoRA runs of one base model in one pass, against those of one run after the other.

    .venv/bin/python benchmarks/tenants.py --json tenants.json          about five minutes
    .venv/bin/python benchmarks/tenants.py --clients 3 --json clients.json      of a server, 3 steps each

Every run has rows that share a prompt, as a group of samples does, and adapters of rank 16 on all layers.
The two ways take turns, and ratios are medians of neighbours. Seconds are those that this process computed,
on one thread, so other work on the machine counts little. Both ways give every run the same bits: the
gradients are compared. Joint passes hold up to `trainer.micro_batch_tokens` tokens.

With `--clients` the runs are those of clients of `silva serve tinker`, a process of its own: all at once, and
one after the other. Then wall seconds count too, as a client waits between its steps; all log-probabilities
that clients get, of each step and of the weights after the last one, are compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import tenants_clients as clients
import torch
from common import Row, machine, parser, results, write

from silva.config.sections import PretrainedModel
from silva.errors import SilvaError
from silva.models.loading import load_model
from silva.trainer.settings import LocalTrainerSettings
from silva.trainer.tenants import Datum, Pass
from silva.trainer.tenants.learner import Tenants

RANK = 16


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", default="SmolLM2-135M-Instruct", help="(default SmolLM2-135M-Instruct)")
    options.add_argument("--runs", default="4,8", help="how many at once (default 4,8)")
    options.add_argument("--rows", type=int, default=8, help="of a run (default 8)")
    options.add_argument("--tokens", default="64,16", help="of prompts and of answers (default 64,16)")
    options.add_argument("--repeats", type=int, default=5, help="pairs of calls (default 5)")
    options.add_argument(
        "--clients", type=int, default=0, metavar="STEPS", help="clients of a server instead"
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    speed, words = machine()
    counts = [int(count) for count in given.runs.split(",")]
    if given.clients:
        print(words, flush=True)
        length = int(given.tokens.partition(",")[0])
        data = [_data(run, given.rows, length) for run in range(max(counts))]
        rows, equal = clients.measured(given.model, counts, data, given.clients, given.repeats)
        print(results(rows))
        write([speed, *rows], given.json)
        return int(not equal)
    loaded = load_model(PretrainedModel(name=given.model), seed=0)
    learner = Tenants(loaded, LocalTrainerSettings())
    for run in range(max(counts)):
        learner.create(f"{run}", rank=RANK, alpha=32.0, seed=run, attn=True, mlp=True, unembed=False)
    rows, equal = [speed], True
    print(words, f"A pass of any company needs {learner.rule}.", "", sep="\n", flush=True)
    for tokens in map(int, given.tokens.split(",")):
        for count in counts:
            asked = [
                Pass(f"{run}", _data(run, given.rows, tokens), "ppo", {}, backward=True)
                for run in range(count)
            ]
            together, apart, ratio, same = _measured(learner, asked, given.repeats)
            case, equal = f"{count} runs of {given.rows} x ({tokens} + {tokens}) tokens", equal and same
            rows += [
                Row(case, "together", together, "CPU s", "one after the other", ratio),
                Row(case, "one after the other", apart, "CPU s"),
                Row(case, "same gradients, bit for bit", float(same), "", target=">= 1"),
            ]
    print(results(rows[1:]))
    write(rows, given.json)
    return int(not equal)


def _data(seed: int, rows: int, length: int) -> list[Datum]:
    drawn = np.random.default_rng(seed)
    shared = drawn.integers(0, 40_000, length)
    made = []
    for _ in range(rows):
        tokens = np.concatenate([shared, drawn.integers(0, 40_000, length)])
        of_answer = np.arange(len(tokens)) >= length - 1
        inputs = {"logprobs": np.full(len(tokens), -10.0), "advantages": of_answer * drawn.normal()}
        made.append(Datum(tokens, np.append(tokens[1:], 0), inputs))
    return made


def _measured(learner: Tenants, asked: list[Pass], repeats: int) -> tuple[float, float, float, bool]:
    """Seconds together and apart, the median ratio, and whether all gradients are equal, bit for bit."""
    ways: dict[str, Callable[[], Sequence[object]]] = {
        "together": lambda: learner.passes(asked),
        "apart": lambda: [found for each in asked for found in learner.passes([each])],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, bytes] = {}
    for _ in range(repeats + 1):  # the first is not counted
        for way, compute in ways.items():
            began = time.process_time()
            failed = [each for each in compute() if isinstance(each, SilvaError)]
            seconds[way].append(time.process_time() - began)
            if failed:
                raise failed[0]
            gradients = [p.grad for each in asked for p in learner.parameters(each.run).values()]
            found[way] = b"".join(
                gradient.numpy().tobytes() for gradient in gradients if gradient is not None
            )
            for each in asked:
                for parameter in learner.parameters(each.run).values():
                    parameter.grad = None
    together, apart = (seconds[way][1:] for way in ways)
    ratio = statistics.median(b / a for a, b in zip(together, apart, strict=True))
    same = found["together"] == found["apart"] != b""
    return statistics.median(together), statistics.median(apart), ratio, same


if __name__ == "__main__":
    sys.exit(main())

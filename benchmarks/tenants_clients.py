"""Clients of the SDK that share a Tinker server, for benchmarks/tenants.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from common import Row

from silva.trainer.tenants import Datum

KEY = "tml-benchmark"
TICKS = os.sysconf("SC_CLK_TCK")


def measured(
    model: str, counts: Sequence[int], data: Sequence[Sequence[Datum]], steps: int, repeats: int
) -> tuple[list[Row], bool]:
    """So many clients at once against one after the other, in turns; whether all their numbers are equal."""
    os.environ |= {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY}
    rows, equal = list[Row](), True
    with _server(model) as (address, process):
        for count in counts:
            seconds: dict[int, list[tuple[float, float]]] = {count: [], 1: []}
            for _ in range(repeats):
                found = []
                for at_once in seconds:
                    began = time.perf_counter(), _cpu(process)
                    with ThreadPoolExecutor(at_once) as threads:
                        ask = [
                            threads.submit(_client, address, model, n, data[n], steps) for n in range(count)
                        ]
                        found.append([each.result() for each in ask])
                    seconds[at_once].append((time.perf_counter() - began[0], _cpu(process) - began[1]))
                equal = equal and found[0] == found[1]
            for kind, place in (("wall s", 0), ("CPU s of the server", 1)):
                together, apart = ([each[place] for each in seconds[n]] for n in (count, 1))
                ratio = statistics.median(a / b for a, b in zip(together, apart, strict=True))
                case = f"{count} clients, {steps} steps each"
                rows += [
                    Row(case, "at once", statistics.median(together), kind),
                    Row(case, "one after the other", statistics.median(apart), kind),
                    Row(case, f"at once / one after the other, {kind}", ratio, ""),
                ]
            rows.append(Row(case, "same numbers, bit for bit", float(equal), "", target=">= 1"))
    return rows, equal


def _client(address: str, model: str, seed: int, data: Sequence[Datum], steps: int) -> bytes:
    """What one run gets: log-probabilities of each step, and of the weights after the last one."""
    import tinker

    with tinker.ServiceClient(base_url=address) as service:
        run = service.create_lora_training_client(model, rank=16, seed=seed, train_unembed=False).result()
        rows = [_sent(datum) for datum in data]
        asked: list[Any] = []
        for _ in range(steps):
            asked.append(run.forward_backward(rows, "ppo"))
            run.optim_step(tinker.AdamParams(learning_rate=1e-4))
        asked.append(run.forward(rows, "ppo"))
        outputs = [output for each in asked for output in each.result().loss_fn_outputs]
    return b"".join(np.asarray(output["logprobs"].data, np.float32).tobytes() for output in outputs)


def _sent(datum: Datum) -> Any:
    import tinker

    inputs = {
        name: tinker.TensorData(array.astype(np.float32), "float32") for name, array in datum.inputs.items()
    }
    targets = tinker.TensorData(datum.targets, "int64")
    tokens = tinker.ModelInput.from_ints(datum.tokens.tolist())
    return tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, **inputs})


@contextmanager
def _server(model: str) -> Iterator[tuple[str, int]]:
    """Its address and its process."""
    with tempfile.TemporaryDirectory() as state:
        process = subprocess.Popen(
            [sys.executable, "-m", "silva", "serve", "tinker", "--model.name", model, "--port", "0",
             "--state", state],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "listening at" in line)
            yield said.split()[-1], process.pid
        finally:
            process.terminate()
            process.wait()


def _cpu(process: int) -> float:
    """Seconds that it has computed."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
